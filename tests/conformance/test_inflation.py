"""Many small bodies that inflate at the same time: memory, and service of other clients meanwhile."""

import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from support.calls import ONES_JSON
from support.models import add_identity
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.server import RunningServer, start_server

MIB = 1 << 20
LIMIT_BYTES = 4 * MIB
PLACES = 4
SMALL_BYTES = 256 << 10
SPARE_BYTES = 48 * MIB
HELD_BYTES = 1 << 30
"""Bytes of received and inflated bodies that a listener holds over all its requests."""


def start(folder: Path, *arguments: str) -> RunningServer:
    models = folder / "models"
    add_identity(models, "ident")
    add_identity(models, "open", dims="-1", max_batch_size=0)
    add_identity(models, "double", dims="-1", max_batch_size=0, datatype="FP64")
    return start_server(folder, ["--model-repository", models, *arguments])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = start(tmp_path_factory.mktemp("server"), f"--http-max-input-size={LIMIT_BYTES}")
    yield running
    assert running.stop() == 0, running.log
    assert "unexpected error" not in running.log


def packed(*parts: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(map(packer.compress, parts)) + packer.flush()


def post(body: bytes, model: str, header_length: int | None = None) -> bytes:
    length = b"" if header_length is None else b"Inference-Header-Content-Length: %d\r\n" % header_length
    return (
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Encoding: gzip\r\n"
        b"%bContent-Length: %d\r\n\r\n%b" % (model.encode(), length, len(body), body)
    )


def spaces(limit: int) -> bytes:
    """A document of white space."""
    return post(packed(b" " * (limit - 1)), "open")


def zeros(limit: int) -> bytes:
    """A binary tensor, which the model returns."""
    count = limit // 4 - 64
    head = (
        b'{"parameters":{"binary_data_output":true},"inputs":[{"name":"IN","shape":[%d],"datatype":"FP32",'
        b'"parameters":{"binary_data_size":%d}}]}' % (count, 4 * count)
    )
    return post(packed(head, bytes(4 * count)), "open", len(head))


def numbers(limit: int) -> bytes:
    """Numbers of two characters that become eight bytes each."""
    count = limit // 2 - 128
    head = b'{"parameters":{"binary_data_output":true},"inputs":[{"name":"IN","shape":[%d],"datatype":"FP64","data":['
    return post(packed(head % count, b"0," * (count - 1) + b"0]}]}"), "double")


def send(server: RunningServer, request: bytes, count: int) -> list[socket.socket]:
    clients = [socket.create_connection(("127.0.0.1", server.http_port), timeout=900) for _ in range(count)]
    for client in clients:
        client.sendall(request)
    return clients


def statuses(clients: Sequence[socket.socket]) -> Counter[int]:
    """The statuses of the answers; bodies are left unread."""
    found: Counter[int] = Counter()
    for client in clients:
        with client:
            found[int(client.recv(12)[9:])] += 1
    return found


@pytest.mark.parametrize("count", [32, pytest.param(200, marks=pytest.mark.large)])
@pytest.mark.parametrize(("make", "allowed"), [(spaces, {400}), (zeros, {200, 503})])
def test_many_bodies_that_inflate_take_the_memory_of_a_few(
    server: RunningServer, make: Callable[[int], bytes], allowed: set[int], count: int
) -> None:
    request = make(LIMIT_BYTES)
    assert len(request) < 8 << 10
    before = resident_bytes(server)
    forget_peak(server)
    clients = send(server, request, count)
    small = server.post("/v2/models/ident/infer", packed(ONES_JSON.encode()), {"Content-Encoding": "gzip"})
    assert (small.status, server.get("/v2/health/ready").status) == (200, 200)
    assert set(statuses(clients)) <= allowed
    # Each slot has a body and the spare capacity of its buffer; a running inference has a body too.
    assert peak_bytes(server) - before <= 4 * PLACES * LIMIT_BYTES + count * 2 * SMALL_BYTES + SPARE_BYTES


def test_bytes_of_disconnected_clients_are_no_longer_counted(server: RunningServer) -> None:
    """More in total than the limit: if bytes stayed counted, the last request would be refused."""
    request = zeros(LIMIT_BYTES)
    for _ in range(HELD_BYTES // LIMIT_BYTES // 100 + 1):
        clients = send(server, request, 100)
        for client in clients[::2]:
            client.close()
        assert set(statuses(clients[1::2])) <= {200, 503}
    assert statuses(send(server, request, 1)) == {200: 1}
    assert statuses(send(server, numbers(LIMIT_BYTES), 1)) == {200: 1}


@pytest.mark.load
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("make", "count", "allowed", "bound"),
    [
        # A growing buffer may be copied.
        (spaces, 32, {400}, 2 * PLACES * 64 * MIB + 32 * 2 * SMALL_BYTES + 2 * SPARE_BYTES),
        (spaces, 200, {400}, 2 * PLACES * 64 * MIB + 200 * 2 * SMALL_BYTES + 2 * SPARE_BYTES),
        (zeros, 32, {200, 503}, HELD_BYTES),
        (zeros, 200, {200, 503}, HELD_BYTES),
        # In addition, growing buffers are copied, and an answer counts only when its JSON is complete.
        (numbers, 32, {200, 503}, HELD_BYTES + 2 * PLACES * 64 * MIB),
    ],
)
def test_the_default_limits_bound_memory_too(
    tmp_path: Path, make: Callable[[int], bytes], count: int, allowed: set[int], bound: int
) -> None:
    server = start(tmp_path)
    try:
        before = resident_bytes(server)
        assert set(statuses(send(server, make(64 * MIB), count))) <= allowed
        assert peak_bytes(server) - before <= bound
        assert statuses(send(server, zeros(64 * MIB), 1)) == {200: 1}
    finally:
        server.kill()
