"""Clients that break the rules of HTTP/2, or use them to cost the server more than themselves, on the running server.

Each connection ends by the code that RFC 9113 gives, while another client's calls succeed and take about as long as alone.
"""

from collections.abc import Iterator
from itertools import repeat

import pytest

from support.bystander import undisturbed
from support.grpc_messages import message
from support.h2attack import ending, flood, number, reset, setting, stream_end, window_update
from support.h2client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    GOAWAY,
    HEADERS,
    INFER,
    INITIAL_WINDOW_SIZE,
    LIVE,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    SETTINGS,
    STREAM_INFER,
    UNKNOWN,
    H2Client,
    frame,
    grpc_message,
)
from support.models import add_identity, delay
from support.server import RunningServer, serving

FLOOD_FRAMES = 60_000
RESETS = 30_000
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Pings are unlimited by their own rule, so that the limit of all cheap frames is the one that is tested."""
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "ident", dims="-1")
    add_identity(repository, "slow", dims="-1", extra=delay(1000))
    flags = ("--grpc-http2-max-ping-strikes=0", "--grpc-max-response-pool-size=1")
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", repository, *flags]) as running:
        yield running
    assert "unexpected error" not in running.log, running.log


@pytest.fixture(autouse=True)
def _others_are_undisturbed(server: RunningServer) -> Iterator[None]:
    with undisturbed(server, "ident"):
        yield


@pytest.fixture
def client(server: RunningServer) -> Iterator[H2Client]:
    with H2Client(("127.0.0.1", server.grpc_port)) as made:
        # Its settings have arrived: what the test sends is not a part of the first bytes.
        assert made.receive_until(lambda: made.of(SETTINGS, ACK))
        yield made


# Floods.


def test_a_rapid_reset_ends_the_connection(client: H2Client) -> None:
    def attack() -> Iterator[bytes]:
        for _ in range(RESETS):
            stream, head = client.head(INFER)
            yield head + reset(stream)

    flood(client, attack())
    assert ending(client) == ENHANCE_YOUR_CALM


def test_requests_that_provoke_resets_of_the_server_end_the_connection(client: H2Client) -> None:
    """As a rapid reset, but the server sends the resets, because each request breaks a rule."""

    def attack() -> Iterator[bytes]:
        for _ in range(RESETS):
            stream, head = client.head(STREAM_INFER, [("content-length", "1")])
            yield head + frame(DATA, 0, stream, b"xx")

    flood(client, attack())
    assert ending(client) == ENHANCE_YOUR_CALM


def test_malformed_requests_without_end_end_the_connection(client: H2Client) -> None:
    block = client.encode([("te", "gzip")])

    def attack() -> Iterator[bytes]:
        for _ in range(RESETS):
            yield frame(HEADERS, END_HEADERS | END_STREAM, client.new_stream(), block)

    flood(client, attack())
    assert ending(client) == ENHANCE_YOUR_CALM


def test_requests_above_the_limit_without_end_end_the_connection(client: H2Client) -> None:
    flood(client, (client.head(STREAM_INFER)[1] for _ in range(RESETS)))
    assert ending(client) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "cheap",
    [
        frame(SETTINGS),
        frame(SETTINGS, ACK),
        setting(INITIAL_WINDOW_SIZE, 65_535),
        frame(PING, 0, 0, b"lifesign"),
        frame(PING, ACK, 0, b"lifesign"),
        frame(PRIORITY, 0, 1, number(0) + b"\0"),
        frame(DATA, 0, 1),
        window_update(0, 1),
        window_update(1, 1),
        frame(GOAWAY, 0, 0, number(0) * 2),
        frame(UNKNOWN, 0, 0, b"x"),
    ],
    ids=[
        "SETTINGS", "SETTINGS ACK", "INITIAL_WINDOW_SIZE", "PING", "PING ACK", "PRIORITY", "empty DATA",
        "WINDOW_UPDATE of the connection", "WINDOW_UPDATE of a stream", "GOAWAY", "unknown",
    ],
)  # fmt: skip
def test_a_flood_of_cheap_frames_ends_the_connection(client: H2Client, cheap: bytes) -> None:
    assert client.call(STREAM_INFER, None) == 1
    flood(client, repeat(cheap, FLOOD_FRAMES))
    assert ending(client) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "cheap", [reset(1), frame(DATA, 0, 1, b"x"), frame(DATA, END_STREAM, 1)], ids=["RST_STREAM", "DATA", "END_STREAM"]
)
def test_a_flood_of_frames_of_a_stream_that_was_reset_ends_the_connection(client: H2Client, cheap: bytes) -> None:
    stream, head = client.head(LIVE)
    client.send(head + window_update(stream, 0))
    assert stream_end(client, stream) == PROTOCOL_ERROR
    flood(client, repeat(cheap, FLOOD_FRAMES))
    assert ending(client) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize("size", [0, 1, 1000, 16_384])
def test_a_header_block_without_end_ends_the_connection(client: H2Client, size: int) -> None:
    stream, head = client.head(LIVE, flags=0)
    flood(client, [head, *repeat(frame(CONTINUATION, 0, stream, bytes(size)), 1000)], per_write=1)
    assert ending(client) == ENHANCE_YOUR_CALM


# Windows.


def test_a_client_that_sends_more_than_the_window_of_a_stream_loses_the_stream(client: H2Client) -> None:
    """The stream is not read while its first request is processed."""
    first = grpc_message(message("slow").SerializeToString()) * 2
    start_of_next = b"\0" + number(32 * MIB)
    stream = client.call(STREAM_INFER, None)
    client.send(frame(DATA, 0, stream, first + start_of_next) + frame(DATA, 0, stream, bytes(16_384)) * 70)
    assert stream_end(client, stream) == FLOW_CONTROL_ERROR


def test_windows_of_zero_and_less_hold_the_answer_until_they_open(server: RunningServer) -> None:
    with H2Client(("127.0.0.1", server.grpc_port), is_greedy=False) as client:
        client.send(setting(INITIAL_WINDOW_SIZE, 1000))
        stream = client.call(INFER, grpc_message(message("ident", columns=2000).SerializeToString()))
        assert client.receive_until(lambda: len(client.data(stream)) == 1000)
        client.send(setting(INITIAL_WINDOW_SIZE, 0))
        client.send(window_update(stream, 1000))  # It is zero then.
        assert client.finish(client.call("/none"))["grpc-status"] == "12"
        assert len(client.data(stream)) == 1000
        client.send(window_update(stream, 100_000))
        assert client.finish(stream)["grpc-status"] == "0"


# Many streams.


def test_streams_that_are_reset_while_they_answer_leave_nothing(server: RunningServer) -> None:
    request = grpc_message(message("ident", columns=MIB // 4).SerializeToString())
    with H2Client(("127.0.0.1", server.grpc_port), is_greedy=False) as client:
        assert client.receive_until(lambda: client.of(SETTINGS, ACK))
        for _ in range(10):
            streams = [client.call(INFER, request) for _ in range(8)]
            assert client.receive_until(lambda streams=streams: all(each in client.fields for each in streams))  # type: ignore[misc]
            client.send(b"".join(map(reset, streams)))
        client.send(window_update(0, MIB))
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        assert client.goaway() is None


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=[pytest.mark.load, pytest.mark.timeout(600)])])
def test_many_streams_one_after_the_other_on_one_connection_are_all_answered(client: H2Client, count: int) -> None:
    """A hundred at a time. The first ones fill the tables of HPACK and the server's caches."""
    body = frame(DATA, END_STREAM, 0, grpc_message(b""))
    answered = 0
    for _ in range(count // 100):
        heads = [client.head(LIVE) for _ in range(100)]
        client.send(b"".join(head + body[:5] + number(stream) + body[9:] for stream, head in heads))
        assert client.receive_until(lambda: len(client.of(HEADERS, END_STREAM)) == 100)
        answered += sum(fields["grpc-status"] == "0" for fields in client.fields.values())
        client.frames.clear()
        client.fields.clear()
    assert answered == count
