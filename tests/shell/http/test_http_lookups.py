"""Requests that wait for what is not known in this process: models, and the load of a model."""

import asyncio
import json
import socket
from typing import Any

import pytest

from halimede.core.types import ErrorCode, InferenceError
from halimede.facade.lookup import ModelLookup
from support.background import in_background

INFER = json.dumps({"inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1.0, 2.5]}]}).encode()
UNKNOWN = InferenceError(ErrorCode.NOT_FOUND, "Request for unknown model: 'echo' is not found")
BUSY = InferenceError(ErrorCode.UNAVAILABLE, "try again later")
REQUESTS: dict[str, tuple[str, str, bytes | None]] = {
    "metadata": ("GET", "/v2/models/echo", None),
    "config": ("GET", "/v2/models/echo/config", None),
    "infer": ("POST", "/v2/models/echo/infer", INFER),
    "generate": ("POST", "/v2/models/echo/generate", b'{"IN": [1.0]}'),
    "generate_stream": ("POST", "/v2/models/echo/generate_stream", b'{"IN": [1.0]}'),
}


@pytest.fixture
def lookup(http: Any) -> ModelLookup:
    """The lookup of the model 'echo'."""
    made = http.core.lookups["echo"] = ModelLookup()
    return made


def wait_for(http: Any, lookup: ModelLookup, waiting: int) -> None:
    http.wait_until(lambda: repr(lookup) == f"<ModelLookup waiting={waiting}>")


@pytest.mark.parametrize("name", REQUESTS)
def test_the_answer_is_the_same_once_the_model_is_known(http: Any, lookup: ModelLookup, name: str) -> None:
    late = in_background(lambda: http.ask(*REQUESTS[name]))
    wait_for(http, lookup, 1)
    assert http.ask("GET", "/v2").status == 200, "others do not wait"
    http.call(lambda: lookup.end(http.core.models["echo"]))
    got = late.result(20)
    http.core.lookups.clear()
    at_once = http.ask(*REQUESTS[name])
    assert (got.status, got.body, got.headers) == (at_once.status, at_once.body, at_once.headers)
    assert got.status == 200


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize(("error", "status"), [(UNKNOWN, 404), (BUSY, 503)])
def test_the_reason_why_there_is_no_model_is_the_answer(
    http: Any, lookup: ModelLookup, name: str, error: InferenceError, status: int
) -> None:
    late = in_background(lambda: http.ask(*REQUESTS[name]))
    wait_for(http, lookup, 1)
    http.call(lambda: lookup.end(error))
    got = late.result(20)
    assert (got.status, json.loads(got.body)) == (status, {"error": error.message})
    assert ("retry-after" in got.headers) == (status == 503)


def test_a_client_that_leaves_ends_its_wait(http: Any, lookup: ModelLookup) -> None:
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(INFER)
    with http.connect() as connection:
        connection.sendall(head + INFER)
        wait_for(http, lookup, 1)
        connection.shutdown(socket.SHUT_WR)
        wait_for(http, lookup, 0)
    assert http.core.requests == []


def test_pipelined_requests_are_answered_in_their_order(http: Any, lookup: ModelLookup) -> None:
    with http.connect() as connection:
        connection.sendall(b"GET /v2/models/echo HTTP/1.1\r\nHost: x\r\n\r\nGET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(http, lookup, 1)
        http.call(lambda: lookup.end(UNKNOWN))
        answers = b""
        while answers.count(b"HTTP/1.1 ") < 2:
            answers += connection.recv(1 << 16)
    assert answers.index(b"HTTP/1.1 404") < answers.index(b"HTTP/1.1 200")


def test_a_fault_of_one_request_does_not_end_the_wait_of_others(http: Any, lookup: ModelLookup) -> None:
    """The model 'bug' fails in inferences."""
    asked = [in_background(lambda: http.ask(*REQUESTS["infer"]))]
    wait_for(http, lookup, 1)
    asked.append(in_background(lambda: http.ask(*REQUESTS["metadata"])))
    wait_for(http, lookup, 2)

    http.call(lambda: lookup.end(http.core.models["bug"]))

    assert [each.result(20).status for each in asked] == [500, 200]


LOAD = {"endpoint-load-metrics-format": "text"}
IN = b'{"IN": [1.0]}'


def held_back(http: Any) -> "asyncio.Future[None]":
    """What the load of a model waits for."""
    gate: asyncio.Future[None] = http.call(http.loop.create_future)
    http.core.kv_gate = gate
    return gate


def give_all(http: Any) -> None:
    for answer in (lambda: http.core.give(1.0), lambda: http.core.give(2.0), lambda: http.core.give(final=True)):
        http.call(answer)


def test_events_wait_for_the_load_in_their_head(http: Any) -> None:
    gate = held_back(http)
    late = in_background(lambda: http.ask("POST", "/v2/models/live/generate_stream", IN, LOAD))
    http.wait_until(lambda: len(http.core.held) == 1)
    give_all(http)
    assert not late.done()

    http.call(lambda: gate.set_result(None))

    got = late.result(20)
    assert got.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_utilization=0.25")
    events = got.body.decode().removesuffix("\n\n").split("\n\n")
    assert [json.loads(each.removeprefix("data: "))["OUT"] for each in events] == [1.0, 2.0]


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_an_answer_whose_load_is_not_to_be_had_lacks_it(http: Any, verb: str) -> None:
    gate = held_back(http)
    http.call(lambda: gate.set_exception(BUSY))
    got = http.ask("POST", f"/v2/models/echo/{verb}", IN, LOAD)
    assert (got.status, "endpoint-load-metrics" in got.headers) == (200, False)


def test_a_client_that_leaves_before_the_head_is_no_fault(http: Any) -> None:
    gate = held_back(http)
    head = b"POST /v2/models/live/generate_stream HTTP/1.1\r\nHost: x\r\nendpoint-load-metrics-format: text\r\n"
    with http.connect() as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(IN), IN))
        http.wait_until(lambda: len(http.core.held) == 1)
        http.call(lambda: http.core.give(1.0))
        connection.shutdown(socket.SHUT_WR)
        http.wait_until(lambda: http.core.cancelled == [1])

    http.call(lambda: gate.set_result(None))

    assert http.ask("GET", "/v2").status == 200
    assert http.log == []
