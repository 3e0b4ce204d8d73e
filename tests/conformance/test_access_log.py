"""The access log of a real server: every failed request of both protocols has a line, and no line has a secret."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as client
from tritonclient.utils import InferenceServerException

from support.calls import ONES, ONES_JSON
from support.models import add_identity
from support.served import add_python
from support.server import RunningServer, start_server, wait_until

SECRET = "hush-hush"
MAX_BODY = 100_000
FAILS_LATE = """
for request in requests:
    sender = request.get_response_sender()
    sender.send(answer(request))
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no more")))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def add_models(repository: Path) -> Path:
    add_identity(repository, "ident")
    add_identity(repository, "slow", extra='parameters { key: "execute_delay_ms" value { string_value: "60000" } }')
    add_python(repository, "broken", 'raise pb_utils.TritonModelException("no\\nluck")')
    add_python(repository, "late", FAILS_LATE, decoupled=True, max_batch_size=0)
    return repository


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start_server(
        tmp_path_factory.mktemp("log"),
        [
            *("--model-repository", add_models(tmp_path_factory.mktemp("models"))),
            *("--model-control-mode=explicit", "--load-model=*", "--log-format=json", "--exit-timeout-secs=1"),
            f"--http-restricted-api=statistics:key={SECRET}",
            f"--grpc-restricted-protocol=statistics:key={SECRET}",
            *(f"--http-max-input-size={MAX_BODY}", f"--grpc-max-input-size={MAX_BODY}"),
        ],
    )
    yield running
    running.stop()
    documents(running)
    assert SECRET not in running.log


def documents(server: RunningServer) -> list[dict[str, Any]]:
    """The lines as JSON, without a last line that is still being written."""
    return [json.loads(line) for line in server.log.splitlines(keepends=True) if line.endswith("\n")]


def lines(server: RunningServer, **wanted: object) -> list[dict[str, Any]]:
    """The access log's lines with these values."""
    found = [each for each in documents(server) if "protocol" in each]
    return [each for each in found if wanted.items() <= each.items()]


def only_line(server: RunningServer, **wanted: object) -> dict[str, Any]:
    wait_until(lambda: lines(server, **wanted), f"a line with {wanted}", server)
    (found,) = lines(server, **wanted)
    return found


def inputs(columns: int = 16) -> list[client.InferInput]:
    tensor = client.InferInput("IN", [1, columns], "FP32")
    tensor.set_data_from_numpy(np.ones((1, columns), np.float32))
    return [tensor]


def test_http_inference_that_fails(served: RunningServer) -> None:
    answer = served.post("/v2/models/ident/infer", {**ONES, "id": "good"})
    assert answer.status == 200
    answer = served.post("/v2/models/ident/versions/1/infer", {"inputs": [], "id": "no input"})
    assert answer.status == 400
    line = only_line(served, request_id="no input")
    assert line["error"] == answer.error
    expected = {
        "level": "INFO",
        "protocol": "http",
        "method": "POST",
        "route": "/v2/models/ident/versions/1/infer",
        "status": "400",
        "model": "ident",
        "version": "1",
    }
    assert expected.items() <= line.items()
    assert line["client"].startswith("127.0.0.1:")
    assert 0 < line["duration_ms"] < 60_000
    # Successes have no line at this level: that request was sent before, and lines are in order.
    assert lines(served, request_id="good") == []


def test_model_that_raises_is_a_warning_with_the_version_that_ran(served: RunningServer) -> None:
    answer = served.post("/v2/models/broken/infer", {**ONES, "id": "raised"})
    assert answer.status == 500
    line = only_line(served, request_id="raised")
    assert (line["level"], line["status"], line["version"]) == ("WARNING", "500", "1")
    assert "no\nluck" in line["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nothing"),
        ("GET", "/v2/models/made-up"),
        ("DELETE", "/v2/health/ready"),
        ("POST", "/v2/repository/models/made-up-too/load"),
        ("POST", "/v2/models/late/infer"),
    ],
)
def test_http_call_that_fails(served: RunningServer, method: str, path: str) -> None:
    answer = served.request(method, f"{path}?token={SECRET}", ONES_JSON if path.endswith("infer") else "")
    assert answer.status >= 400
    line = only_line(served, route=path)
    assert (line["method"], line["status"], line["error"]) == (method, str(answer.status), answer.error)
    assert line.get("model", "") == (path.split("/")[-1 if method == "GET" else -2] if "models" in path else "")


def test_request_that_cannot_be_read(served: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", served.http_port), timeout=30) as raw:
        raw.sendall(f"no HTTP {SECRET}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")
        port = raw.getsockname()[1]
    line = only_line(served, client=f"127.0.0.1:{port}")
    assert (line["status"], line["method"]) == ("400", "")
    assert "malformed HTTP request" in line["error"]


def test_body_that_is_too_large(served: RunningServer) -> None:
    answer = served.post("/v2/models/slow/infer", b"x" * (MAX_BODY + 1))
    assert answer.status == 400
    line = only_line(served, route="/v2/models/slow/infer", status="400")
    assert line["error"] == answer.error


def test_call_without_the_secret(served: RunningServer) -> None:
    assert served.request("GET", "/v2/models/stats", headers={"key": f"{SECRET}?"}).status == 403
    assert only_line(served, status="403")["route"] == "/v2/models/stats"
    assert served.request("GET", "/v2/models/stats", headers={"key": SECRET}).status == 200
    with (
        client.InferenceServerClient(served.grpc_url) as server,
        pytest.raises(InferenceServerException, match="restricted"),
    ):
        server.get_inference_statistics("ident", headers={"triton-grpc-protocol-key": f"{SECRET}?"})
    line = only_line(served, method="ModelStatistics")
    assert (line["status"], "expecting header" in line["error"]) == ("UNAVAILABLE", True)


def test_event_stream_that_ends_with_an_error(served: RunningServer) -> None:
    body = {"IN": [1.0]}
    answer = served.post("/v2/models/late/generate_stream", body)
    assert (answer.status, b"no more" in answer.body) == (200, True)
    line = only_line(served, route="/v2/models/late/generate_stream")
    assert (line["level"], line["status"], line["version"]) == ("WARNING", "200", "1")
    assert "no more" in line["error"]


def test_client_that_leaves_before_its_answer(served: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", served.http_port), timeout=30) as raw:
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(ONES_JSON)}\r\n\r\n"
        raw.sendall(f"{head}{ONES_JSON}".encode())
        port = raw.getsockname()[1]
        # It is executing, so that only the client's disconnect can end it.
        wait_until(lambda: 'halimede_executing_requests{model="slow",version="1"} 1' in served.metrics(), "it", served)
    line = only_line(served, client=f"127.0.0.1:{port}")
    assert (line["status"], line["model"]) == ("499", "slow")


def test_metrics_port(served: RunningServer) -> None:
    assert served.request("POST", "/metrics", port=served.metrics_port).status == 405
    line = only_line(served, protocol="metrics")
    assert (line["method"], line["route"], line["status"]) == ("POST", "/metrics", "405")


def test_grpc_inference_that_fails(served: RunningServer) -> None:
    with client.InferenceServerClient(served.grpc_url) as server:
        server.infer("ident", inputs(), request_id="fine")
        with pytest.raises(InferenceServerException) as refused:
            server.infer("ident", inputs(3), request_id="three")
        with pytest.raises(InferenceServerException):
            server.infer("nowhere", inputs(), request_id="lost", model_version="7")
        with pytest.raises(InferenceServerException):
            server.infer("broken", inputs(), request_id="unlucky")
    line = only_line(served, request_id="three")
    expected = {"protocol": "grpc", "method": "ModelInfer", "status": "INVALID_ARGUMENT", "model": "ident"}
    assert expected.items() <= line.items()
    assert line["error"] == refused.value.message()
    assert line["client"].startswith("127.0.0.1:")
    line = only_line(served, request_id="lost")
    assert (line["status"], line["model"], line["version"]) == ("NOT_FOUND", "nowhere", "7")
    line = only_line(served, request_id="unlucky")
    assert (line["status"], line["version"], line["level"]) == ("INTERNAL", "1", "WARNING")
    assert lines(served, request_id="fine") == []


def test_grpc_call_that_fails(served: RunningServer) -> None:
    with client.InferenceServerClient(served.grpc_url) as server, pytest.raises(InferenceServerException):
        server.get_model_config("absent")
    line = only_line(served, method="ModelConfig")
    assert (line["status"], line["model"]) == ("NOT_FOUND", "absent")
    with grpc.insecure_channel(served.grpc_url) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            channel.unary_unary("/some.Service/Method")(b"", timeout=30)
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert only_line(served, method="Method")["status"] == "UNIMPLEMENTED"


def test_grpc_message_that_is_too_large(served: RunningServer) -> None:
    with client.InferenceServerClient(served.grpc_url) as server, pytest.raises(InferenceServerException):
        server.infer("ident", inputs(MAX_BODY // 4 + 1))
    wait_until(
        lambda: any("--grpc-max-input-size" in each["error"] for each in lines(served, method="ModelInfer")),
        "its line",
        served,
    )


def test_a_grpc_call_past_its_deadline_is_logged(served: RunningServer) -> None:
    with client.InferenceServerClient(served.grpc_url) as server, pytest.raises(InferenceServerException):
        server.infer("slow", inputs(), request_id="impatient", client_timeout=0.5)
    assert only_line(served, request_id="impatient")["status"] in {"DEADLINE_EXCEEDED", "CANCELLED"}


def test_each_failed_request_of_a_stream_has_a_line(served: RunningServer) -> None:
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with client.InferenceServerClient(served.grpc_url) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        for request_id, columns in (("s-1", 16), ("s-2", 3), ("s-3", 16)):
            server.async_stream_infer("ident", inputs(columns), request_id=request_id)
        for _ in range(3):
            answers.get(timeout=30)
        server.stop_stream()
    line = only_line(served, request_id="s-2")
    assert (line["method"], line["status"], line["model"]) == ("ModelStreamInfer", "INVALID_ARGUMENT", "ident")
    assert lines(served, request_id="s-1") + lines(served, request_id="s-3") == []


def test_grpc_stream_that_ends_with_an_error_has_its_own_line(served: RunningServer) -> None:
    answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with client.InferenceServerClient(served.grpc_url) as server:
        server.start_stream(lambda result, error: answers.put((result, error)), headers={"triton_grpc_error": "true"})
        server.async_stream_infer("unknown", inputs(), request_id="s-last")
        answers.get(timeout=30)
        server.stop_stream()
    assert only_line(served, request_id="s-last")["status"] == "NOT_FOUND"
    wait_until(
        lambda: any("model" not in each for each in lines(served, method="ModelStreamInfer", status="NOT_FOUND")),
        "the line of the stream itself",
        served,
    )


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /v2/models/m%d/config", 404),
        ("POST /v2/models/m%d/infer", 404),
        ("POST /v2/models/m%d/versions/99999999999999999999/infer", 400),
        ("POST /v2/models/m%d/versions/99999999999999999999/generate", 400),
    ],
)
def test_failures_of_unknown_models_share_one_limit(served: RunningServer, request_line: str, status: int) -> None:
    total = 600  # fewer than the kinds of lines that the limit distinguishes
    head = f"{request_line} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    of_place = {"file": "http", "line": status}
    before = sum(counted(served, of_place, request_line))
    with socket.create_connection(("127.0.0.1", served.http_port), timeout=30) as raw:
        raw.sendall(b"".join(head % each for each in range(total)))
        received = b""
        while received.count(b"HTTP/1.1 %d " % status) < total:
            received += raw.recv(1 << 16)

    def new() -> int:
        return sum(counted(served, of_place, request_line)) - before

    wait_until(lambda: new() >= total, "all of them to be written or counted", served)
    assert new() == total
    assert counted(served, of_place, request_line)[0] < total


@pytest.mark.parametrize(("version", "status"), [("1", "NOT_FOUND"), ("nine", "INVALID_ARGUMENT")])
def test_failures_of_unknown_models_share_one_limit_over_grpc(served: RunningServer, version: str, status: str) -> None:
    total = 600
    answers: SimpleQueue[Any] = SimpleQueue()
    with client.InferenceServerClient(served.grpc_url) as server:
        server.start_stream(lambda result, error: answers.put((result, error)))
        for each in range(total):
            server.async_stream_infer(f"m{each}", inputs(), model_version=version)
        assert all(answers.get(timeout=30)[1] is not None for _ in range(total))
        server.stop_stream()

    def written_and_left_out() -> tuple[int, int]:
        found = lines(served, method="ModelStreamInfer", status=status)
        written = [each for each in found if each.get("model", "").startswith("m")]
        return len(written), left_out(served, file="grpc", line=grpc.StatusCode[status].value[0])

    wait_until(lambda: sum(written_and_left_out()) >= total, "all of them to be written or counted", served)
    written, omitted = written_and_left_out()
    assert written + omitted == total
    assert written < total


def counted(server: RunningServer, of_place: dict[str, object], request_line: str) -> tuple[int, int]:
    """The number of written lines of these requests, and of suppressed lines of this place."""
    found = [each for each in documents(server) if of_place.items() <= each.items()]
    end = request_line.rpartition("/")[2]
    written = [
        each for each in found if each.get("route", "").startswith("/v2/models/m") and each["route"].endswith(end)
    ]
    return len(written), left_out(server, **of_place)


def left_out(server: RunningServer, **of_place: object) -> int:
    """The number of suppressed lines of this place."""
    found = [each for each in documents(server) if of_place.items() <= each.items()]
    notes = [each for each in found if "more lines like this one were suppressed" in each["message"]]
    return sum(int(each["message"].split()[0]) for each in notes)


def test_all_writes_lines_of_successes_except_probes(tmp_path: Path) -> None:
    add_identity(tmp_path / "models", "ident")
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models", "--log-access=ALL"])
    try:
        assert server.get("/v2/health/ready").status == 200
        assert "nv_inference" in server.metrics()
        with client.InferenceServerClient(server.grpc_url) as other:
            assert other.is_server_ready()
            other.infer("ident", inputs(), request_id="over-grpc")
            assert other.get_model_metadata("ident").name == "ident"
        assert server.post("/v2/models/ident/infer", {**ONES, "id": "over-http"}).status == 200
        assert server.stop() == 0
    finally:
        server.kill()
    found = [line.partition("] ")[2] for line in server.log.splitlines() if "client 127.0.0.1:" in line]
    assert [text.partition(" after ")[0] for text in found] == [
        '"ModelInfer: OK',
        '"ModelMetadata: OK',
        '"POST /v2/models/ident/infer: 200',
    ]
    assert "model 'ident' version 1, id 'over-http'" in found[2]


def test_off_writes_no_lines(tmp_path: Path) -> None:
    add_identity(tmp_path / "models", "ident")
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models", "--log-access=off"])
    try:
        assert server.get("/nothing").status == 404
        with client.InferenceServerClient(server.grpc_url) as other, pytest.raises(InferenceServerException):
            other.infer("nowhere", inputs())
        assert server.stop() == 0
    finally:
        server.kill()
    assert "client 127.0.0.1:" not in server.log
