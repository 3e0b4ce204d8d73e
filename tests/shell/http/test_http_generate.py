"""generate, generate_stream and infer with server-sent events; the test sends the answers one by one."""

import asyncio
import http.client as http_client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.frontends.http.framing import Limits
from halimede.frontends.port import PortLimits
from support.calls import DECOUPLED_OVER_HTTP

STREAM = "/v2/models/live/generate_stream"
INFER = "/v2/models/live/infer"
IN = b'{"IN":[1.0]}'
TENSOR = b'{"id":"i","inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}]}'
EVENTS = {"Accept": "text/event-stream"}
BROKEN = InferenceError(ErrorCode.INTERNAL, "the model broke")
BUSY = InferenceError(ErrorCode.UNAVAILABLE, "later")


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


class Client:
    """An http.client client that reads events as they arrive."""

    def __init__(self, running: Any) -> None:
        self.running = running
        self.http = http_client.HTTPConnection("127.0.0.1", running.port, timeout=20)
        self.response: http_client.HTTPResponse

    def ask(self, path: str = STREAM, body: bytes = IN, headers: dict[str, str] | None = None) -> "Client":
        """Send a request, and return when the server has it."""
        count = len(self.running.core.requests)
        self.http.request("POST", path, body, headers or {})
        self.running.wait_until(lambda: len(self.running.core.requests) > count)
        return self

    def begin(self) -> http_client.HTTPResponse:
        self.response = self.http.getresponse()
        return self.response

    def event(self) -> Any:
        line = self.response.readline()
        assert line.startswith(b"data: "), line
        assert self.response.readline() == b"\n"
        return json.loads(line[6:])

    def is_over(self) -> bool:
        return self.response.read() == b""


@pytest.fixture
def client(http: Any) -> Iterator[Client]:
    made = Client(http)
    yield made
    made.http.close()


def give(running: Any, *values: float, **how: Any) -> None:
    running.call(lambda: running.core.give(*values, **how))


def give_while_wanted(running: Any, *values: float) -> None:
    """Like `give`, for a request that may have been cancelled."""
    running.call(lambda: running.core.held and running.core.give(*values))


def values(first: float) -> dict[str, Any]:
    return {"OUT": first, "model_name": "live", "model_version": "1"}


def test_each_answer_is_an_event_at_once_and_acknowledged(http: Any, client: Client) -> None:
    client.ask()
    give(http, 1.0)
    response = client.begin()
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
    assert (response.headers["Cache-Control"], response.headers["Transfer-Encoding"]) == ("no-cache", "chunked")
    assert "Content-Length" not in response.headers
    assert client.event() == values(1.0)
    # The next answer is sent only after this one has been read.
    give(http, 2.0)
    assert client.event() == values(2.0)
    assert http.core.acknowledged == [1, 1]
    give(http, final=True)
    assert client.is_over()
    assert http.core.cancelled == []


def test_an_answer_is_a_chunk(http: Any) -> None:
    with http.connect() as connection:
        body = b'{"IN":1}'
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (STREAM.encode(), len(body), body)
        )
        http.wait_until(lambda: len(http.core.held) == 1)
        give(http, 1.0)
        give(http, 2.0, final=True)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += connection.recv(1 << 16)
    first, second = (b'data: {"OUT":%d.0,"model_name":"live","model_version":"1"}\n\n' % n for n in (1, 2))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (first, second))
    assert received.partition(b"\r\n\r\n")[2] == chunks + b"0\r\n\r\n"


def test_no_answer_at_all_is_an_empty_stream(http: Any, client: Client) -> None:
    client.ask()
    give(http, final=True)
    assert client.begin().status == 200
    assert client.is_over()


def test_a_first_error_has_its_own_status_and_ends_the_stream(http: Any, client: Client) -> None:
    for error, status, final in ((BROKEN, 500, False), (BUSY, 503, True)):
        client.ask()
        give(http, error=error, final=final)
        response = client.begin()
        assert (response.status, response.headers["Content-Type"]) == (status, "text/event-stream; charset=utf-8")
        assert response.headers.get("Retry-After") == ("1" if status == 503 else None)
        assert response.read() == f'data: {{"error":"{error.message}"}}\n\n'.encode()
    # The rest of the request is cancelled.
    http.wait_until(lambda: http.core.cancelled == [1])


def test_a_later_error_is_the_last_event(http: Any, client: Client) -> None:
    client.ask()
    give(http, 1.0)
    give(http, error=BROKEN)
    assert client.begin().status == 200
    assert client.event() == values(1.0)
    assert client.event() == {"error": "the model broke"}
    assert client.is_over()
    http.wait_until(lambda: http.core.cancelled == [1])


def test_an_answer_that_json_cannot_represent_is_an_error(http: Any, client: Client) -> None:
    client.ask()
    strings = Tensor("OUT", DataType.BYTES, (1,), b"\1\0\0\0\xff")
    http.call(lambda: http.core.held[1][1](InferenceResponse("live", "1", outputs=[strings], final=False)))
    response = client.begin()
    assert response.status == 400
    assert "not UTF-8" in client.event()["error"]
    assert client.is_over()
    http.wait_until(lambda: http.core.cancelled == [1])


def test_an_error_before_the_request_is_accepted_is_not_an_event(http: Any) -> None:
    for path, body, status in (
        ("full/generate_stream", IN, 503),
        ("broken/generate_stream", IN, 500),
        ("live/generate_stream", b"{nope", 400),
        ("none/generate_stream", IN, 404),
    ):
        answer = http.ask("POST", f"/v2/models/{path}", body)
        assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
        assert "error" in json.loads(answer.body)


def test_the_connection_is_used_again_after_a_stream(http: Any, client: Client) -> None:
    for number in range(3):
        client.ask()
        give(http, float(number), final=True)
        client.begin()
        assert client.event() == values(float(number))
        assert client.is_over()
        client.http.request("GET", "/v2/health/live")
        assert client.http.getresponse().read() == b""
    assert http.listener.port.connection_count == 1


def test_pipelined_requests_wait_for_the_end_of_a_stream(http: Any) -> None:
    with http.connect() as connection:
        stream = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (STREAM.encode(), len(IN), IN)
        connection.sendall(stream + b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        http.wait_until(lambda: len(http.core.held) == 1)
        give(http, 1.0)
        give(http, final=True)
        received = read_all(connection)
    events, answer = received.split(b"0\r\n\r\n")
    assert events.count(b"data: ") == 1
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("connection_field", [b"", b"Connection: keep-alive\r\n"])
def test_a_client_of_http_1_0_gets_no_chunks_and_a_closed_connection(http: Any, connection_field: bytes) -> None:
    with http.connect() as connection:
        head = b"POST %b HTTP/1.0\r\n%bContent-Length: %d\r\n\r\n" % (STREAM.encode(), connection_field, len(IN))
        connection.sendall(head + IN)
        http.wait_until(lambda: len(http.core.held) == 1)
        give(http, 1.0)
        give(http, 2.0, final=True)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"Transfer-Encoding" not in head
    assert b"Connection: close" in head
    assert [json.loads(each[6:])["OUT"] for each in body.split(b"\n\n")[:-1]] == [1.0, 2.0]


def test_a_client_that_disconnects_cancels_its_inference(http: Any) -> None:
    for ticket, answers in enumerate((0, 1, 3), 1):
        client = Client(http).ask()
        for number in range(answers):
            give(http, float(number))
        if answers:
            client.begin()
            client.event()
            client.response.close()
        client.http.close()
        http.wait_until(lambda ticket=ticket: http.core.cancelled == list(range(1, ticket + 1)))
        assert http.core.held == {}


def unread(running: Any) -> socket.socket:
    """A stream whose client reads almost nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", running.port))
    connection.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (STREAM.encode(), len(IN), IN))
    running.wait_until(lambda: bool(running.core.held))
    return connection


def fill(running: Any, answers: int = 200) -> int:
    """Send answers of 100 KB until one is not acknowledged; returns their number."""
    for given in range(1, answers + 1):
        give(running, *[0.5] * 15_000)
        if len(running.core.acknowledged) < given:
            return given
    raise AssertionError(f"{answers} answers were acknowledged to a client that reads nothing")


def test_answers_that_a_client_does_not_read_are_not_acknowledged(serve: Any) -> None:
    running = serve(limits=Limits(write_buffer_bytes=64 << 10))
    with unread(running) as connection:
        given = fill(running)
        for _ in range(10):
            give(running, *[0.5] * 15_000)
        assert len(running.core.acknowledged) == given - 1
        # Waiting parts count as unsent: 60,000 bytes each.
        waiting = running.call(lambda: running.listener.shared.unsent_bytes)
        assert 600_000 <= waiting < 600_000 + (1 << 20)
        give(running, final=True)
        # After reading, all answers have arrived in order, and all but the last have been acknowledged.
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += connection.recv(1 << 20)
        assert received.count(b"data: ") == given + 10
        assert received.count(b"0.5") == 15_000 * (given + 10)
        assert len(running.core.acknowledged) == given + 10
        running.wait_until(lambda: running.listener.shared.unsent_bytes == 0)


def test_a_client_that_reads_nothing_is_disconnected(serve: Any) -> None:
    running = serve(
        limits=Limits(write_buffer_bytes=64 << 10, write_timeout_s=0.3), port_limits=PortLimits(sweep_s=0.05)
    )
    with unread(running):
        fill(running)
        running.wait_until(lambda: running.core.cancelled == [1])
    running.wait_until(lambda: running.listener.port.connection_count == 0)
    assert running.listener.shared.unsent_bytes == 0


def test_unread_streams_are_bounded_together(serve: Any) -> None:
    running = serve(limits=Limits(write_buffer_bytes=64 << 10), port_limits=PortLimits(max_unsent_bytes=2 << 20))
    with unread(running):
        fill(running)
        for _ in range(40):
            give_while_wanted(running, *[0.5] * 15_000)
        running.wait_until(lambda: running.core.cancelled == [1])
        assert running.listener.shared.unsent_bytes == 0
        assert any("clients that do not read" in line for line in running.log)


def test_a_drain_waits_for_a_stream_and_closes_after_it(http: Any, client: Client) -> None:
    client.ask()
    give(http, 1.0)
    client.begin()
    draining = asyncio.run_coroutine_threadsafe(http.listener.drain(), http.loop)
    http.wait_until(lambda: http.listener.shared.is_draining)
    give(http, 2.0)
    assert [client.event()["OUT"] for _ in range(2)] == [1.0, 2.0]
    assert not draining.done()
    give(http, error=InferenceError(ErrorCode.UNAVAILABLE, "Server is stopping"), final=True)
    assert client.event() == {"error": "Server is stopping"}
    assert client.is_over()
    draining.result(10)


def test_an_internal_fault_aborts_the_stream(http: Any, client: Client) -> None:
    """An answer with too few bytes for its shape: the client must see that the stream is incomplete."""
    client.ask()
    give(http, 1.0)
    client.begin()
    assert client.event() == values(1.0)

    odd = Tensor("OUT", DataType.FP32, (1,), b"odd")
    http.call(lambda: http.core.held[1][1](InferenceResponse("live", "1", outputs=[odd], final=False)))
    with pytest.raises((http_client.IncompleteRead, ConnectionError)):
        client.response.read()
    assert any("unexpected error in" in line for line in http.log)
    http.wait_until(lambda: http.core.cancelled == [1])


# ---- generate


def test_the_only_answer_is_the_body(http: Any, client: Client) -> None:
    generate = "/v2/models/live/generate"
    client.ask(generate, b'{"IN":[1,2],"id":"a","k":1}')
    give(http, 1.0)
    give(http, final=True)
    response = client.begin()
    assert (response.status, response.headers["Content-Type"]) == (200, "application/json")
    assert response.read() == b'{"OUT":1.0,"id":"a","model_name":"live","model_version":"1"}'
    assert http.core.requests[-1].parameters == {"k": 1}
    client.ask(generate)
    give(http, 2.0, final=True)
    assert json.loads(client.begin().read()) == values(2.0)


@pytest.mark.parametrize("answers", [0, 2, 3])
def test_another_number_of_answers_is_refused(http: Any, client: Client, answers: int) -> None:
    client.ask("/v2/models/live/generate")
    for number in range(answers):
        give_while_wanted(http, float(number))
    if not answers:
        give(http, final=True)
    response = client.begin()
    assert response.status == 400
    assert json.loads(response.read())["error"] == (
        "generate expects model to produce exactly 1 response, use generate stream for model that generates various"
        " number of responses"
    )
    http.wait_until(lambda: http.core.cancelled == ([1] if answers else []))


def test_an_error_takes_precedence_over_the_number_of_answers(http: Any, client: Client) -> None:
    client.ask("/v2/models/live/generate")
    give(http, 1.0)
    give(http, error=BROKEN, final=True)
    response = client.begin()
    assert (response.status, json.loads(response.read())) == (500, {"error": "the model broke"})


def test_a_client_that_disconnects_cancels_generate_too(http: Any) -> None:
    client = Client(http).ask("/v2/models/live/generate")
    give(http, 1.0)
    client.http.close()
    http.wait_until(lambda: http.core.cancelled == [1])


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_an_invalid_request_is_refused_before_it_runs(http: Any, verb: str) -> None:
    def refused(body: bytes, path: str = "/v2/models/echo/", **headers: str) -> tuple[int, str]:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = http.ask("POST", path + verb, body, sent)
        assert answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(answer.body)["error"]

    assert refused(b"{")[0] == 400
    assert refused(b'{"IN":"x"}') == (400, "Unable to parse 'data': attempt to access JSON non-number as double")
    for coding in ("gzip", "deflate", "br"):
        assert refused(IN, content_encoding=coding) == (
            400,
            "Unsupported content-encoding, only 'identity' is supported.",
        )
    assert refused(IN, path="/v2/models/none/") == (404, "Request for unknown model: 'none' is not found")
    assert refused(IN, path="/v2/models/echo/versions/7/")[0] == 404
    assert refused(IN, path="/v2/models/asleep/")[0] == 503
    assert refused(b'{"k":"%b"}' % (b"x" * 300_000))[0] == 400
    assert http.core.requests == []
    assert http.ask("GET", f"/v2/models/echo/{verb}").status == 405


def test_generate_takes_identity_and_compresses_nothing(http: Any) -> None:
    answer = http.ask(
        "POST", "/v2/models/echo/generate", IN, {"Content-Encoding": "identity", "Accept-Encoding": "gzip"}
    )
    assert (answer.status, answer.headers.get("content-encoding")) == (200, None)


def test_large_bodies_and_answers_are_processed_in_steps(http: Any) -> None:
    numbers = [number / 2 for number in range(60_000)]
    body = json.dumps({"IN": numbers}).encode()
    for verb in ("generate", "generate_stream"):
        answer = http.ask("POST", f"/v2/models/echo/{verb}", body)
        assert answer.status == 200
        assert json.loads(answer.body.removeprefix(b"data: "))["OUT"] == numbers


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_load_balancer_gets_the_load_if_it_requests_it(http: Any, verb: str) -> None:
    def header(model: str, form: str) -> str | None:
        headers = {"endpoint-load-metrics-format": form}
        answer = http.ask("POST", f"/v2/models/{model}/{verb}", b'{"IN":["a"]}' if model == "text" else IN, headers)
        assert answer.status == 200
        return answer.headers.get("endpoint-load-metrics")

    assert header("echo", "text") == (
        "TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=256"
    )
    assert header("echo", "json") == 'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":256}}'
    assert header("echo", "xml") is None
    assert header("text", "json") is None


# ---- infer as events


def test_infer_answers_with_events_if_the_client_accepts_them(http: Any, client: Client) -> None:
    client.ask(INFER, TENSOR, EVENTS)
    give(http, 1.0)
    give(http, 2.0)
    give(http, final=True)
    assert client.begin().headers["Content-Type"] == "text/event-stream; charset=utf-8"
    for number in (1.0, 2.0):
        assert client.event() == {
            "id": "i",
            "model_name": "live",
            "model_version": "1",
            "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1], "data": [number]}],
        }
    assert client.is_over()


def test_the_empty_last_answer_is_an_event_if_asked_for(http: Any, client: Client) -> None:
    document = json.loads(TENSOR) | {"parameters": {"triton_enable_empty_final_response": True, "k": 1}}
    client.ask(INFER, json.dumps(document).encode(), EVENTS)
    assert http.core.requests[-1].parameters == {"k": 1}
    give(http, 1.0)
    give(http, final=True)
    client.begin()
    assert client.event()["parameters"] == {"triton_final_response": False}
    assert client.event() == {
        "id": "i",
        "model_name": "live",
        "model_version": "1",
        "parameters": {"triton_final_response": True},
        "outputs": [],
    }
    assert client.is_over()
    refused = http.ask("POST", "/v2/models/echo/infer", json.dumps(document).encode())
    assert refused.status == 400
    assert b"reserved for Triton usage" in refused.body


def test_any_model_can_answer_with_events_always_in_json(http: Any) -> None:
    head = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","parameters":{"binary_data_size":4}}],%b}'
    head = head % b'"outputs":[{"name":"OUT","parameters":{"binary_data":true}}]'
    headers = {**EVENTS, "Inference-Header-Content-Length": str(len(head))}
    answer = http.ask("POST", "/v2/models/echo/infer", head + b"\0\0\x80?", headers)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert json.loads(answer.body[6:])["outputs"][0]["data"] == [1.0]


@pytest.mark.parametrize(
    "accept",
    ["", "*/*", "application/json", "application/json, text/event-stream;q=0.5", "text/event-stream;q=0", "text/event"],
)
def test_clients_that_do_not_accept_events_get_none(http: Any, accept: str) -> None:
    answer = http.ask("POST", "/v2/models/echo/infer", TENSOR, {"Accept": accept})
    assert answer.headers["content-type"] == "application/json"
    answer = http.ask("POST", INFER, TENSOR, {"Accept": accept})
    assert (answer.status, json.loads(answer.body)) == (
        501,
        {"error": DECOUPLED_OVER_HTTP},
    )


@pytest.mark.parametrize("accept", ["text/event-stream", "Text/Event-Stream", "application/json, text/event-stream"])
def test_clients_that_accept_events_by_name_get_them(http: Any, accept: str) -> None:
    answer = http.ask("POST", "/v2/models/echo/infer", TENSOR, {"Accept": accept})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


def test_event_streams_of_infer_have_backpressure_and_cancellation(serve: Any) -> None:
    running = serve(limits=Limits(write_buffer_bytes=64 << 10))
    client = Client(running).ask(INFER, TENSOR, EVENTS)
    running.core.acknowledged.clear()
    fill(running)
    client.http.close()
    running.wait_until(lambda: running.core.cancelled == [1])
