"""GOAWAY to clients of a server that continues to serve, so that they connect to another server."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from tritonclient.grpc import service_pb2 as pb

from halimede.frontends.grpc.goaway import SEARCH_SECS, Written, is_quiet
from support.h2client import GOAWAY, INFER, LIVE, RST_STREAM, SETTINGS, WINDOW_UPDATE, H2Client, frame, grpc_message

SendAway = Callable[..., Future]
NO_ERROR = (0, b"")
LARGE_BYTES = 16 << 20


@pytest.fixture
def send_away_all(loop_thread) -> Iterator[SendAway]:
    """Starts to send GOAWAY to the clients of a server; ends with the test, or with an error."""
    begun: list[Future] = []

    def begin(served) -> Future:
        begun.append(served.thread.begin(served.front.send_away()))
        return begun[-1]

    yield begin
    for each in begun:
        each.cancel()


def test_a_connection_gets_goaway_once_and_is_still_served(served, send_away_all: SendAway) -> None:
    with H2Client(("127.0.0.1", served.port)) as client:
        held = client.call(INFER, grpc_message(pb.ModelInferRequest(model_name="held").SerializeToString()))
        served.core.wait_for(lambda core: len(core.held) == 1)
        send_away_all(served)
        assert client.receive_until(client.goaway)
        assert client.goaway() == NO_ERROR
        assert int.from_bytes(client.of(GOAWAY)[0].payload[:4], "big") == 2**31 - 1
        # Requests that the client sent before it read the frame are served too.
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        client.receive(1)
        assert len(client.of(GOAWAY)) == 1
        served.do(served.core.release)
        assert client.finish(held)["grpc-status"] == "0"


def test_a_new_connection_gets_goaway_only_after_a_full_round(served, send_away_all: SendAway) -> None:
    with H2Client(("127.0.0.1", served.port)) as client:
        send_away_all(served)
        assert client.receive_until(client.goaway)
    # The next round is near.
    time.sleep(SEARCH_SECS / 2)
    with H2Client(("127.0.0.1", served.port)) as client:
        made_at = time.monotonic()
        assert client.receive_until(client.goaway)
        assert time.monotonic() - made_at > SEARCH_SECS
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"


def test_connections_of_another_port_get_no_goaway(serve, send_away_all: SendAway) -> None:
    closing, other = serve(), serve()
    with H2Client(("127.0.0.1", closing.port)) as client, H2Client(("127.0.0.1", other.port)) as bystander:
        send_away_all(closing)
        assert client.receive_until(client.goaway)
        assert not bystander.receive_until(bystander.goaway, 0.5)


def test_an_answer_that_is_being_sent_is_not_broken(served, send_away_all: SendAway) -> None:
    """The client reads a large answer slowly: grpc writes parts of frames as the socket has room."""
    message = pb.ModelInferRequest(model_name="ident", raw_input_contents=[bytes(range(256)) * (LARGE_BYTES >> 8)])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, LARGE_BYTES >> 2])
    with H2Client(("127.0.0.1", served.port), is_greedy=False) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        wide = (2**30).to_bytes(4, "big")
        client.send(frame(SETTINGS, payload=(4).to_bytes(2, "big") + wide) + frame(WINDOW_UPDATE, payload=wide))
        stream = client.call(INFER, grpc_message(message.SerializeToString()))
        assert client.receive_until(lambda: client.data(stream))
        telling = send_away_all(served)
        while not client.is_over(stream):
            time.sleep(0.01)
            assert client.receive(20)
            assert not client.goaway()
        assert client.finish(stream)["grpc-status"] == "0"
        assert client.data(stream).count(bytes(range(256))) == LARGE_BYTES >> 8
        assert not client.of(RST_STREAM)
        assert client.receive_until(client.goaway)
        assert client.goaway() == NO_ERROR
        assert not telling.done()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (Written(100, 0, 8000), Written(100, 0, 8000), True),
        # A client may acknowledge late.
        (Written(100, 50, 8000), Written(100, 50, 8000), True),
        (Written(100, 0, 8000), Written(1100, 0, 8000), True),
        # It may have filled the send buffer since.
        (Written(100, 0, 8000), Written(1101, 0, 8000), False),
        # It may have filled the send buffer before.
        (Written(100, 1001, 8000), Written(100, 1001, 8000), False),
        # It has not begun to write.
        (Written(0, 0, 8000), Written(0, 0, 8000), False),
    ],
)
def test_a_connection_is_quiet_if_little_is_written_and_unsent(before: Written, now: Written, expected: bool) -> None:
    assert is_quiet(before, now) is expected
