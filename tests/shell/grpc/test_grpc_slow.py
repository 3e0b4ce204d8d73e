"""Clients that send too little of a message, or nothing after the head of a call. Limits are short here."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Transport
from halimede.frontends.port import PortLimits
from support.grpc_messages import message
from support.h2client import DATA, END_HEADERS, HEADERS, INFER, LIVE, STREAM_INFER, H2Client, frame, grpc_message
from support.server import wait_until

MIB = 1 << 20
SWEEP = PortLimits(sweep_s=0.02)
LARGE = grpc_message(message("ident", columns=MIB // 4).SerializeToString())
HELD = grpc_message(message("held", columns=MIB // 4).SerializeToString())
PAUSE_S = 0.02


def drip(client: H2Client, stream: int, data: bytes, size: int) -> dict[str, str]:
    """Send `size` bytes every PAUSE_S until the server ends the call or all are sent. Returns the call's end."""
    for at in range(0, len(data), size):
        if client.receive_until(lambda: client.is_over(stream), PAUSE_S):
            break
        client.send_data(stream, data[at : at + size], is_end=at + size >= len(data))
    return client.finish(stream)


@pytest.fixture
def slow(serve: Callable[..., Any]) -> Iterator[Callable[..., H2Client]]:
    """Connects to a server with these limits."""
    made: list[H2Client] = []

    def connect(stall_secs: float = 60, message_secs: float = 60, **limits: Any) -> H2Client:
        transport = Transport(stall_secs=stall_secs, message_secs=message_secs)
        served = serve(transport, limits=GrpcLimits(**limits), port_limits=SWEEP)
        made.append(H2Client((served.address, served.port)))
        return made[-1]

    yield connect
    for each in made:
        each.socket.close()


@pytest.mark.parametrize("path", [INFER, LIVE, "/grpc.health.v1.Health/Watch"])
def test_a_unary_call_that_sends_its_head_alone_ends(slow: Callable[..., H2Client], path: str) -> None:
    client = slow(stall_secs=0.3)
    streamed, stream = client.call(STREAM_INFER, None), client.call(path, None)
    fields = client.finish(stream)
    assert (fields["grpc-status"], fields["grpc-message"]) == ("14", "the client has not sent its request for 0.3 s")
    # A stream may be idle.
    assert not client.is_over(streamed)


def test_a_request_of_another_protocol_that_sends_its_head_alone_ends(slow: Callable[..., H2Client]) -> None:
    client = slow(stall_secs=0.3)
    stream = client.new_stream()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "localhost")]
    client.send(frame(HEADERS, END_HEADERS, stream, client.encode(fields)) + frame(DATA, 0, stream, b"x"))
    assert client.receive_until(lambda: client.is_over(stream))
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"


def test_a_message_that_brings_too_little_loses_the_call(slow: Callable[..., H2Client]) -> None:
    client = slow(progress_s=0.3, progress_bytes=100_000)
    fields = drip(client, client.call(INFER, None), LARGE, 1000)
    assert fields["grpc-message"] == "the client has not sent 100000 bytes of its message in 0.3 s"
    # One that brings enough is answered, however long it takes.
    assert drip(client, client.call(INFER, None), LARGE, 30_000)["grpc-status"] == "0"


def test_a_message_has_a_time_for_the_whole(slow: Callable[..., H2Client]) -> None:
    client = slow(message_secs=0.3, message_bytes_per_s=4 * MIB)
    fields = drip(client, client.call(INFER, None), LARGE, 10_000)
    assert fields["grpc-message"] == f"the client has not sent its message of {len(LARGE) - 5} bytes within 1 s"
    # Twice the time for a message that is not larger, in two: the limit is that of one message.
    stream = client.call(STREAM_INFER, None)
    drip(client, stream, grpc_message(message("ident", columns=MIB // 16).SerializeToString()) * 4, 40_000)
    assert client.fields[stream]["grpc-status"] == "0"


def test_messages_must_arrive_faster_while_much_is_held(serve: Callable[..., Any]) -> None:
    limits = GrpcLimits(max_held_bytes=3 * MIB, progress_s=0.3, scarce_progress_bytes=MIB)
    served = serve(Transport(max_message_bytes=3 * MIB // 2), limits=limits, port_limits=SWEEP)
    with H2Client((served.address, served.port)) as client, H2Client((served.address, served.port)) as other:
        assert drip(client, client.call(INFER, None), LARGE, 30_000)["grpc-status"] == "0"
        held = [other.call(INFER, HELD) for _ in range(2)]
        wait_until(lambda: len(served.core.held) == 2, "the requests")
        fields = drip(client, client.call(INFER, None), LARGE, 30_000)
        assert fields["grpc-message"] == f"the client has not sent {MIB} bytes of its message in 0.3 s"
        served.do(served.core.release)
        assert [other.finish(stream)["grpc-status"] for stream in held] == ["0", "0"]
