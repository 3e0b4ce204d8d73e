"""Queues, batches, deadlines and cancellation, as a client of the running server sees them."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import ONES_JSON, executing, metric, pending
from support.models import add_identity
from support.plugin import PLAIN_BACKEND, install_backend
from support.server import Answer, RunningServer, start_server, wait_until

ONE = "instance_group { kind: KIND_CPU count: 1 }"


def delay(milliseconds: int) -> str:
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{milliseconds}" }} }}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(
        models,
        "bounded",
        extra=f"{ONE} {delay(700)} dynamic_batching {{ preferred_batch_size: [ 1 ] default_queue_policy {{ max_queue_size: 2 }} }}",
    )
    passive = "instance_group { kind: KIND_CPU count: 3 passive: true }"
    add_identity(models, "watched", max_batch_size=1, extra=f"{ONE} {passive} {delay(400)}")
    add_identity(models, "delayed", extra=f"{ONE} dynamic_batching {{ max_queue_delay_microseconds: 400000 }}")
    add_identity(models, "quick", extra=f"{ONE} dynamic_batching {{ default_queue_policy {{ max_queue_size: 100 }} }}")
    add_identity(models, "text", datatype="BYTES", dims="-1")
    running = start_server(tmp_path_factory.mktemp("log"), ["--model-repository", models, "--exit-timeout-secs=2"])
    yield running
    running.stop()


def infer(server: RunningServer, model: str) -> Answer:
    return server.post(f"/v2/models/{model}/infer", ONES_JSON)


def stats(server: RunningServer, model: str) -> dict:
    return server.get(f"/v2/models/{model}/stats").json["model_stats"][0]


def test_statistics_keep_the_identities_that_perf_analyzer_needs(server: RunningServer) -> None:
    before = stats(server, "quick")
    calls = [in_background(lambda: infer(server, "quick")) for _ in range(20)]
    assert {call.result(30).status for call in calls} == {200}
    after = stats(server, "quick")
    success = after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"]
    assert success == 20
    for part in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert after["inference_stats"][part]["count"] == after["inference_stats"]["success"]["count"]
    assert after["inference_count"] == sum(b["batch_size"] * b["compute_infer"]["count"] for b in after["batch_stats"])
    assert after["execution_count"] == sum(b["compute_infer"]["count"] for b in after["batch_stats"])
    assert metric(server, "nv_inference_count", "quick") == after["inference_count"]
    assert metric(server, "nv_inference_request_success", "quick") == after["inference_stats"]["success"]["count"]


def test_a_full_queue_is_refused_at_once_with_a_hint_to_retry(server: RunningServer) -> None:
    calls = [in_background(lambda: infer(server, "bounded"))]
    wait_until(lambda: executing(server, "bounded") == 1, "the execution", server)
    calls += [in_background(lambda: infer(server, "bounded")) for _ in range(2)]
    wait_until(lambda: pending(server, "bounded") == 2, "a full queue", server)
    refused = infer(server, "bounded")
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.error == "[request id: <id_unknown>] Exceeds maximum queue size"
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("IN", [1, 16], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as caught:
            client.infer("bounded", [tensor], request_id="r1")
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert caught.value.message() == "[request id: r1] Exceeds maximum queue size"
    assert {call.result(30).status for call in calls} == {200}
    assert metric(server, "nv_inference_request_failure", "bounded", 'reason="REJECTED",') == 2


def test_a_single_request_waits_for_the_configured_queue_delay(server: RunningServer) -> None:
    begun = time.monotonic()
    assert infer(server, "delayed").status == 200
    assert time.monotonic() - begun >= 0.4


def test_a_queue_policy_does_not_stall_the_model(server: RunningServer) -> None:
    """With a queue bound, Triton forms batches only at a 500 ms poll: ten requests in sequence take seconds there."""
    waits = []
    for _ in range(50):
        begun = time.monotonic()
        assert infer(server, "quick").status == 200
        waits.append(time.monotonic() - begun)
    assert sorted(waits)[len(waits) // 2] < 0.25


def test_passive_instances_are_loaded_and_get_no_requests(server: RunningServer) -> None:
    calls = [in_background(lambda: infer(server, "watched")) for _ in range(2)]
    wait_until(lambda: pending(server, "watched") == 1, "one to run and one to wait", server)
    assert executing(server, "watched") == 1
    assert [call.result(30).status for call in calls] == [200, 200]


BACKEND = (
    PLAIN_BACKEND
    + """
import numpy as np

class Instance:
    def run(self, inputs, outputs, context):
        return {"OUT": inputs["IN"][:, ::-1].copy()}
    def close(self):
        pass

class Model:
    def create_instance(self, placement):
        return Instance()
    def close(self):
        pass

class ReverseBackend(PlainBackend):
    def load(self, config, source):
        return Model()
"""
)


def test_a_third_party_backend_is_found_by_its_entry_point(tmp_path: Path) -> None:
    add_identity(tmp_path / "models", "mirror", dims="3")
    config = tmp_path / "models" / "mirror" / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', '"reverse"'))
    environment = install_backend(tmp_path / "site", "reverse", BACKEND, "ReverseBackend")
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models"], environment=environment)
    try:
        body = {"inputs": [{"name": "IN", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}]}
        answer = server.post("/v2/models/mirror/infer", body)
        assert answer.json["outputs"][0]["data"] == [3.0, 2.0, 1.0, 6.0, 5.0, 4.0]
        assert server.get("/v2/models/mirror/config").json["backend"] == "reverse"
    finally:
        assert server.stop() == 0


def test_a_request_with_a_slow_check_does_not_delay_others(server: RunningServer) -> None:
    """A million strings: the server answers other requests during the check, and then answers correctly."""
    count = 1_000_000
    payload = (b"\1\0\0\0a" + b"\2\0\0\0bc") * (count // 2)
    tensor = {
        "name": "IN",
        "shape": [1, count],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": len(payload)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    large = in_background(lambda: server.post("/v2/models/text/infer", head + payload, headers))
    probes = 0
    while not large.done():
        assert server.get("/v2/health/live").status == 200
        probes += 1
    assert large.result().status == 200
    assert large.result().body.endswith(payload)
    assert probes >= 5
    broken = server.post("/v2/models/text/infer", head + payload[:-1], headers)
    assert broken.status == 400
    wrong = payload[:-6] + b"\3" + payload[-5:]
    refused = server.post("/v2/models/text/infer", head + wrong, headers)
    assert (refused.status, "incomplete string data" in refused.error) == (400, True)
    assert executing(server, "text") == 0
