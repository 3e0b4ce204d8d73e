"""A flood of requests over many connections does not keep those of other clients waiting."""

import socket
import threading
from contextlib import ExitStack
from ipaddress import ip_network
from typing import Any

import pytest

from halimede.frontends.turns import Turns
from support.turn_meter import LONGEST_S, TurnMeter

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
FIELDS = b"".join(b"X-%d: %d\r\n" % (number, number) for number in range(80))
BODY = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[1]}]}'
INFER = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CONNECTIONS = 1200
ATTACKER = "127.0.0.2"
CLIENTS = b"203.0.113.1", b"203.0.113.2"


def connections(port: int, source: str, count: int, opened: ExitStack) -> list[socket.socket]:
    """Connections that are accepted."""
    made = []
    for _ in range(count):
        made.append(opened.enter_context(socket.create_connection(("127.0.0.1", port), source_address=(source, 0))))
        made[-1].sendall(LIVE)
    for each in made:
        assert each.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return made


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n" + FIELDS + b"\r\n", INFER], ids=["heads", "infer"])
def test_a_readable_request_is_answered_by_the_end_of_the_second_turn(http: Any, data: bytes) -> None:
    with ExitStack() as opened:
        attackers = connections(http.port, ATTACKER, CONNECTIONS, opened)
        [client] = connections(http.port, "127.0.0.1", 1, opened)
        flood = TurnMeter(http.loop, attackers, data, client, LIVE).measure()
    assert flood.turns <= 2
    assert flood.longest_s <= LONGEST_S


def test_many_small_chunks_keep_no_other_client_waiting(http: Any) -> None:
    """The bodies have begun before, so that all their chunks can be read in one turn."""
    with ExitStack() as opened:
        attackers = connections(http.port, ATTACKER, 60, opened)
        for each in attackers:
            each.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        [client] = connections(http.port, "127.0.0.1", 1, opened)
        flood = TurnMeter(http.loop, attackers, b"1\r\nx\r\n" * 10_000, client, LIVE).measure()
    assert flood.turns <= 3
    assert flood.longest_s <= LONGEST_S


def test_requests_of_a_trusted_proxy_take_turns_by_their_clients(serve: Any) -> None:
    """All come from one address. The requests of the last connection are those of another client."""
    running = serve(turns=Turns([ip_network("127.0.0.1")]))
    with ExitStack() as opened:
        [*attackers, client] = connections(running.port, "127.0.0.1", 300, opened)
        data, request = (LIVE.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: %b\r\n\r\n" % each) for each in CLIENTS)
        flood = TurnMeter(running.loop, attackers, data, client, request).measure()
    assert flood.turns <= 3


def test_pipelined_requests_in_pieces_leave_the_turns_in_order(http: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Pieces come before and after the turn in which a connection goes on with what it has kept."""
    pieces, sent = 40, LIVE * 30
    size = len(sent) // pieces + 1
    with ExitStack() as opened:
        clients = connections(http.port, ATTACKER, 60, opened)
        done = threading.Event()

        def send(number: int) -> None:
            for each in clients:
                each.sendall(sent[number * size : (number + 1) * size])
            if number < pieces:
                http.loop.call_soon(send, number + 1)
            else:
                done.set()

        http.loop.call_soon_threadsafe(send, 0)
        assert done.wait(20)
        for each in clients:
            answers = b""
            while answers.count(b"HTTP/1.1 200 ") < 30 and (answer := each.recv(1 << 16)):
                answers += answer
            assert answers.count(b"HTTP/1.1 200 ") == 30
    assert "turn failed" not in caplog.text
