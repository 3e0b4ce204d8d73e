"""`--watch`: models are reloaded when their files change."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.calls import load, unload
from support.models import add_scaled
from support.served import Stage, add_python, infer, is_loaded, notes_file, write_model
from support.server import RunningServer, Start, serving, wait_until

TIMES = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', value(r) * np.full((1, 1), {}, np.float32))]) for r in requests]"
NOTED = "def initialize(self, args): note('up')"


def answers(server: RunningServer, factor: float, model: str = "m") -> None:
    wait_until(lambda: infer(server, model, 1) == (200, [factor]), f"{factor} of '{model}'", server, 30)


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("watched")
    repository = folder / "models"
    add_python(repository, "other", TIMES.format(7), methods=NOTED)
    arguments = ["--model-repository", repository, "--watch", "--model-control-mode=explicit", "--load-model=*"]
    with serving(folder, arguments) as running:
        yield Stage(running, repository)


@pytest.fixture
def server(watching: Stage) -> Iterator[RunningServer]:
    """With the model `m`, and another one that no test changes."""
    watching.deploy("m", TIMES.format(2), methods=NOTED)
    yield watching.server
    watching.clear()


@pytest.fixture
def repository(watching: Stage) -> Path:
    return watching.repository


def change(repository: Path, factor: object, model: str = "m") -> None:
    """Change only model.py."""
    file = repository / model / "1" / "model.py"
    before, _, _ = file.read_text().partition("    def execute")
    file.write_text(f"{before}    def execute(self, requests):\n        {TIMES.format(factor)}\n")


def starts(repository: Path, model: str) -> int:
    return len(notes_file(repository, model).read_text().splitlines())


def test_a_changed_model_is_reloaded_and_kept_if_the_reload_fails(server: RunningServer, repository: Path) -> None:
    assert infer(server, "m", 1) == (200, [2])
    change(repository, 3)
    answers(server, 3)
    write_model(repository, "m", "import nowhere_to_be_found")
    failed = "model 'm' was not reloaded; the next change of its files starts another reload"
    wait_until(lambda: failed in server.log, "the failed load", server, 30)
    assert "No module named 'nowhere_to_be_found'" in server.log
    assert infer(server, "m", 1) == (200, [3])
    assert server.get("/v2/health/ready").status == 200
    add_python(repository, "m", TIMES.format(4), methods=NOTED)
    answers(server, 4)
    config = repository / "m" / "config.pbtxt"
    config.write_text(config.read_text() + 'parameters { key: "a" value { string_value: "changed" } }')
    wait_until(lambda: "changed" in str(server.get("/v2/models/m/config").json), "the configuration", server, 30)
    assert server.log.count(failed) == 1
    assert starts(repository, "other") == 1


def test_new_version_is_served(server: RunningServer, repository: Path) -> None:
    write_model(
        repository, "m", (repository / "m" / "1" / "model.py").read_text().replace("1), 2,", "1), 5,"), version=2
    )
    answers(server, 5)


def test_editor_files_and_unloaded_models_cause_no_reload(server: RunningServer, repository: Path) -> None:
    log_start = len(server.log)
    # Clients decide in this control mode: a new model is not loaded, and one that is gone is served.
    add_python(repository, "unasked", TIMES.format(1))
    add_python(repository, "gone", TIMES.format(6))
    assert load(server, "gone") == (200, "")
    (repository / "gone").rename(repository.parent / "gone")
    unload(server, "m")
    wait_until(lambda: "successfully unloaded 'm'" in server.log[log_start:], "the unload", server)
    version = repository / "other" / "1"
    (version / ".model.py.swp").write_text("x")
    (version / "model.py~").write_text("x")
    (version / "__pycache__").mkdir(exist_ok=True)
    (version / "__pycache__" / "model.pyc").write_text("x")
    change(repository, 9)
    # A later change has been seen, so these have been seen too.
    add_python(repository, "late", TIMES.format(1))
    assert load(server, "late") == (200, "")
    change(repository, 8, "late")
    answers(server, 8, "late")
    assert starts(repository, "other") == 1
    assert infer(server, "m", 1)[0] == 404
    assert not is_loaded(server, "unasked")
    assert infer(server, "gone", 1) == (200, [6])


def test_requests_are_answered_while_a_model_is_loaded_again(server: RunningServer, repository: Path) -> None:
    change(repository, 3)
    seen = [infer(server, "m", 1)]
    end = time.monotonic() + 30
    while seen[-1] != (200, [3]) and time.monotonic() < end:
        seen.append(infer(server, "m", 1))
    before = seen.index((200, [3]))
    assert before > 0
    assert seen[:before] == [(200, [2])] * before


def test_model_file_without_a_repository_is_watched(tmp_path: Path, start: Start) -> None:
    add_scaled(tmp_path, "a", 2.0)
    add_scaled(tmp_path, "b", 3.0)
    file = tmp_path / "single.onnx"
    file.write_bytes((tmp_path / "a" / "1" / "model.onnx").read_bytes())
    server = start(file, "--watch")

    def factor() -> float:
        inputs = [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]
        return server.post("/v2/models/single/infer", {"inputs": inputs}).json["outputs"][0]["data"][0]

    assert factor() == 2.0
    file.write_bytes((tmp_path / "b" / "1" / "model.onnx").read_bytes())
    wait_until(lambda: factor() == 3.0, "the new file", server, 30)


def test_models_that_are_added_and_removed_are_loaded_and_unloaded(tmp_path: Path, start: Start) -> None:
    repository = tmp_path / "models"
    add_scaled(repository, "kept", 2.0)
    add_scaled(repository, "removed", 2.0)
    server = start("--model-repository", repository, "--watch")
    add_scaled(tmp_path, "added", 3.0)
    (tmp_path / "added").rename(repository / "added")
    wait_until(lambda: is_loaded(server, "added"), "the new model", server, 30)
    (repository / "removed").rename(tmp_path / "removed")
    wait_until(lambda: not is_loaded(server, "removed"), "the unload", server, 30)
    assert is_loaded(server, "kept")
    assert server.get("/v2/health/ready").status == 200
    # A new model that cannot be loaded does not make the server unready, and is tried again when it changes.
    (repository / "wrong" / "1").mkdir(parents=True)
    (repository / "wrong" / "config.pbtxt").write_text("max_batchsize: 1")
    failed = "model 'wrong' was not loaded; the next change of its files starts another load"
    wait_until(lambda: failed in server.log, "the failed load", server, 30)
    assert server.get("/v2/health/ready").status == 200
    (repository / "wrong").rename(tmp_path / "wrong")
    (tmp_path / "removed").rename(repository / "wrong")
    wait_until(lambda: is_loaded(server, "wrong"), "the corrected model", server, 30)
    assert server.log.count(failed) == 1
