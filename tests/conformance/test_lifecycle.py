"""Life cycle under stress and after failures: loads, reloads, unloads and stops."""

import json
import os
import shutil
import threading
from collections import Counter
from pathlib import Path

import pytest

from support.background import in_background
from support.calls import index, load, scaled, unload
from support.models import add_identity, add_scaled, write_config
from support.plugin import install_backend
from support.served import Stage
from support.server import RunningServer, Start, start_server, wait_until

SLOW = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }} instance_group {{ kind: KIND_CPU count: 1 }}'


@pytest.fixture
def server(stage: Stage) -> RunningServer:
    """Shared, with the model `scaled`."""
    add_scaled(stage.repository, "scaled", 2)
    assert load(stage.server, "scaled") == (200, "")
    return stage.server


@pytest.fixture
def stopping(start: Start, repository: Path) -> RunningServer:
    """A server that the test stops."""
    return start("--model-repository", repository, "--model-control-mode=explicit", "--exit-timeout-secs=2")


def ready(server: RunningServer) -> int:
    return server.get("/v2/health/ready").status


def states(server: RunningServer, model: str) -> dict[str, tuple[str, str]]:
    """State and reason of each version that was loaded."""
    return {version: state for (name, version), state in index(server).items() if name == model and state[0]}


def test_a_broken_new_version_does_not_affect_readiness(stage: Stage) -> None:
    server = stage.server
    add_scaled(stage.repository, "mended", 2)
    assert load(server, "mended") == (200, "")
    add_scaled(stage.repository, "mended", 5, version=2)
    (stage.repository / "mended" / "2" / "model.onnx").write_bytes(b"broken")
    assert load(server, "mended")[0] == 400
    assert (ready(server), scaled(server, "mended")) == (200, 2)
    assert states(server, "mended")["2"][0] == "UNAVAILABLE"
    assert states(server, "mended")["1"][1].startswith("reload failed, the loaded one keeps serving")
    shutil.rmtree(stage.repository / "mended" / "2")
    assert load(server, "mended") == (200, "")
    assert (ready(server), states(server, "mended")) == (200, {"1": ("READY", "")})


def test_a_reload_to_another_version_never_makes_the_server_unready(server: RunningServer, stage: Stage) -> None:
    seen: Counter[int] = Counter()
    stop = threading.Event()

    def probe() -> None:
        while not stop.is_set():
            seen[ready(server)] += 1

    prober = threading.Thread(target=probe)
    prober.start()
    for version in (2, 3, 4):
        add_scaled(stage.repository, "scaled", version, version=version)
        assert load(server, "scaled") == (200, "")
        assert scaled(server) == version
    stop.set()
    prober.join()
    assert set(seen) == {200}
    wait_until(lambda: states(server, "scaled")["1"] == ("UNAVAILABLE", "unloaded"), "the first version to go", server)


def test_an_invalid_backend_affects_only_its_model(tmp_path: Path, repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    environment = install_backend(tmp_path / "site", "half", "class Half:\n    default_model_filename = ''\n", "Half")
    add_identity(repository, "half")
    config = repository / "half" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', '"half"'))
    arguments = ["--model-repository", repository, "--exit-on-error=false", "--strict-readiness=false"]
    server = start_server(tmp_path, arguments, environment=environment)
    try:
        assert scaled(server) == 2
        assert "AttributeError" in str(server.post("/v2/repository/index").json)
    finally:
        assert server.stop() == 0


def test_a_stop_answers_a_load_in_progress(stopping: RunningServer, repository: Path) -> None:
    add_identity(repository, "slow", extra=SLOW.format("creation_delay_sec", 600))
    loading = in_background(lambda: load(stopping, "slow"))
    wait_until(lambda: "loading: slow" in stopping.log, "the load to begin", stopping)
    assert stopping.stop() == 0, stopping.log
    assert loading.result(10) == (503, "Server is stopping, models are no longer loaded or unloaded")


def test_auto_complete_can_be_switched_off(start: Start, repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    server = start("--model-repository", repository, "--disable-auto-complete-config", ready=False)
    assert server.process.wait(20) == 1
    assert "must specify" in server.log or "at least one input" in server.log


def test_an_unchanged_model_is_not_loaded_again(stage: Stage) -> None:
    server = stage.server
    add_scaled(stage.repository, "unchanged", 2)
    for _ in range(2):
        assert load(server, "unchanged") == (200, "")
    os.utime(stage.repository / "unchanged" / "1" / "model.onnx", ns=(1, 1))
    assert load(server, "unchanged") == (200, "")
    assert unload(server, "unchanged") == 200
    # The last line: lines are written in order.
    wait_until(lambda: "successfully unloaded 'unchanged'" in server.log, "the log to be written", server)
    assert server.log.count("successfully loaded 'unchanged'") == 2


def test_json_bodies_of_control_calls_are_checked(server: RunningServer) -> None:
    for path, body in [("scaled/load", "{nope"), ("scaled/unload", '{"parameters":{"unload_dependents":1}}')]:
        answer = server.post(f"/v2/repository/models/{path}", body)
        assert answer.status in {400, 500}
        assert json.loads(answer.body)["error"]
    answer = server.post("/v2/repository/models/scaled/load", {"parameters": {"config": "{}"}})
    assert (answer.status, "not supported yet" in answer.error) == (501, True)
    assert scaled(server) == 2


def test_one_load_reports_all_mistakes_of_a_configuration(server: RunningServer, stage: Stage) -> None:
    write_config(
        stage.repository / "wrong",
        """max_batch_size: -1
nonsense: 1
input [ { name: "IN" data_type: TYPE_FP32 dims: [ 0 ] } ]
output [ { name: "OUT" data_type: TYPE_FP23 dims: [ 4 ] } ]
dynamic_batching { preferred_batch_size: [ -2 ] max_queue_delay_microseconds: x }
sequence_batching { direct { minimum_slot_utilization: 2 } }
instance_group [ { count: -1 } ]""",
    )
    (stage.repository / "wrong" / "1").mkdir()
    answer = server.post("/v2/repository/models/wrong/load")
    assert answer.status == 500
    lines = [part.split(":")[1] for part in answer.error.split("wrong/config.pbtxt")[1:]]
    assert lines == sorted(lines)
    assert set(lines) == {"1", "2", "3", "4", "5", "6", "7"}, answer.error


def test_fields_without_a_value_have_defaults(server: RunningServer, stage: Stage) -> None:
    add_scaled(stage.repository, "partial", 3)
    write_config(stage.repository / "partial", "dynamic_batching { preferred_batch_size: [ 2, 4 ] }")
    assert load(server, "partial") == (200, "")
    assert server.get("/v2/models/partial/config").json["max_batch_size"] == 4
