"""Hostile gRPC clients of the running server: their cost is bounded, and other clients are served.

Clients that do not read are not read from. Floods of frames stand in `test_hostile_http2.py`.
"""

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from support.background import in_background
from support.calls import canceled, executing, metric, pending
from support.h2client import (
    DATA,
    END_HEADERS,
    HEADERS,
    INFER,
    LIVE,
    PIECE_BYTES,
    PING,
    SETTINGS,
    STREAM_INFER,
    H2Client,
    frame,
    grpc_message,
)
from support.models import add_identity
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.server import RunningServer, serving, wait_until

MIB = 1 << 20
LIMIT_BYTES = 16 * MIB
ONE = "instance_group { kind: KIND_CPU count: 1 }"
DELAYED = f'{ONE} parameters {{ key: "execute_delay_ms" value {{ string_value: "600" }} }}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident", dims="-1")
    add_identity(models, "slow", extra=DELAYED)
    arguments = ["--model-repository", models, f"--grpc-max-input-size={LIMIT_BYTES}", "--exit-timeout-secs=5"]
    with serving(tmp_path_factory.mktemp("log"), arguments, forked=False) as running:
        others_are_served(running)
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[H2Client]:
    with H2Client(("127.0.0.1", server.grpc_port)) as made:
        yield made


def request(model: str = "ident", elements: int = 16, request_id: str = "") -> bytes:
    message = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[b"\0" * 4 * elements])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, elements])
    return message.SerializeToString()


def others_are_served(server: RunningServer) -> None:
    with H2Client(("127.0.0.1", server.grpc_port)) as other:
        assert other.finish(other.call(INFER, grpc_message(request())))["grpc-status"] == "0"


def executed(server: RunningServer) -> float:
    return metric(server, "nv_inference_count", "slow")


# Memory


def test_announced_lengths_without_data_allocate_nothing(server: RunningServer) -> None:
    forget_peak(server)
    before = peak_bytes(server)
    with ExitStack() as stack:
        for _ in range(10):
            client = stack.enter_context(H2Client(("127.0.0.1", server.grpc_port)))
            for _ in range(100):
                stream = client.call(INFER, None)
                client.send(frame(DATA, 0, stream, b"\0" + LIMIT_BYTES.to_bytes(4, "big") + b"\x0a"))
        others_are_served(server)
        assert peak_bytes(server) - before < 64 * MIB
    with H2Client(("127.0.0.1", server.grpc_port)) as client:
        stream = client.call(INFER, None)
        client.send(frame(DATA, 0, stream, b"\0" + (2**31).to_bytes(4, "big")))
        assert client.finish(stream)["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])


@pytest.mark.parametrize(
    ("elements", "total", "most", "most_bytes"),
    # Of small answers 256 may wait, of large ones 128 MiB.
    [(64 << 10, 750, 600, 160 * MIB), (960 << 10, 115, 100, 420 * MIB)],
    ids=["many", "large"],
)
def test_the_server_stops_reading_a_stream_whose_answers_are_not_read(
    server: RunningServer, elements: int, total: int, most: int, most_bytes: int
) -> None:
    message = request(elements=elements)
    before = resident_bytes(server)
    requests: queue.Queue = queue.Queue()
    for _ in range(total):
        requests.put(message)
    done = metric(server, "nv_inference_count", "ident")
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = channel.stream_stream(STREAM_INFER)(iter(requests.get, None), timeout=60)
        last = -1
        while last != (last := metric(server, "nv_inference_count", "ident")) or last == done:
            time.sleep(0.3)  # until nothing happens
        assert last - done < most
        assert resident_bytes(server) - before < most_bytes
        others_are_served(server)
        for _ in range(total):
            next(call)
        requests.put(None)
        assert list(call) == []


@pytest.mark.load
def test_connections_beyond_the_limit_are_closed_at_once(server: RunningServer) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(H2Client(("127.0.0.1", server.grpc_port))) for _ in range(10_000)]
        with H2Client(("127.0.0.1", server.grpc_port)) as beyond:
            assert beyond.wait_closed()
        assert clients[0].finish(clients[0].call(LIVE))["grpc-status"] == "0"
    others_are_served(server)


# Clients that cancel or disconnect


def test_a_broken_connection_cancels_its_queued_calls_and_streams(server: RunningServer) -> None:
    before = (executed(server), canceled(server, "slow"))
    with H2Client(("127.0.0.1", server.grpc_port)) as first:
        running = first.call(INFER, grpc_message(request("slow")))
        wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
        with H2Client(("127.0.0.1", server.grpc_port)) as leaving:
            leaving.call(INFER, grpc_message(request("slow")))
            stream = leaving.call(STREAM_INFER, None)
            leaving.send_data(stream, grpc_message(request("slow")) * 3, is_end=False)
            wait_until(lambda: pending(server, "slow") == 4, "the requests to queue", server)
            leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
        wait_until(lambda: pending(server, "slow") == 0, "the requests to be dropped", server)
        assert first.finish(running)["grpc-status"] == "0"
    assert (executed(server), canceled(server, "slow")) == (before[0] + 1, before[1] + 4)


def test_a_deadline_that_passes_in_the_queue(server: RunningServer, client: H2Client) -> None:
    before = (executed(server), canceled(server, "slow"))
    first = client.call(INFER, grpc_message(request("slow")))
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    second = client.call(INFER, grpc_message(request("slow")), [("grpc-timeout", "100m")])
    assert client.finish(second)["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])
    assert client.finish(first)["grpc-status"] == "0"
    assert (executed(server), canceled(server, "slow")) == (before[0] + 1, before[1] + 1)


# Broken framing


def raw_call(client: H2Client, fields: list[tuple[str, str]], body: bytes) -> dict[str, str]:
    stream = client.new_stream()
    client.send(frame(HEADERS, END_HEADERS, stream, client.encode(fields)))
    client.send_data(stream, body)
    return client.finish(stream)


FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": LIVE,
    ":authority": "x",
    "te": "trailers",
    "content-type": "application/grpc",
}


@pytest.mark.parametrize(
    ("fields", "body", "statuses"),
    [
        ({":path": "/nope"}, b"\0\0\0\0\0", {12}),
        ({":path": "/inference.GRPCInferenceService/Nope"}, b"\0\0\0\0\0", {12}),
        ({":path": "/grpc.channelz.v1.Channelz/GetServers"}, b"\0\0\0\0\0", {12}),
        ({":method": "GET"}, b"\0\0\0\0\0", {None, 12, 13}),
        ({"grpc-encoding": "br"}, b"\1\0\0\0\1x", {12, 13}),
        ({}, b"\1\0\0\0\1x", {12, 13}),  # compressed, without a named coding
        ({"grpc-encoding": "gzip"}, b"\1\0\0\0\4junk", {13}),
        ({}, b"\0\0\0\0\x09x", {3}),  # ends within a message
        ({}, b"\x09\0\0\0\0", {13}),  # an undefined flag
        ({}, b"", {3}),  # no message
        ({"grpc-timeout": "soon"}, b"\0\0\0\0\0", {13}),
        ({"grpc-timeout": "0n"}, b"\0\0\0\0\0", {4}),
    ],
)
def test_invalid_calls(
    server: RunningServer, client: H2Client, fields: dict[str, str], body: bytes, statuses: set[int | None]
) -> None:
    answer = raw_call(client, [*(FIELDS | fields).items()], body)
    status = answer.get("grpc-status")
    assert (int(status) if status else None) in statuses, answer
    others_are_served(server)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\0" * 100_000,
        frame(DATA, 0, 0, b"data of no stream"),
        frame(HEADERS, END_HEADERS, 2, b"\x82"),
        frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
        frame(SETTINGS, 0, 0, b"odd"),
        frame(PING, 0, 0, b"short"),
        b"\xff\xff\xff" + bytes(6) + bytes(PIECE_BYTES),
    ],
)
def test_bytes_that_are_not_http2_do_not_affect_other_clients(
    server: RunningServer, client: H2Client, junk: bytes
) -> None:
    client.send(junk)
    client.receive_until(lambda: client.is_closed, 1)
    others_are_served(server)


# Identity


def test_answers_have_the_ids_of_their_requests_even_if_repeated(server: RunningServer) -> None:
    sent = ["same"] * 5 + ["", "a\0b", "é" * 500, "x" * 100_000]

    def ask(request_id: str) -> str:
        with grpc.insecure_channel(server.grpc_url) as channel:
            raw = channel.unary_unary(INFER)(request(request_id=request_id), timeout=20)
        return pb.ModelInferResponse.FromString(raw).id

    assert [answer.result(30) for answer in [in_background(lambda each=each: ask(each)) for each in sent]] == sent
    with grpc.insecure_channel(server.grpc_url) as channel:
        answers = channel.stream_stream(STREAM_INFER)(iter([request(request_id=each) for each in sent]), timeout=20)
        assert [pb.ModelStreamInferResponse.FromString(raw).infer_response.id for raw in answers] == sent
