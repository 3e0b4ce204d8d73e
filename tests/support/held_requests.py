"""Requests that end in each way, over HTTP and gRPC, for tests of what a server holds afterwards."""

import gzip
import json
import socket
from collections.abc import Callable
from contextlib import suppress

from support.grpc_messages import message
from support.h2attack import reset
from support.h2client import ACK, DATA, INFER, SETTINGS, STREAM_INFER, H2Client, frame, grpc_message

KIB, MIB = 1 << 10, 1 << 20
SIZES = 4, 200 * KIB, 3 * MIB
"""Of a request's tensor: one that comes in one piece, one that is decoded at once, and one that is decoded in steps."""

OUTCOMES = "answered", "refused", "undecodable", "compressed", "cancelled", "lost"
STREAMS_THAT_GO_ON = "answered", "refused", "compressed"
ROUNDS = 3

Held = Callable[[], None]
"""Waits until the server holds nothing; fails after a while."""


def _grpc_content(outcome: str, size: int, model: str) -> bytes:
    content = message("unknown" if outcome == "refused" else model, columns=size // 4).SerializeToString()
    if outcome == "undecodable":
        return grpc_message(b"\xff" * len(content))
    if outcome == "compressed":
        # Not smaller: what is received counts as well as what is inflated.
        content = gzip.compress(content, 0)
        return b"\1" + len(content).to_bytes(4, "big") + content
    return grpc_message(content)


def end_grpc_call(port: int, outcome: str, size: int, model: str, holds_nothing: Held) -> None:
    """A call of ModelInfer that ends in this way."""
    with H2Client(("127.0.0.1", port)) as client:
        content = _grpc_content(outcome, size, model)
        extra = [("grpc-encoding", "gzip")] if outcome == "compressed" else []
        stream = _begin(client, INFER, extra)
        if outcome in ("cancelled", "lost"):
            client.send_data(stream, content[: len(content) // 2], is_end=False)
            if outcome == "cancelled":
                client.send(reset(stream))
                holds_nothing()
            return
        client.send_data(stream, content)
        status = client.finish(stream)["grpc-status"]
        assert status == {"refused": "5", "undecodable": "13"}.get(outcome, "0"), client.fields
        holds_nothing()


def end_grpc_messages(port: int, outcome: str, size: int, model: str, holds_nothing: Held) -> None:
    """Messages of ModelStreamInfer that end in this way. The stream goes on after those that can be answered."""
    with H2Client(("127.0.0.1", port)) as client:
        content = _grpc_content(outcome, size, model)
        stream = _begin(client, STREAM_INFER, [("grpc-encoding", "gzip")] if outcome == "compressed" else [])
        if outcome not in STREAMS_THAT_GO_ON:
            is_whole = outcome == "undecodable"
            client.send_data(stream, content if is_whole else content[: len(content) // 2], is_end=False)
            if is_whole:
                assert client.finish(stream)["grpc-status"] == "13"
            elif outcome == "cancelled":
                client.send(reset(stream))
            else:
                return
            holds_nothing()
            return
        for number in range(1, ROUNDS + 1):
            client.send_data(stream, content, is_end=False)
            assert client.receive_until(lambda number=number: _count_messages(client.data(stream)) == number)  # type: ignore[misc]
            holds_nothing()
        client.send(frame(DATA, 1, stream))
        assert client.finish(stream)["grpc-status"] == "0"


def _begin(client: H2Client, path: str, extra: list[tuple[str, str]]) -> int:
    # With the client's window: the first message is sent as the server grants credit.
    assert client.receive_until(lambda: client.of(SETTINGS, ACK))
    return client.call(path, None, extra)


def _count_messages(data: bytes) -> int:
    count = at = 0
    while at + 5 <= len(data):
        at += 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        count += at <= len(data)
    return count


def end_http_request(port: int, outcome: str, size: int, model: str, holds_nothing: Held) -> None:
    """An inference that ends in this way. Its connection stays where that is possible."""
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "shape": [1, size // 4],
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": size},
                }
            ]
        }
    ).encode()
    body = b"\xff" * (len(header) + size) if outcome == "undecodable" else header + bytes(size)
    fields = f"Inference-Header-Content-Length: {len(header)}\r\n"
    if outcome == "compressed":
        body = gzip.compress(body, 0)
        fields += "Content-Encoding: gzip\r\n"
    name = "unknown" if outcome == "refused" else model
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: x\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        if outcome in ("cancelled", "lost"):
            client.sendall(head + body[: len(body) // 2])
            if outcome == "cancelled":
                client.shutdown(socket.SHUT_WR)
                holds_nothing()
            return
        for _ in range(ROUNDS):
            client.sendall(head + body)
            status, answer = _read_answer(client)
            assert status == {"refused": 404, "undecodable": 400}.get(outcome, 200), answer[:200]
            holds_nothing()


def _read_answer(client: socket.socket) -> tuple[int, bytes]:
    got = b""
    while b"\r\n\r\n" not in got:
        got += client.recv(1 << 20)
    head, _, body = got.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    parts = [body]
    left = length - len(body)
    while left > 0:
        with suppress(TimeoutError):
            parts.append(client.recv(1 << 20))
        left -= len(parts[-1])
    return int(head.split()[1]), b"".join(parts)
