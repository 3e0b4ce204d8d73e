"""One connection over a transport in memory: every cut of the input, pipelining, backpressure, and the time limits."""

import asyncio
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Limits
from halimede.frontends.turns import CALLS_PER_TURN
from support.http_memory import MAX_BODY, connect, turns, two_parts
from support.loops import in_a_loop

REQUESTS = {
    "no body": (b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"/a", b"")),
    "length": (
        b"POST /b HTTP/1.1\r\nHost: x\r\ncontent-length: 11\r\n\r\nhello\r\n\r\nyo",
        (b"POST", b"/b", b"hello\r\n\r\nyo"),
    ),
    "chunked": (
        b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhell\r\n3;x=y\r\no\r\n\r\n0\r\nT: v\r\n\r\n",
        (b"POST", b"/c", b"hello\r\n"),
    ),
    "line before": (b"\r\nGET /d HTTP/1.1\r\nHost: x\r\n\r\n", (b"GET", b"/d", b"")),
}


@pytest.mark.parametrize("first", REQUESTS)
@pytest.mark.parametrize("second", REQUESTS)
@in_a_loop
async def test_two_requests_are_read_alike_at_every_cut(first: str, second: str) -> None:
    data = REQUESTS[first][0] + REQUESTS[second][0]
    for parts in two_parts(data):
        client = connect()
        for part in parts:
            client.send(part)
            await turns(2)
        assert client.seen == [REQUESTS[first][1], REQUESTS[second][1]], parts
        assert client.answers == b"".join(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % number for number in (1, 2)
        )
        assert (client.transport.closed, client.transport.reading, client.log) == ("", True, [])


FRAGMENTS = [
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /x HTTP/1.1\r\nHost: x\r\n",
    b"POST /y HTTP/1.0\r\nConnection: keep-alive\r\n",
    b"Content-Length: 4\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"A: b\r\n",
    b"\r\n",
    b"\n",
    b"\r",
    b"4\r\nbody\r\n",
    b"0\r\n\r\n",
    b"0\r\nT: v\r\n\r\n",
    b"body",
    b" ",
    b"\0",
]


@settings(max_examples=500, deadline=None)
@example(fragments=[b"\n", b"GET / HTTP/1.1\r\nHost: x\r\n", b"\r\n"])
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14))
def test_any_input_gets_the_same_result_whole_and_byte_by_byte(fragments: list[bytes]) -> None:
    async def scenario() -> None:
        data = b"".join(fragments)
        outcomes = []
        for parts in ([data], [data[at : at + 1] for at in range(len(data))]):
            client = connect()
            for part in parts:
                client.send(part)
                await turns(2)
            await turns(20)
            statuses = [part.split(b" ", 2)[1] for part in client.transport.written]
            outcomes.append((client.seen, statuses, client.transport.closed, client.transport.eof, client.log))
        assert outcomes[0] == outcomes[1]
        seen, statuses, _, refused, log = outcomes[0]
        assert len(statuses) == len(seen) + refused
        assert log == []

    asyncio.run(scenario())


BAD = {
    "both lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "bad length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
    "bad chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "long chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
    "bad trailer": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nnope\r\n\r\n",
    "bare line feed": b"GET / HTTP/1.1\nHost: x\n\n",
    "not http": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
}


@pytest.mark.parametrize("kind", BAD)
@in_a_loop
async def test_a_framing_error_gets_one_answer_and_closes_the_connection(kind: str) -> None:
    follow_up = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    for parts in two_parts(BAD[kind]):
        client = connect()
        for part in parts:
            client.send(part)
        client.send(follow_up)
        await turns()
        assert client.seen == []
        assert client.answers.startswith(b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n")
        assert client.answers.count(b"HTTP/1.1") == 1
        assert b"\r\nConnection: close\r\n" in client.answers
        assert client.transport.eof


@in_a_loop
async def test_a_large_body_is_received_directly_into_its_buffer() -> None:
    client = connect()
    body = bytes(range(256)) * 512
    client.send(b"POST /big HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:100])
    assert len(client.connection.get_buffer(-1)) == len(body) - 100
    client.send(body[100:] + b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n")
    await turns()
    assert client.seen == [(b"POST", b"/big", body), (b"GET", b"/next", b"")]


@in_a_loop
async def test_a_body_one_byte_above_the_limit_is_refused() -> None:
    client = connect()
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % MAX_BODY + b"x" * MAX_BODY)
    assert client.seen == [(b"POST", b"/", b"x" * MAX_BODY)]
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1))
    assert len(client.seen) == 1
    assert client.answers.endswith(
        b'{"error":"request JSON size of 200001 bytes exceeds the maximum allowed input size of 200000 bytes. '
        b'Use --http-max-input-size to increase the limit."}'
    )


@in_a_loop
async def test_requests_of_a_connection_run_one_by_one_in_order() -> None:
    client = connect(answer=False)
    client.send(
        b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\nGET /3 HTTP/1.1\r\nHost: x\r\n\r\n"
    )
    await turns()
    assert [target for _, target, _ in client.seen] == [b"/1"]
    client.exchanges[0].respond(200, b"", (b"one",))
    await turns()
    assert [target for _, target, _ in client.seen] == [b"/1", b"/2"]
    client.exchanges[1].respond(200, b"", (b"two",))
    await turns()
    client.exchanges[2].respond(200, b"", (b"three",))
    await turns()
    bodies = [part.split(b"\r\n\r\n")[1] for part in client.transport.written]
    assert bodies == [b"one", b"two", b"three"]


@in_a_loop
async def test_the_connection_stops_reading_beyond_the_pipelining_bound() -> None:
    client = connect(answer=False)
    request = b"GET /1234567890 HTTP/1.1\r\nHost: x\r\n\r\n"
    client.send(request * 7)
    assert client.transport.reading
    client.send(request)
    assert not client.transport.reading
    for number in range(8):
        await turns()
        assert len(client.seen) == number + 1
        client.exchanges[number].respond(200)
    await turns()
    assert client.transport.reading


@in_a_loop
async def test_the_connection_stops_reading_from_a_client_that_does_not_read() -> None:
    client = connect(answer=False)
    client.transport.is_fast = False
    client.send(b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n")
    client.exchanges[0].respond(200, b"", (b"x" * 50_000,))
    await turns()
    assert (len(client.seen), client.transport.reading) == (1, False)
    client.transport.take(client.transport.unsent)
    await turns()
    assert (len(client.seen), client.transport.reading) == (2, True)


@in_a_loop
async def test_small_parts_are_joined_and_large_parts_are_written_uncopied() -> None:
    client = connect(handle=lambda exchange: exchange.respond(200, b"", (b"a", b"b" * 50_000, b"c", b"d")))
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 50003\r\n\r\n"
    assert client.transport.written == [head + b"a", b"b" * 50_000, b"cd"]


@in_a_loop
async def test_only_the_first_answer_counts() -> None:
    client = connect(answer=False)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    for body in (b"1", b"2"):
        client.exchanges[0].respond(200, b"", (body,))
    assert client.answers == b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.exchanges[0].respond(200, b"", (b"3",))
    assert [exchange.is_open for exchange in client.exchanges] == [False, True]
    assert len(client.transport.written) == 1


@in_a_loop
async def test_a_disconnect_is_reported_once() -> None:
    client = connect(answer=False)
    gone: list[str] = []
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.exchanges[0].on_gone = lambda: gone.append("gone")
    assert client.connection.eof_received() is False
    client.connection.connection_lost(None)
    client.exchanges[0].respond(200)
    assert (gone, client.transport.written) == (["gone"], [])


@in_a_loop
async def test_an_internal_fault_is_a_500_without_its_details() -> None:
    def fail(exchange: Exchange) -> None:
        raise RuntimeError("secret")

    client = connect(handle=fail)
    client.send(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
    assert client.answers.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in client.answers
    assert client.transport.closed == ""
    assert len(client.log) == 1
    assert "GET /x" in client.log[0]
    assert "RuntimeError: secret" in client.log[0]


@in_a_loop
async def test_a_client_that_expects_100_continue_gets_it() -> None:
    expecting = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n"
    client = connect()
    client.send(expecting)
    assert client.answers == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(b"ab")
    assert client.answers == b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"

    impatient = connect()
    impatient.send(expecting + b"a")
    impatient.send(b"b")
    assert impatient.answers == b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n1"

    chunked = connect()
    chunked.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
    assert chunked.answers == b"HTTP/1.1 100 Continue\r\n\r\n"

    too_much = connect()
    too_much.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200001\r\nExpect: 100-continue\r\n\r\n")
    assert too_much.answers.startswith(b"HTTP/1.1 400 ")

    other = connect()
    other.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: miracles\r\n\r\n")
    assert other.answers.startswith(b"HTTP/1.1 417 ")


@in_a_loop
async def test_100_continue_does_not_overtake_an_earlier_answer() -> None:
    client = connect(answer=False)
    client.send(
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nPOST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    await turns()
    assert client.answers == b""
    client.exchanges[0].respond(200)
    await turns()
    assert client.answers == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"


@in_a_loop
async def test_the_connection_closes_or_stays_open_as_the_client_asks() -> None:
    async def ask(head: bytes) -> tuple[bytes, str]:
        client = connect()
        client.send(head + b"\r\n")
        return client.answers.partition(b"\r\n")[2], client.transport.closed

    length = b"Content-Length: 1\r\n"
    assert await ask(b"GET / HTTP/1.1\r\nHost: x\r\n") == (length + b"\r\n1", "")
    assert await ask(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n") == (
        length + b"Connection: close\r\n\r\n1",
        "close",
    )
    assert await ask(b"GET / HTTP/1.0\r\n") == (length + b"Connection: close\r\n\r\n1", "close")
    assert await ask(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n") == (
        length + b"Connection: keep-alive\r\n\r\n1",
        "",
    )
    assert await ask(b"HEAD / HTTP/1.1\r\nHost: x\r\n") == (length + b"\r\n", "")


@in_a_loop
async def test_after_a_refusal_a_bounded_amount_is_discarded() -> None:
    client = connect(limits=Limits(linger_bytes=1000))
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
    client.send(b"x" * 1000)
    assert client.transport.closed == ""
    client.send(b"x")
    assert client.transport.closed == "close"

    waiting = connect(limits=Limits(linger_s=0.01))
    waiting.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n")
    await asyncio.wait_for(waiting.transport.ended.wait(), 10)
    assert waiting.transport.closed == "abort"


@in_a_loop
async def test_a_drain_closes_idle_connections_at_once_and_others_after_answers() -> None:
    client = connect(answer=False)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.listener.send_away()
    client.connection.close_if_idle()
    assert client.transport.closed == ""
    client.exchanges[0].respond(200)
    assert client.answers == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert client.transport.closed == "close"

    idle = connect()
    idle.connection.close_if_idle()
    assert idle.transport.closed == "close"


@in_a_loop
async def test_a_body_of_many_chunks_yields_to_other_connections() -> None:
    client = connect()
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(b"1\r\nx\r\n" * 255)
    assert client.transport.reading
    client.send(b"1\r\nx\r\n" * 256)
    assert not client.transport.reading
    await turns(2)
    assert client.transport.reading
    client.send(b"0\r\n\r\n")
    assert client.seen == [(b"POST", b"/", b"x" * 511)]


@in_a_loop
async def test_chunks_that_come_when_the_turn_is_used_up_are_read_in_the_next_one() -> None:
    client = connect()
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.listener.count(0.0, CALLS_PER_TURN)
    client.send(b"1\r\nx\r\n0\r\n\r\nGET /next HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (client.seen, client.transport.reading) == ([], False)
    assert client.listener.shared.wire.held_bytes == 42
    await turns()
    assert client.seen == [(b"POST", b"/", b"x"), (b"GET", b"/next", b"")]
    assert (client.listener.shared.wire.held_bytes, client.transport.reading) == (0, True)


@in_a_loop
async def test_reading_resumes_after_a_pipelined_body_of_many_chunks() -> None:
    client = connect(answer=False)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    body = b"1\r\nx\r\n" * 1001 + b"0\r\n\r\n"
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert not client.transport.reading
    client.exchanges[0].respond(200)
    await turns()
    assert client.seen[1] == (b"POST", b"/", b"x" * 1001)
    assert client.transport.reading


@in_a_loop
async def test_an_internal_fault_aborts_an_answer_that_is_sent_in_parts() -> None:
    client = connect(answer=False)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    client.exchanges[0].stream(200).send((b"part",))
    sent = client.answers
    client.connection.buffer_updated(cast("int", "no number"))  # It fails like an internal fault.
    assert (client.answers, client.transport.closed) == (sent, "abort")
    assert len(client.log) == 1
