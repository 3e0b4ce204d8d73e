"""The metrics that autoscalers use: queues, busy time of instances, and open sequences of a running server.

Bounds are sleeps of the models and durations that the client measures, so none depends on the speed of the machine.
"""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import tritonclient.http as httpclient
from prometheus_client.parser import text_string_to_metric_families

from support.background import in_background
from support.calls import executing, pending
from support.durations import ask_stream
from support.models import add_identity, add_scaled, write_config
from support.served import Stage, add_python, body
from support.server import RunningServer, serving, wait_until

SLEEP = 0.2
"""Seconds of each execution."""
SLEEPS = f"time.sleep({SLEEP})\nreturn [answer(request) for request in requests]"
WAITS = """
    while not os.path.exists(NOTES.replace(".notes", ".go")):
        time.sleep(0.005)
    return [answer(request) for request in requests]
"""
STREAMS = f"""
    for request in requests:
        sender = request.get_response_sender()
        time.sleep({SLEEP})
        sender.send(answer(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEQUENCES = "sequence_batching { oldest { max_candidate_sequences: 1 } max_sequence_idle_microseconds: 60000000 }"
QUEUE = "dynamic_batching { default_queue_policy { max_queue_size: 2 allow_timeout_override: true } }"
ENSEMBLE = """
    name: "pipeline" platform: "ensemble" max_batch_size: 8
    input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
      { model_name: "steps" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
    ] }
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with a model of each kind. Each model belongs to one test, after the first."""
    directory = tmp_path_factory.mktemp("load")
    repository = directory / "models"
    repository.mkdir()
    one = "instance_group { kind: KIND_CPU count: 1 }"
    delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{round(SLEEP * 1000)}" }} }}'
    add_identity(repository, "thread", dims="-1", extra=f"{one} {delay}")
    add_python(repository, "process", SLEEPS)
    add_python(repository, "stream", STREAMS, decoupled=True)
    add_python(repository, "session", SLEEPS, extra=SEQUENCES)
    add_scaled(repository, "onnx", 2.0)
    write_config(repository / "onnx", f'name: "onnx" backend: "onnxruntime" max_batch_size: 8 {one}')
    add_python(repository, "long", WAITS, count=2, max_batch_size=1)
    add_python(repository, "bounded", WAITS, max_batch_size=1, extra=QUEUE)
    add_python(repository, "steps", SLEEPS)
    (repository / "pipeline" / "1").mkdir(parents=True)
    write_config(repository / "pipeline", ENSEMBLE)
    with serving(directory, ["--model-repository", repository]) as running:
        yield Stage(running, repository)


def series(server: RunningServer, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of this name by their model and the values of these labels."""
    return {
        (sample.labels["model"], *(sample.labels[label] for label in labels)): sample.value
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if sample.name == name
    }


def infer(server: RunningServer, model: str, **more: object) -> int:
    return server.post(f"/v2/models/{model}/infer", {**body(1.0), **more}).status


def computed(server: RunningServer, model: str) -> float:
    """The seconds of computation of all batches."""
    (stats,) = server.get(f"/v2/models/{model}/stats").json["model_stats"]
    return sum(batch["compute_infer"]["ns"] for batch in stats["batch_stats"]) / 1e9


def test_every_model_has_its_series_at_zero_before_the_first_request(stage: Stage) -> None:
    server = stage.server
    models = ["thread", "process", "stream", "session", "onnx", "long", "bounded", "steps"]
    gauges = ("halimede_queue_requests", "halimede_executing_requests", "halimede_queue_oldest_request_seconds")
    for name in gauges:
        assert series(server, name) == dict.fromkeys([(model,) for model in [*models, "pipeline"]], 0)
    outcomes = ("success", "error", "timeout", "rejected", "cancelled")
    for part in ("sum", "count"):
        found = series(server, f"halimede_queue_duration_seconds_{part}", "outcome")
        assert found == dict.fromkeys([(model, outcome) for model in models for outcome in outcomes], 0)
    instances = [(model, f"{model}_0_{number}", "cpu") for model in models for number in range(1 + (model == "long"))]
    for name in ("halimede_instance_busy_seconds_total", "halimede_instance_busy_ratio"):
        assert series(server, name, "instance", "device") == dict.fromkeys(instances, 0)
    assert series(server, "halimede_sequences_open") == {("session",): 0}
    assert series(server, "halimede_sequence_slots") == {("session",): 1}


@pytest.mark.parametrize("model", ["thread", "process", "stream", "onnx"], ids="of {}".format)
def test_busy_time_is_that_of_the_executions(stage: Stage, model: str) -> None:
    """It includes the way to the instance and back, so it is between the statistics' computation and the client's wait."""
    server = stage.server
    asked = 0.0
    for _ in range(3):
        begun = time.monotonic()
        if model == "stream":
            ask_stream(server, model)
        elif model == "onnx":
            assert server.post(f"/v2/models/{model}/infer", body(1.0, 1.0, 1.0, 1.0)).status == 200
        else:
            assert infer(server, model) == 200
        asked += time.monotonic() - begun
    # The answers of a decoupled model arrive before the end of its batch is counted.
    wait_until(lambda: executions(server, model) == 3, "the end of the executions", server)
    ((_, busy),) = series_of(server, "halimede_instance_busy_seconds_total", model).items()
    least = computed(server, model)
    assert least >= 3 * SLEEP or model == "onnx"
    assert least <= busy <= asked + (0.5 if model == "stream" else 0)


def executions(server: RunningServer, model: str) -> int:
    (stats,) = server.get(f"/v2/models/{model}/stats").json["model_stats"]
    return int(stats["execution_count"])


def series_of(server: RunningServer, name: str, model: str) -> dict[str, float]:
    """The values of a model's instances."""
    found = series(server, name, "instance")
    return {instance: value for (of, instance), value in found.items() if of == model}


def test_an_execution_is_busy_time_before_its_end(stage: Stage) -> None:
    server = stage.server
    calls = [in_background(lambda: infer(server, "long"))]
    wait_until(lambda: executing(server, "long") == 1, "the execution", server)
    first = max(series_of(server, "halimede_instance_busy_seconds_total", "long").values())
    time.sleep(SLEEP)
    shown = series_of(server, "halimede_instance_busy_seconds_total", "long")
    ratios = series_of(server, "halimede_instance_busy_ratio", "long")
    assert sorted(shown) == ["long_0_0", "long_0_1"]
    (idle, busy) = sorted(shown.values())
    assert idle == 0
    assert first + SLEEP <= busy
    assert computed(server, "long") == 0, "the statistics count at the end"
    (idle, ratio) = sorted(ratios.values())
    assert idle == 0
    assert min(15.0, busy) / 16 <= ratio <= 1
    (stage.repository.parent / "long.go").touch()
    assert calls[0].result(30) == 200
    wait_until(lambda: executions(server, "long") == 1, "the end", server)
    ended = series_of(server, "halimede_instance_busy_seconds_total", "long")
    assert max(ended.values()) >= busy
    assert series_of(server, "halimede_instance_busy_seconds_total", "long") == ended, "it is idle now"


def test_the_queue_times_of_every_outcome(stage: Stage) -> None:
    server = stage.server
    calls = [in_background(lambda: infer(server, "bounded"))]
    wait_until(lambda: executing(server, "bounded") == 1, "the execution", server)
    # Two are queued: one has a timeout, and the client of the other disconnects.
    late = in_background(lambda: infer(server, "bounded", parameters={"timeout": 300_000}))
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port)
    connection.request("POST", "/v2/models/bounded/infer", json.dumps(body(1.0)))
    wait_until(lambda: pending(server, "bounded") == 2, "the queue", server)
    assert infer(server, "bounded") == 503, "the queue is full"
    time.sleep(SLEEP)
    connection.close()
    assert late.result(30) == 503
    wait_until(lambda: pending(server, "bounded") == 0, "the queue to be empty", server)
    (stage.repository.parent / "bounded.go").touch()
    assert calls[0].result(30) == 200
    wait_until(lambda: executing(server, "bounded") == 0, "the end", server)

    counts, sums = (
        {
            outcome: value
            for (model, outcome), value in series(server, f"halimede_queue_duration_seconds_{part}", "outcome").items()
            if model == "bounded"
        }
        for part in ("count", "sum")
    )
    assert counts == {"success": 1, "error": 0, "timeout": 1, "rejected": 1, "cancelled": 1}
    assert sums["timeout"] >= 0.3
    assert sums["cancelled"] >= SLEEP
    assert sums["rejected"] < SLEEP, "it did not wait"
    assert sums["success"] < 0.3, "an instance was free"


def test_open_sequences_have_a_slot_or_wait_for_one(stage: Stage) -> None:
    server = stage.server

    def send(sequence: int, *, start: bool = False, end: bool = False) -> None:
        with closing(httpclient.InferenceServerClient(server.http_url.removeprefix("http://"))) as client:
            wanted = httpclient.InferInput("IN", [1, 1], "FP32")
            wanted.set_data_from_numpy(np.ones((1, 1), np.float32))
            client.infer("session", [wanted], sequence_id=sequence, sequence_start=start, sequence_end=end)

    send(1, start=True)
    assert series(server, "halimede_sequences_open") == {("session",): 1}
    second = in_background(lambda: send(2, start=True, end=True))
    wait_until(lambda: series(server, "halimede_sequences_open") == {("session",): 2}, "the second one", server)
    assert pending(server, "session") == 1
    send(1, end=True)
    second.result(30)
    wait_until(lambda: series(server, "halimede_sequences_open") == {("session",): 0}, "the ends", server)
    assert series(server, "halimede_sequence_slots") == {("session",): 1}
    ((_, busy),) = series_of(server, "halimede_instance_busy_seconds_total", "session").items()
    assert busy >= computed(server, "session") >= 3 * SLEEP


def test_an_ensemble_adds_nothing_to_the_sums_over_a_server(stage: Stage) -> None:
    server = stage.server
    call = in_background(lambda: infer(server, "pipeline"))
    wait_until(lambda: executing(server, "steps") == 1, "the step", server)
    assert series(server, "halimede_executing_requests")[("pipeline",)] == 0
    assert series(server, "halimede_ensemble_requests") == {("pipeline",): 1}
    assert call.result(30) == 200
    waits = series(server, "halimede_queue_duration_seconds_count", "outcome")
    assert {key: value for key, value in waits.items() if key[0] in ("pipeline", "steps") and value} == {
        ("steps", "success"): 1
    }
