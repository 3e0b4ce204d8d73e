"""generate, generate_stream and infer with server-sent events, on a real server with python models."""

import asyncio
import http.client
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import urllib3

from support.calls import canceled, executing, metric
from support.models import add_identity, write_config
from support.processes import resident_bytes
from support.served import workers
from support.server import RunningServer, Start, serving, wait_until

MODEL = '''
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """N answers of SIZE elements, PAUSE_MS apart; the one numbered FAIL_AT is an error."""

    def initialize(self, args):
        family = pb_utils.MetricFamily("nv_trt_llm_kv_cache_block_metrics", "blocks", pb_utils.MetricFamily.GAUGE)
        for kind, value in (("used", 3), ("max", 12), ("tokens_per", 64)):
            family.Metric(labels={"kv_cache_block_type": kind, "model": args["model_name"]}).set(value)
        self.family = family

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request,), daemon=True).start()

    def send(self, request):
        sender = request.get_response_sender()
        count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        parameters = json.loads(request.parameters() or "{}")
        for number in range(count):
            if sender.is_cancelled():
                break
            if parameters.get("fail_at") == number:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("boom", pb_utils.TritonError.UNAVAILABLE)))
                continue
            outputs = [
                pb_utils.Tensor("OUT", np.full(int(parameters.get("size", 1)), number, np.int32)),
                pb_utils.Tensor("TEXT", np.array([f"é\\n{number}".encode()], object)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs, parameters={"sent": json.dumps(parameters, sort_keys=True)}))
            time.sleep(parameters.get("pause_ms", 0) / 1000)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''

EMPTY = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([]))]) for _ in requests]
"""

CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
output { name: "TEXT" data_type: TYPE_STRING dims: 1 }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""


ENSEMBLE = """
platform: "ensemble"
input { name: "COUNT" data_type: TYPE_INT32 dims: 1 }
output { name: "TOKEN" data_type: TYPE_STRING dims: 1 }
ensemble_scheduling {
  step {
    model_name: "tokens" model_version: -1
    input_map { key: "N" value: "COUNT" } output_map { key: "TEXT" value: "TOKEN" }
  }
}
"""


def write_repository(models: Path) -> None:
    for name in ("tokens", "stalled"):
        write_config(models / name, CONFIG)
        (models / name / "1").mkdir()
        (models / name / "1" / "model.py").write_text(MODEL)
    add_identity(models, "ident", datatype="FP32", dims="-1")
    add_identity(models, "text", datatype="BYTES", dims="1")
    (models / "empty" / "1").mkdir(parents=True)
    (models / "empty" / "1" / "model.py").write_text(EMPTY)
    write_config(models / "empty", CONFIG.replace("decoupled: true", "decoupled: false"))
    (models / "pipeline" / "1").mkdir(parents=True)
    write_config(models / "pipeline", ENSEMBLE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    write_repository(models)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models]) as running:
        yield running


def events(body: bytes) -> list[dict[str, Any]]:
    *parts, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(part.startswith(b"data: ") for part in parts)
    return [json.loads(part[6:]) for part in parts]


def stream(server: RunningServer, document: object, model: str = "tokens", **headers: str) -> list[dict[str, Any]]:
    answer = server.post(f"/v2/models/{model}/generate_stream", document, headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    return events(answer.body)


def idle(server: RunningServer, model: str = "tokens") -> None:
    wait_until(lambda: executing(server, model) == 0, f"'{model}' to have nothing to do", server)


# ---- Answers


def test_a_stream_of_tokens(server: RunningServer) -> None:
    assert stream(server, {"N": 3, "id": "a", "parameters": {"k": "v"}}) == [
        {
            "OUT": number,
            "TEXT": f"é\n{number}",
            "id": "a",
            "model_name": "tokens",
            "model_version": "1",
            "sent": '{"k": "v"}',
        }
        for number in range(3)
    ]
    assert stream(server, {"N": 0}) == []
    (sole,) = stream(server, {"IN": [1, 2.5], "id": "b"}, "ident")
    assert sole == {"OUT": [1.0, 2.5], "id": "b", "model_name": "ident", "model_version": "1"}


def test_generate_returns_one_answer_and_refuses_other_numbers(server: RunningServer) -> None:
    answer = server.post("/v2/models/tokens/versions/1/generate", {"N": 1, "size": 2})
    assert answer.status == 200
    assert answer.body == (
        '{"OUT":[0,0],"TEXT":"é\\n0","model_name":"tokens","model_version":"1","sent":"{\\"size\\": 2}"}'.encode()
    )
    assert server.post("/v2/models/text/generate", {"IN": "hé"}).json == {
        "OUT": "hé",
        "model_name": "text",
        "model_version": "1",
    }
    for count in (0, 2, 50):
        refused = server.post("/v2/models/tokens/generate", {"N": count})
        assert (refused.status, refused.error) == (
            400,
            "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
            " number of responses",
        )
    idle(server)


def test_an_empty_array_of_any_datatype_is_an_empty_list(server: RunningServer) -> None:
    """numpy creates it as FP64; the configured type is TYPE_STRING."""
    answer = server.post("/v2/models/empty/generate", {"N": 1})
    assert (answer.status, answer.json) == (200, {"TEXT": [], "model_name": "empty", "model_version": "1"})
    (sole,) = stream(server, {"N": 1}, "empty")
    assert sole["TEXT"] == []


def test_an_error_is_a_status_before_the_first_event_and_an_event_after(server: RunningServer) -> None:
    for verb in ("generate", "generate_stream"):
        refused = server.post(f"/v2/models/tokens/{verb}", {"N": 3, "fail_at": 0})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        if verb == "generate":
            assert (refused.headers["content-type"], refused.error) == ("application/json", "boom")
        else:
            assert refused.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert events(refused.body) == [{"error": "boom"}]
        missing = server.post(f"/v2/models/tokens/{verb}", {})
        assert missing.status == 400
        assert "missing required input(s) ['N']" in missing.error
    assert server.post("/v2/models/tokens/generate", {"N": 3, "fail_at": 1}).status == 503
    *answers, last = stream(server, {"N": 5, "fail_at": 2})
    assert [each["OUT"] for each in answers] == [0, 1]
    assert last == {"error": "boom"}
    idle(server)


def test_an_ensemble_generates_as_its_models_do(server: RunningServer) -> None:
    answers = stream(server, {"COUNT": 40, "id": "e"}, "pipeline")
    assert [each["TOKEN"] for each in answers] == [f"é\n{number}" for number in range(40)]
    assert {(each["id"], each["model_name"]) for each in answers} == {("e", "pipeline")}
    assert stream(server, {"COUNT": 0}, "pipeline") == []
    assert server.post("/v2/models/pipeline/generate", {"COUNT": 1}).json["TOKEN"] == "é\n0"
    assert server.post("/v2/models/pipeline/generate", {"COUNT": 2}).status == 400
    (sole,) = events(server.post("/v2/models/pipeline/generate_stream", {"COUNT": 2, "fail_at": 0}).body)
    assert sole["error"].endswith("boom")


def test_answers_report_the_models_kv_cache_to_load_balancers(server: RunningServer) -> None:
    for verb in ("generate", "generate_stream"):
        answer = server.post(f"/v2/models/tokens/{verb}", {"N": 1}, {"endpoint-load-metrics-format": "json"})
        value = answer.headers["endpoint-load-metrics"].removeprefix("JSON ")
        assert json.loads(value) == {"named_metrics": {"kv_cache_utilization": 0.25, "max_token_capacity": 768}}
        assert "endpoint-load-metrics" not in server.post(f"/v2/models/tokens/{verb}", {"N": 1}).headers


def test_generate_is_counted_as_any_inference(server: RunningServer) -> None:
    before = metric(server, "nv_inference_request_success", "tokens")
    stream(server, {"N": 3})
    server.post("/v2/models/tokens/generate", {"N": 1})
    assert metric(server, "nv_inference_request_success", "tokens") == before + 2
    assert "generate" not in server.get("/v2").json["extensions"]


# ---- Other clients


def test_aiohttp_gets_events_as_soon_as_they_are_sent(server: RunningServer) -> None:
    async def scenario() -> list[float]:
        url = f"http://{server.http_url}/v2/models/tokens/generate_stream"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json={"N": 4, "pause_ms": 150}) as response,
        ):
            assert response.status == 200
            return [time.monotonic() async for line in response.content if line.startswith(b"data: ")]

    at = asyncio.run(scenario())
    assert len(at) == 4
    # Not buffered: the first event arrives about 450 ms before the last.
    assert at[-1] - at[0] > 0.2


def test_connections_are_reused_after_streams(server: RunningServer) -> None:
    with urllib3.HTTPConnectionPool("127.0.0.1", server.http_port, maxsize=1, block=True) as pool:
        for number in range(5):
            answer = pool.request(
                "POST", "/v2/models/tokens/generate_stream", json={"N": number}, preload_content=False, timeout=20
            )
            assert len(events(answer.read())) == number
            answer.release_conn()
            assert pool.request("POST", "/v2/models/tokens/generate", json={"N": 1}, timeout=20).status == 200
        assert pool.num_connections == 1


# ---- Clients that disconnect, and clients that do not read


def leave_at_random_points(server: RunningServer, count: int) -> None:
    """Each client closes after some bytes of its answer: none, a part of the head, of an event, or some events."""
    chance = random.Random(7)
    paths = ["/v2/models/tokens/generate_stream", "/v2/models/tokens/generate", "/v2/models/tokens/infer"]
    for _ in range(count):
        path = chance.choice(paths)
        parameters: dict[str, Any] = {"pause_ms": chance.choice([0, 1]), "size": chance.choice([1, 100, 30_000])}
        if path.endswith("infer"):
            tensor = {"name": "N", "shape": [1], "datatype": "INT32", "data": [100_000]}
            document = {"inputs": [tensor], "parameters": parameters}
        else:
            document = {"N": 100_000, **parameters}
        body = json.dumps(document).encode()
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=20) as connection:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            left = chance.choice([0, 0, chance.randrange(400), chance.randrange(100_000)])
            while left > 0 and not path.endswith("generate"):
                left -= len(connection.recv(min(left, 1 << 16)))


def check_closes(server: RunningServer, count: int) -> None:
    leave_at_random_points(server, count // 4)
    idle(server)
    before, failed = resident_bytes(server), canceled(server, "tokens")
    leave_at_random_points(server, count)
    idle(server)
    # A disconnect cancelled all requests but those of `generate`, which fail at their second answer before it.
    assert canceled(server, "tokens") - failed > count // 2
    assert "Traceback" not in server.log, server.log
    # Goal: no growth. The allocator keeps the memory of large answers for some time.
    assert resident_bytes(server) - before < 48 << 20
    assert [each["OUT"] for each in stream(server, {"N": 3})] == [0, 1, 2]


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.large)])
def test_clients_that_disconnect_at_any_point_leave_nothing_behind(server: RunningServer, count: int) -> None:
    check_closes(server, count)


@pytest.mark.load
@pytest.mark.timeout(600)
def test_a_thousand_disconnecting_clients_leave_nothing_behind(server: RunningServer) -> None:
    check_closes(server, 1000)


def test_a_client_that_does_not_read_stalls_only_its_model(server: RunningServer) -> None:
    """Answers of 1.2 MB of JSON, 2 GB in total; the connection's buffers and the model's window bound the memory."""
    body = json.dumps({"N": 2_000, "size": 400_000}).encode()
    with ExitStack() as stack:
        before = resident_bytes(server)
        for _ in range(4):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.http_port))
            head = f"POST /v2/models/stalled/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
        sent: list[int] = []

        def has_stalled() -> bool:
            stats = server.get("/v2/models/stalled/stats").json["model_stats"][0]["response_stats"]
            sent.append(sum(each["success"]["count"] for each in stats.values()))
            time.sleep(0.1)
            return len(sent) > 10 and sent[-1] > 0 and sent[-10] == sent[-1]

        wait_until(has_stalled, "the models to be blocked", server)
        assert executing(server, "stalled") == 4
        # Per client: 8 MiB in the model's window, some MB in the two sockets and in the connection's buffer.
        assert sent[-1] < 4 * 20
        assert resident_bytes(server) - before < 160 << 20
        # Other clients are not affected.
        for _ in range(10):
            assert len(stream(server, {"N": 20})) == 20
    idle(server, "stalled")


# ---- Ends


@pytest.fixture
def draining(start: Start, tmp_path: Path) -> RunningServer:
    models = tmp_path / "models"
    models.mkdir()
    write_repository(models)
    return start("--model-repository", models, "--exit-timeout-secs=3")


@contextmanager
def begun(server: RunningServer, document: object) -> Iterator[http.client.HTTPResponse]:
    """A stream whose first event has arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=30)
    with closing(connection):
        connection.request("POST", "/v2/models/tokens/generate_stream", json.dumps(document))
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        assert response.readline() == b"\n"
        yield response


def test_a_stop_lets_streams_finish(draining: RunningServer) -> None:
    with begun(draining, {"N": 10, "pause_ms": 100}) as response:
        draining.process.send_signal(signal.SIGTERM)
        assert [each["OUT"] for each in events(response.read())] == list(range(1, 10))
    assert draining.process.wait(20) == 0, draining.log


def test_at_the_limit_a_stream_ends_with_an_error_event(draining: RunningServer) -> None:
    with begun(draining, {"N": 100_000, "pause_ms": 50}) as response:
        draining.process.send_signal(signal.SIGTERM)
        *_, last = events(response.read())
    assert "Server is stopping" in last["error"]
    assert draining.process.wait(20) == 1


def test_the_death_of_a_worker_is_the_last_event(server: RunningServer) -> None:
    with begun(server, {"N": 100_000, "pause_ms": 5}) as response:
        for worker in workers(server, "tokens"):
            worker.kill()
        *_, last = events(response.read())
    assert "is not healthy" in last["error"]


def test_restrictions_and_forwarded_headers_are_those_of_inference(start: Start, repository: Path) -> None:
    write_repository(repository)
    server = start(
        *("--model-repository", repository, "--http-restricted-api=inference:key=secret"),
        "--http-header-forward-pattern=x-.*",
    )
    for verb in ("generate", "generate_stream"):
        refused = server.post(f"/v2/models/tokens/{verb}", {"N": 1})
        assert (refused.status, refused.error) == (403, "This API is restricted, expecting header 'key'")
        answer = server.post(f"/v2/models/tokens/{verb}", {"N": 1, "x-b": 2}, {"key": "secret", "X-A": "1", "x-b": "0"})
        assert json.loads(json.loads(answer.body.removeprefix(b"data: "))["sent"]) == {"X-A": "1", "x-b": 2}
