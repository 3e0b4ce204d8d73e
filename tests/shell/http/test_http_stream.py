"""An answer in parts on one connection, over a transport in memory: framing, room, time limits, and ends of all kinds."""

import pytest

from halimede.frontends.http.exchange import Stream
from support.http_memory import Client, connect, turns
from support.loops import in_a_loop

OPENING = b"HTTP/1.1 200 OK\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n"


def begin(client: Client, request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n") -> Stream:
    client.send(request)
    return client.exchanges[-1].stream(200, b"A: b\r\n")


@in_a_loop
async def test_the_head_is_sent_with_the_first_part_and_each_part_as_a_chunk() -> None:
    client = connect(answer=False)
    stream = begin(client)
    assert client.answers == b""
    stream.send((b"one", b"two"))
    stream.send((b"x" * 20_000,))
    stream.send((b"last",), is_last=True)
    assert client.transport.written[0] == OPENING + b"6\r\nonetwo\r\n"
    assert client.answers == (
        OPENING + b"6\r\nonetwo\r\n" + b"4e20\r\n" + b"x" * 20_000 + b"\r\n" + b"4\r\nlast\r\n0\r\n\r\n"
    )
    client.send(b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.seen[-1][1] == b"/next"


@in_a_loop
async def test_a_stream_without_parts_is_an_empty_answer() -> None:
    client = connect(answer=False)
    begin(client).send((), is_last=True)
    assert client.answers == OPENING + b"0\r\n\r\n"


@in_a_loop
async def test_an_empty_part_does_not_end_the_chunks() -> None:
    client = connect(answer=False)
    stream = begin(client)
    stream.send(())
    stream.send((b"",))
    stream.send((b"x",), is_last=True)
    assert client.answers == OPENING + b"1\r\nx\r\n0\r\n\r\n"


@in_a_loop
async def test_parts_after_the_end_are_not_sent() -> None:
    client = connect(answer=False)
    stream = begin(client)
    client.exchanges[0].respond(200, b"", (b"the exchange gave its place away",))
    stream.send((b"x",), is_last=True)
    sent = client.answers
    stream.send((b"y",))
    stream.respond(500)
    stream.hold(10)
    assert (client.answers, client.transport.closed, client.listener.shared.unsent_bytes) == (sent, "", 0)


@pytest.mark.parametrize("field", [b"Connection: close\r\n", b""])
@in_a_loop
async def test_the_connection_closes_after_a_stream_if_needed(field: bytes) -> None:
    client = connect(answer=False)
    client.listener.shared.is_leaving = not field
    begin(client, b"GET / HTTP/1.1\r\nHost: x\r\n" + field + b"\r\n").send((b"x",), is_last=True)
    assert b"\r\nConnection: close\r\n" in client.answers
    assert client.transport.closed == "close"


@in_a_loop
async def test_after_a_drain_begins_a_stream_ends_and_the_next_answer_closes() -> None:
    """The answer announced an open connection, so that the client may already have sent a request."""
    client = connect(answer=False)
    stream = begin(client)
    stream.send((b"x",))
    client.listener.send_away()
    stream.send((b"y",), is_last=True)
    assert client.transport.closed == ""
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.exchanges[-1].respond(200)
    assert client.answers.endswith(b"Connection: close\r\n\r\n")
    assert client.transport.closed == "close"


@in_a_loop
async def test_a_drain_during_a_stream_closes_the_connection_at_its_end() -> None:
    client = connect(answer=False)
    stream = begin(client)
    stream.send((b"x",))
    client.listener.shared.is_draining = True
    client.connection.close_if_idle()
    stream.send((b"y",), is_last=True)
    assert client.answers.endswith(b"1\r\ny\r\n0\r\n\r\n")
    assert client.transport.closed == "close"


@in_a_loop
async def test_room_for_parts_depends_on_what_the_client_reads() -> None:
    client = connect(answer=False)
    client.transport.is_fast = False
    stream = begin(client)
    reported: list[bool] = []
    stream.on_room = lambda: reported.append(stream.has_room)
    stream.send((b"x" * 500,))
    assert stream.has_room
    stream.send((b"x" * 500,))
    assert (stream.has_room, reported) == (False, [])
    stream.hold(700)
    assert client.listener.shared.unsent_bytes == client.transport.unsent + 700
    client.transport.take(client.transport.unsent)
    assert (stream.has_room, reported, client.listener.shared.unsent_bytes) == (True, [True], 700)
    stream.send((), is_last=True)
    client.connection.sweep(1.0)
    client.transport.take(client.transport.unsent)
    client.connection.sweep(2.0)
    assert client.listener.shared.unsent_bytes == 0


@in_a_loop
async def test_an_internal_fault_in_the_room_callback_aborts_the_answer() -> None:
    client = connect(answer=False)
    client.transport.is_fast = False
    stream = begin(client)
    stream.on_room = lambda: 1 // 0
    stream.send((b"x" * 2000,))
    client.transport.take(2000)
    assert client.transport.closed == "abort"
    assert "ZeroDivisionError" in client.log[0]


@in_a_loop
async def test_a_client_that_reads_nothing_is_disconnected_despite_new_parts() -> None:
    client = connect(answer=False)
    client.transport.is_fast = False
    stream = begin(client)
    gone: list[bool] = []
    stream.on_gone = lambda: gone.append(True)
    for now in range(61):
        stream.send((b"x",))
        client.connection.sweep(float(now))
        assert client.transport.closed == ("abort" if now == 60 else "")
    client.connection.connection_lost(None)
    assert gone == [True]


@in_a_loop
async def test_a_client_that_reads_slowly_stays_connected() -> None:
    client = connect(answer=False)
    client.transport.is_fast = False
    stream = begin(client)
    for now in range(200):
        stream.send((b"xxx",))
        client.transport.take(1)
        client.connection.sweep(float(now))
    assert client.transport.closed == ""


@in_a_loop
async def test_requests_pipelined_behind_a_stream_wait() -> None:
    client = connect(answer=False)
    stream = begin(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /next HTTP/1.1\r\nHost: x\r\n\r\n")
    stream.send((b"x",))
    await turns()
    assert len(client.seen) == 1
    stream.send((b"y",), is_last=True)
    await turns()
    assert client.seen[-1][1] == b"/next"


@in_a_loop
async def test_a_body_is_held_until_the_answer_has_ended() -> None:
    client = connect(answer=False)
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n")
    client.send(b"x" * 5000)
    stream = client.exchanges[-1].stream(200)
    stream.send((b"x",))
    assert client.listener.shared.wire.held_bytes == 5000
    stream.send((), is_last=True)
    assert client.listener.shared.wire.held_bytes == 0
