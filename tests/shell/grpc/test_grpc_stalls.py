"""Clients that stop in the middle: of a frame, of a header block, of reading an answer. Limits are short here."""

import socket
from collections.abc import Iterator

import pytest
from tritonclient.grpc import service_pb2 as pb

from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Transport
from halimede.frontends.port import PortLimits
from support.grpc_messages import message
from support.h2attack import setting, window_update
from support.h2client import (
    ACK,
    CONTINUATION,
    DATA,
    INFER,
    INITIAL_WINDOW_SIZE,
    LIVE,
    PING,
    PREFACE,
    SETTINGS,
    STREAM_INFER,
    H2Client,
    frame,
    grpc_message,
)
from support.server import wait_until

STALL_S = 0.5
SWEEP = PortLimits(sweep_s=0.05)
MIB = 1 << 20
LARGE = grpc_message(message("ident", columns=MIB // 4).SerializeToString())


@pytest.fixture
def stalling(serve):
    """A server that waits for half a second at most."""
    return serve(Transport(stall_secs=STALL_S), limits=GrpcLimits(handshake_s=STALL_S), port_limits=SWEEP)


@pytest.fixture
def client(stalling) -> Iterator[H2Client]:
    with H2Client((stalling.address, stalling.port), is_greedy=False) as made:
        assert made.receive_until(lambda: made.of(SETTINGS, ACK))
        yield made
        assert stalling.do(lambda: (stalling.front.shared.wire.held_bytes, stalling.front.shared.unsent_bytes)) == (
            0,
            0,
        )


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], PREFACE, PREFACE + frame(SETTINGS)[:5]])
def test_a_client_that_does_not_greet_is_closed(stalling, sent: bytes) -> None:
    with socket.create_connection((stalling.address, stalling.port), timeout=20) as client:
        client.sendall(sent)
        while client.recv(4096):
            pass


def test_a_client_in_the_middle_of_a_frame_is_closed(client: H2Client) -> None:
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"
    client.send(frame(PING, 0, 0, b"lifesign")[:12])
    assert client.wait_closed()


def test_a_client_in_the_middle_of_a_header_block_is_closed(client: H2Client) -> None:
    stream, head = client.head(LIVE, flags=0)
    client.send(head + frame(CONTINUATION, 0, stream))
    assert client.wait_closed()


def test_a_client_in_the_middle_of_a_message_loses_the_call(client: H2Client) -> None:
    stream = client.call(INFER, None)
    client.send(frame(DATA, 0, stream, LARGE[:10_000]))
    fields = client.finish(stream)
    assert fields["grpc-status"] == "14"
    assert fields["grpc-message"] == "the client has not sent 1024 bytes of its message in 0.5 s"
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"


@pytest.mark.parametrize("window", [0, 1000])
def test_a_client_that_never_opens_the_window_of_a_stream_loses_the_call(client: H2Client, window: int) -> None:
    client.send(setting(INITIAL_WINDOW_SIZE, window))
    stream = client.call(INFER, LARGE)
    assert client.receive_until(lambda: client.is_over(stream))
    assert len(client.data(stream)) == window
    client.send(setting(INITIAL_WINDOW_SIZE, 65_535))
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"


def test_a_client_that_never_opens_the_window_of_the_connection_loses_its_calls(client: H2Client) -> None:
    client.send(setting(INITIAL_WINDOW_SIZE, MIB))
    streams = [client.call(INFER, LARGE) for _ in range(3)]
    for stream in streams:
        assert client.receive_until(lambda stream=stream: client.is_over(stream))  # type: ignore[misc]
    assert sum(len(client.data(stream)) for stream in streams) == 65_535
    client.send(window_update(0, 1000))
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"


def test_a_client_that_takes_its_answer_slowly_keeps_the_call(client: H2Client) -> None:
    """It takes longer than a client may stall, and never stalls."""
    client.send(setting(INITIAL_WINDOW_SIZE, 0))
    answer = pb.ModelInferResponse()
    stream = client.call(INFER, grpc_message(message("ident", columns=250).SerializeToString()))
    for count in range(1, 11):
        client.receive_until(lambda: client.is_over(stream), STALL_S / 4)
        client.send(window_update(stream, 100))
        assert client.receive_until(lambda count=count: len(client.data(stream)) >= count * 100)  # type: ignore[misc]
    client.send(window_update(stream, MIB))
    assert client.finish(stream)["grpc-status"] == "0"
    answer.ParseFromString(client.data(stream)[5:])
    assert len(answer.raw_output_contents[0]) == 1000


def test_a_client_that_reads_nothing_is_closed(stalling) -> None:
    """Its windows are open, and the buffers of its socket are full."""
    size = 16 * MIB
    request = grpc_message(message("ident", columns=size // 4).SerializeToString())
    with H2Client((stalling.address, stalling.port), is_greedy=False) as client:
        client.send(setting(INITIAL_WINDOW_SIZE, 2**31 - 1) + window_update(0, 2**30))
        stream = client.call(INFER, request)
        wait_until(lambda: stalling.do(lambda: stalling.front.shared.unsent_bytes), "the answer")
        wait_until(lambda: not stalling.do(lambda: stalling.front.shared.unsent_bytes), "the end of the connection")
        assert client.wait_closed()
        assert len(client.data(stream)) < size


def test_answers_that_nobody_reads_are_bounded_over_all_connections(serve) -> None:
    """The clients that have stalled for the longest time are closed before their time."""
    served = serve(Transport(), port_limits=PortLimits(sweep_s=0.05, max_unsent_bytes=8 * MIB))
    clients = [H2Client((served.address, served.port), is_greedy=False) for _ in range(12)]
    for client in clients:
        client.send(setting(INITIAL_WINDOW_SIZE, 0))
        client.call(INFER, LARGE)
    wait_until(lambda: len(served.core.requests) == 12, "the requests")
    wait_until(lambda: served.do(lambda: served.front.shared.unsent_bytes) <= 8 * MIB, "the bound")
    with H2Client((served.address, served.port)) as other:
        assert other.finish(other.call(INFER, LARGE))["grpc-status"] == "0"
    for client in clients:
        client.socket.close()


def test_waiting_messages_without_content_are_counted(serve) -> None:
    """An empty message is five bytes for the client, and more for the server."""
    limits = GrpcLimits(max_connection_held_bytes=MIB)
    served = serve(Transport(max_message_bytes=MIB // 2), limits=limits, max_response_pool_size=1)
    with H2Client((served.address, served.port)) as client:
        stream = client.call(STREAM_INFER, None)
        held = grpc_message(message("held").SerializeToString())
        client.send(frame(DATA, 0, stream, held * 2) + frame(DATA, 0, stream, grpc_message(b"") * 3000) * 4)
        fields = client.finish(stream)
        assert fields["grpc-status"] == "14"
        assert fields["grpc-message"].startswith("the server holds as many bytes")
