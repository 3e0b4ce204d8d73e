"""With nothing in progress a server holds no bytes of requests, however they have ended."""

import zlib
from collections.abc import Callable
from typing import Any

import pytest

from halimede.frontends.grpc.call import CALL_BYTES, FREE_CALLS, NO_ROOM
from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Transport
from halimede.frontends.steps import PERMITS
from support.grpc_messages import message
from support.h2attack import reset
from support.h2client import CONTINUATION, HEADERS, INFER, LIVE, STREAM_INFER, H2Client, frame, grpc_message
from support.held_requests import KIB, MIB, OUTCOMES, SIZES, end_grpc_call, end_grpc_messages
from support.server import wait_until


@pytest.mark.parametrize("end", [end_grpc_call, end_grpc_messages])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_no_bytes_are_held_after_requests_of_any_size(served: Any, end: Callable[..., None], outcome: str) -> None:
    def holds_nothing() -> None:
        wait_until(lambda: served.do(lambda: served.front.shared.wire.held_bytes) == 0, "no held bytes")

    for size in SIZES:
        end(served.port, outcome, size, "ident", holds_nothing)
    holds_nothing()


def bomb(model: str, size: int) -> bytes:
    """A message whose content is inflated in many steps."""
    content = zlib.compress(message(model, columns=size // 4).SerializeToString())
    return b"\1" + len(content).to_bytes(4, "big") + content


def test_a_stream_that_waits_for_a_place_cancels_its_requests_at_a_reset(served: Any) -> None:
    """At most PLACES messages are inflated at a time. The stream's second one waits while its first one is executed."""
    deflate = [("grpc-encoding", "deflate")]
    large, small, second = bomb("ident", 32 * MIB), grpc_message(message("held").SerializeToString()), bomb("held", MIB)
    with H2Client(("127.0.0.1", served.port)) as client:
        for _ in range(PERMITS):
            client.call(INFER, large, deflate)
        stream = client.call(STREAM_INFER, None, deflate)
        client.send_data(stream, small, is_end=False)
        client.send_data(stream, second, is_end=False)
        # Some turns of the loop, in which each message is inflated further.
        for _ in range(20):
            assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        assert len(served.core.held) == 1
        client.send(reset(stream))
        served.core.wait_for(lambda core: core.cancelled)


STREAM_BYTES = CALL_BYTES + 300


def holds(served: Any, least: int, most: int) -> Callable[[], bool]:
    return lambda: least <= served.do(lambda: served.front.shared.wire.held_bytes) <= most


def test_metadata_and_many_calls_of_a_connection_are_counted(serve: Any) -> None:
    """They may stay open without a message for as long as the client likes."""
    served = serve(Transport(max_message_bytes=KIB), limits=GrpcLimits(max_held_bytes=64 * KIB))
    with H2Client(("127.0.0.1", served.port)) as client, H2Client(("127.0.0.1", served.port)) as other:
        for _ in range(FREE_CALLS - 1):
            client.call(STREAM_INFER, None)
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        wait_until(holds(served, 0, 0), "no held bytes")
        client.call(STREAM_INFER, None, [("x", "y" * 2000)])
        wait_until(holds(served, 2000, 2000 + STREAM_BYTES), "held metadata")
        refused = [client.call(STREAM_INFER, None) for _ in range(20)][-1]
        assert client.finish(refused)["grpc-status"] == "14"
        # A probe on a connection of its own is answered.
        assert other.finish(other.call(LIVE))["grpc-status"] == "0"
    wait_until(holds(served, 0, 0), "no held bytes")


def test_incomplete_header_blocks_are_counted(serve: Any) -> None:
    served = serve(Transport(max_message_bytes=KIB), limits=GrpcLimits(max_held_bytes=40 * KIB))
    first, second = H2Client(("127.0.0.1", served.port)), H2Client(("127.0.0.1", served.port))
    with first, second:
        part = bytes(10_000)
        first.send(frame(HEADERS, 0, 1, part) + frame(CONTINUATION, 0, 1, part) + frame(CONTINUATION, 0, 1, part)[:-1])
        wait_until(holds(served, 29_000, 31_000), "held bytes")
        second.send(frame(HEADERS, 0, 1, part) + frame(CONTINUATION, 0, 1, part)[:-1])
        assert second.receive_until(second.goaway)
        assert second.goaway() == (11, NO_ROOM.encode())
    wait_until(holds(served, 0, 0), "no held bytes")
