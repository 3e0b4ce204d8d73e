"""Inflated and decoded bytes count with their body until the request is answered or the client disconnects."""

import gc
import gzip
import json
from typing import Any

import numpy as np
import pytest

from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Limits
from support.held_requests import MIB, OUTCOMES, SIZES, end_http_request

COUNT = 100_000
TENSOR = {"name": "IN", "shape": [COUNT], "datatype": "FP32", "data": [1] * COUNT}
TEXT = json.dumps({"inputs": [TENSOR]}).encode()
BODY = gzip.compress(TEXT)
FIELDS = b"Content-Encoding: gzip\r\n"
NO_ROOM = "the server holds as many bytes of request bodies as it can, try again later"


def post(model: str, body: bytes = BODY, fields: bytes = FIELDS) -> bytes:
    head = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: test\r\n%bContent-Length: %d\r\n\r\n"
    return head % (model.encode(), fields, len(body)) + body


def test_inflated_and_decoded_bytes_count_until_the_answer(http: Any) -> None:
    with http.connect() as client:
        client.sendall(post("held"))
        http.wait_until(lambda: http.core.held)
        assert http.listener.shared.wire.held_bytes == len(TEXT) + 4 * COUNT
        http.call(http.core.release)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        assert http.call(lambda: http.listener.shared.wire.held_bytes) == 0
    with http.connect() as client:
        client.sendall(post("held", TEXT, b""))
        http.wait_until(lambda: http.core.held)
        assert http.listener.shared.wire.held_bytes == len(TEXT) + 4 * COUNT
        http.call(http.core.release)
        http.wait_until(lambda: http.listener.shared.wire.held_bytes == 0)


def test_no_bytes_of_a_disconnected_client_are_counted(http: Any) -> None:
    with http.connect() as client:
        client.sendall(post("held"))
        http.wait_until(lambda: http.core.held)
    http.wait_until(lambda: http.core.cancelled)
    assert http.call(lambda: http.listener.shared.wire.held_bytes) == 0


def test_no_bytes_are_counted_after_an_error(http: Any) -> None:
    with http.connect() as client:
        for body in (gzip.compress(b" " * 600_000), gzip.compress(TEXT)[:-100], gzip.compress(bytes(2 << 20))):
            client.sendall(post("echo", body))
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
            # The answer can arrive before the loop ends the step that sent it.
            assert http.call(lambda: http.listener.shared.wire.held_bytes) == 0


def test_a_request_without_room_gets_503_with_retry_after(serve: Any) -> None:
    running = serve(limits=Limits(max_held_bytes=len(TEXT) + 4 * COUNT + 1_000))
    with running.connect() as first, running.connect() as second:
        first.sendall(post("held"))
        running.wait_until(lambda: running.core.held)
        second.sendall(post("echo"))
        head, _, body = second.recv(1 << 16).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in head.split(b"\r\n")
        assert json.loads(body) == {"error": NO_ROOM}
        running.call(running.core.release)
        first.recv(1)
        small = json.dumps({"inputs": [{**TENSOR, "shape": [1], "data": [1]}]}).encode()
        second.sendall(post("echo", gzip.compress(small)))
        assert second.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    assert np.frombuffer(running.core.requests[0].inputs[0].data, np.float32).sum() == COUNT


@pytest.mark.parametrize("ends_with", ["an answer", "a disconnected client", "a stream"])
def test_a_body_is_freed_at_the_end_of_its_request(http: Any, ends_with: str) -> None:
    fields = b"Accept: text/event-stream\r\n" if ends_with == "a stream" else b""
    body = json.dumps({"inputs": [{**TENSOR, "shape": [1], "data": [1]}]}).encode()
    gc.collect()
    gc.disable()
    try:
        with http.connect() as client:
            client.sendall(post("held", body, fields))
            http.wait_until(lambda: http.core.held)
            if ends_with != "a disconnected client":
                http.call(http.core.release)
                client.recv(1 << 16)
        http.wait_until(lambda: http.listener.port.connection_count == 0)
        # The garbage collector is off, so an exchange that is left is part of a reference cycle. It has the body.
        assert http.call(lambda: [each for each in gc.get_objects() if isinstance(each, Exchange)]) == []
    finally:
        gc.enable()


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_bytes_are_held_after_requests_of_any_size(serve: Any, outcome: str) -> None:
    running = serve(max_input_size=4 * MIB)

    def holds_nothing() -> None:
        running.wait_until(lambda: running.listener.shared.wire.held_bytes == 0)

    for size in SIZES:
        end_http_request(running.port, outcome, size, "echo", holds_nothing)
    holds_nothing()
