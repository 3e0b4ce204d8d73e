"""Backends that hang or raise any exception at any step: each affects only its own model."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import load, unload
from support.models import add_scaled
from support.plugin import FaultyBackend
from support.served import Stage
from support.server import RunningServer, Start, serving, wait_until

BODY = {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
UNLOADED = "the model was unloaded while it was loading"
STOP_LIMIT_S = 15
"""A stop without requests in flight takes 2 s, and one that waits for what hangs 25 s; the margin is for a busy machine."""


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> FaultyBackend:
    return FaultyBackend.install(tmp_path_factory.mktemp("backend"))


@pytest.fixture(scope="module")
def shared(backend: FaultyBackend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    repository = tmp_path_factory.mktemp("models")
    add_scaled(repository, "scaled", 2)
    explicit = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=scaled"]
    explicit.append("--unload-wait-secs=5")
    with serving(tmp_path_factory.mktemp("log"), explicit, environment=dict(backend.environment)) as running:
        yield Stage(running, repository)


@pytest.fixture
def stage(shared: Stage) -> Iterator[Stage]:
    """A server for the test's faulty models. They must not affect another model, `scaled`."""
    yield shared
    shared.clear()
    assert (infer(shared.server, "scaled"), ready(shared.server)) == ([2, 4, 6, 8], 200)


@pytest.fixture
def repository(repository: Path) -> Path:
    add_scaled(repository, "scaled", 2)
    return repository


@pytest.fixture
def start(start: Start, backend: FaultyBackend, repository: Path) -> Start:
    def begin(*arguments: str, **options: object) -> RunningServer:
        explicit = ["--model-repository", repository, "--model-control-mode=explicit", *arguments]
        return start(*explicit, environment=dict(backend.environment), **options)

    return begin


def infer(server: RunningServer, model: str) -> object:
    answer = server.post(f"/v2/models/{model}/infer", BODY)
    return answer.json["outputs"][0]["data"] if answer.status == 200 else answer.error


def state(server: RunningServer, model: str) -> tuple[str, str]:
    index = server.post("/v2/repository/index").json
    return next((e.get("state", ""), e.get("reason", "")) for e in index if e["name"] == model)


def ready(server: RunningServer) -> int:
    return server.get("/v2/health/ready").status


def check_is_loading(server: RunningServer, model: str) -> None:
    text = f"Request for unknown model: '{model}' is loading"
    for answer in (server.get(f"/v2/models/{model}"), server.post(f"/v2/models/{model}/infer", BODY)):
        assert (answer.status, answer.error, answer.headers["retry-after"]) == (503, text, "1")
    assert server.get(f"/v2/models/{model}/ready").status == 400
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("IN", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
        for call in (lambda: client.get_model_metadata(model), lambda: client.infer(model, [tensor])):
            with pytest.raises(InferenceServerException) as caught:
                call()
            assert (caught.value.status(), caught.value.message()) == ("StatusCode.UNAVAILABLE", text)


def timed_stop(server: RunningServer) -> tuple[int, bool]:
    """The exit code, and whether the stop ended within its limit."""
    begun = time.monotonic()
    return server.stop(60), time.monotonic() - begun < STOP_LIMIT_S


def test_a_load_that_hangs_affects_only_its_model(stage: Stage, backend: FaultyBackend) -> None:
    server = stage.server
    steps = ("load", "create")
    for step in steps:
        backend.add_model(stage.repository, step, faults={step: "hang"})
    loading = {step: in_background(lambda step=step: load(server, step)) for step in steps}
    for step in steps:
        wait_until(lambda step=step: f"{step} {step}" in " ".join(backend.events(step)), "the hang", server)
        assert state(server, step) == ("LOADING", "")
        check_is_loading(server, step)
    assert (infer(server, "scaled"), unload(server, "scaled"), load(server, "scaled")) == ([2, 4, 6, 8], 200, (200, ""))

    unloading = [in_background(lambda step=step: unload(server, step)) for step in steps]

    assert [each.result(30) for each in unloading] == [200, 200]
    for step in steps:
        assert loading[step].result(30) == (500, f"failed to load '{step}', no version is available")
        assert state(server, step) == ("UNAVAILABLE", f"Unavailable: {UNLOADED}")
        assert ready(server) == 200
        backend.release(step)
        wait_until(lambda step=step: f"closed_model {step}" in backend.events(step), "the late model's close", server)
        assert load(server, step) == (200, "")
        assert infer(server, step) == [1, 2, 3, 4]


@pytest.mark.parametrize("step", ["load", "create"])
def test_a_stop_does_not_wait_for_a_load_that_hangs(
    start: Start, backend: FaultyBackend, repository: Path, step: str
) -> None:
    model = f"stops_{step}"
    backend.add_model(repository, model, faults={step: "hang"})
    server = start("--load-model=scaled", f"--load-model={model}", ready=False)
    wait_until(lambda: f"{step} {model}" in " ".join(backend.events(model)), "the hang", server)
    assert timed_stop(server) == (0, True), server.log


def test_unloading_a_model_that_hangs_at_the_start_lets_the_server_begin(
    start: Start, backend: FaultyBackend, repository: Path
) -> None:
    backend.add_model(repository, "hung", faults={"load": "hang"})
    server = start("--load-model=scaled", "--load-model=hung", "--unload-wait-secs=1", ready=False)
    wait_until(lambda: backend.events("hung") == ["load hung"], "the hang", server)
    assert ready(server) == 400
    assert unload(server, "hung") == 200
    server.wait_ready()
    assert infer(server, "scaled") == [2, 4, 6, 8]


def test_any_exception_of_a_model_becomes_an_answer(stage: Stage, backend: FaultyBackend) -> None:
    server = stage.server
    raised = ["ValueError", "MemoryError", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration"]
    for name in raised:
        for step in ("load", "create", "run"):
            backend.add_model(stage.repository, f"{step}_{name}", faults={step: name})
    for name in raised:
        text = f"{name}: as the test wants it"
        for step in ("load", "create"):
            model = f"{step}_{name}"
            before = f"load failed for model '{model}': version 1 is at UNAVAILABLE state: Internal: "
            assert load(server, model) == (400, f"{before}{text};\n")
            assert state(server, model) == ("UNAVAILABLE", f"Internal: {text}")
        assert load(server, f"run_{name}") == (200, "")
        failed = f"Failed to process the request(s) for model instance 'run_{name}_0_0', message: {text}"
        assert infer(server, f"run_{name}") == failed
        assert unload(server, f"run_{name}") == 200
    assert (infer(server, "scaled"), ready(server)) == ([2, 4, 6, 8], 200)


def test_one_instance_that_does_not_start_fails_the_load(stage: Stage, backend: FaultyBackend) -> None:
    backend.add_model(stage.repository, "three", faults={"create": "ValueError"}, instance="three_0_1", instances=3)
    status, text = load(stage.server, "three")
    assert (status, "ValueError: as the test wants it" in text) == (400, True)
    events = backend.events("three")
    assert events[-1] == "closed_model three"
    assert {e for e in events if e.startswith("closed ")} == {"closed three_0_0", "closed three_0_2"}


def test_a_close_that_raises_is_logged_once_and_ends_the_unload(
    start: Start, backend: FaultyBackend, repository: Path
) -> None:
    backend.add_model(repository, "instance", faults={"close": "ValueError"}, instance="instance_0_0", instances=2)
    backend.add_model(repository, "model", faults={"close_model": "SystemExit"})
    server = start("--load-model=instance", "--load-model=model")
    for model in ("instance", "model"):
        assert unload(server, model) == 200
        wait_until(lambda model=model: state(server, model) == ("UNAVAILABLE", "unloaded"), "the unload", server)
    assert {"closed instance_0_1", "closed_model instance"} <= set(backend.events("instance"))
    assert server.stop() == 0
    assert server.log.count("ValueError: as the test wants it") == 1
    assert server.log.count("SystemExit: as the test wants it") == 1


@pytest.mark.large
def test_an_unload_abandons_a_close_that_hangs(start: Start, backend: FaultyBackend, repository: Path) -> None:
    steps = ("close", "close_model")
    for step in steps:
        backend.add_model(repository, step, faults={step: "hang"}, instances=2, instance=f"{step}_0_0")
    server = start(*(f"--load-model={step}" for step in steps))
    for step in steps:
        assert unload(server, step) == 200
    for step in steps:
        wait_until(lambda step=step: state(server, step) == ("UNAVAILABLE", "unloaded"), "the unload", server)
        assert f"closed {step}_0_1" in backend.events(step)
        text = f"model '{step}' version 1 does not close: it is left behind after 7 s"
        wait_until(lambda text=text: server.log.count(text) == 1, "the line of the log", server)
        assert load(server, step) == (200, "")
        assert infer(server, step) == [1, 2, 3, 4]
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 7 + STOP_LIMIT_S


def test_a_model_that_ends_the_server_process_leaves_a_message(
    start: Start, backend: FaultyBackend, repository: Path
) -> None:
    backend.add_model(repository, "deadly", faults={"load": "exit 7"})
    server = start("--load-model=scaled")
    with pytest.raises(ConnectionError):
        load(server, "deadly")
    assert server.process.wait(20) == 7
