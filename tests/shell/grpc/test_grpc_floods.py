"""A flood of calls over many connections does not keep those of other clients waiting."""

import socket
from contextlib import ExitStack
from ipaddress import ip_network
from typing import Any

import pytest
from hpack import Encoder

from halimede.frontends.turns import Turns
from support.grpc_messages import message
from support.h2attack import reset, setting
from support.h2client import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
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
from support.turn_meter import LONGEST_S, TurnMeter

CONNECTIONS = 100
CALLS = 128
ATTACKER = "127.0.0.2"
MAX_TURNS = 4
"""The second turn begins the call. It is answered by a task, and what is to be written is written in the next turn."""


def calls(kind: str) -> bytes:
    """The greeting of a connection, and its part of the flood."""
    encoder = Encoder()
    parts = [PREFACE + frame(SETTINGS)]
    for number in range(CALLS):
        stream = 2 * number + 1
        path = {"live": LIVE, "messages": STREAM_INFER}.get(kind, INFER)
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path)]
        fields += [(":authority", "localhost"), ("te", "trailers"), ("content-type", "application/grpc")]
        if kind == "heads":
            # No head is known from before.
            fields.append(("x-number", str(number)))
        head = frame(HEADERS, END_HEADERS, stream, bytes(encoder.encode(fields)))
        match kind:
            case "pings":
                parts.append(frame(PING, 0, 0, b"lifesign"))
            case "settings":
                parts.append(setting(INITIAL_WINDOW_SIZE, 65_535))
            case "resets":
                parts.append(head + reset(stream))
            case "live":
                parts.append(head + frame(DATA, END_STREAM, stream, bytes(5)))
            case "messages":
                # Of one stream.
                parts.append(frame(DATA, 0, 1, bytes(5) * 300) if number else head)
            case _:
                parts.append(head)
    return b"".join(parts)


def one_call() -> bytes:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", LIVE), (":authority", "localhost")]
    fields += [("te", "trailers"), ("content-type", "application/grpc")]
    head = frame(HEADERS, END_HEADERS, 1, bytes(Encoder().encode(fields)))
    return head + frame(DATA, END_STREAM, 1, bytes(5))


def connections(port: int, source: str, count: int, opened: ExitStack) -> list[socket.socket]:
    """Connections that are accepted: the server has greeted them."""
    made = [
        opened.enter_context(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)))
        for _ in range(count)
    ]
    for each in made:
        assert each.recv(1 << 16)
    return made


@pytest.mark.parametrize("kind", ["open", "heads", "live", "resets", "pings", "settings", "messages"])
def test_a_readable_call_begins_by_the_second_turn(served: Any, kind: str) -> None:
    with ExitStack() as opened:
        attackers = connections(served.port, ATTACKER, CONNECTIONS, opened)
        [client] = connections(served.port, "127.0.0.1", 1, opened)
        client.sendall(PREFACE + frame(SETTINGS))
        assert client.recv(1 << 16)
        flood = TurnMeter(served.thread.loop, attackers, calls(kind), client, one_call()).measure()
    assert flood.turns <= MAX_TURNS
    assert flood.longest_s <= LONGEST_S


@pytest.mark.parametrize(("proxies", "is_first"), [("127.0.0.1", True), ("192.0.2.1", False)])
def test_calls_of_a_trusted_proxy_take_turns_by_their_clients(serve: Any, proxies: str, is_first: bool) -> None:
    """One connection has many calls of one client, and then one of another."""
    served = serve(turns=Turns([ip_network(proxies)]))
    with H2Client(("127.0.0.1", served.port)) as client:
        frames, streams = [], []
        for number in range(120):
            stream, head = client.head(LIVE, [("x-forwarded-for", f"203.0.113.{number // 119}")])
            frames += [head, frame(DATA, END_STREAM, stream, bytes(5))]
            streams.append(stream)
        client.send(b"".join(frames))
        for stream in streams:
            assert client.finish(stream)["grpc-status"] == "0"
        answered = [got.stream for got in client.of(HEADERS) if got.flags & END_STREAM]
    assert (answered.index(streams[-1]) < 60) is is_first


def test_messages_of_a_stream_that_wait_for_their_turns_come_in_order(served: Any) -> None:
    count = 300
    with H2Client(("127.0.0.1", served.port)) as client:
        requests = [message("ident", request_id=str(number)) for number in range(count)]
        sent = b"".join(grpc_message(each.SerializeToString()) for each in requests)
        stream = client.call(STREAM_INFER, sent)
        assert client.finish(stream)["grpc-status"] == "0"
    assert [each.id for each in served.core.requests] == [str(number) for number in range(count)]
    wait_until(lambda: served.do(lambda: served.front.shared.wire.held_bytes) == 0, "no held bytes")
