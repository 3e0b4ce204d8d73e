"""Requests from a grammar, and damaged ones, compared with a strict parser that is written for this test.

Server and parser must read the same requests and stop at the same place. A different end of a request in two parsers
allows request smuggling.
"""

import asyncio
import re
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from support.http_memory import connect, turns

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
VALUE = rb"[\t\x20-\x7e\x80-\xff]*"
REQUEST_LINE = re.compile(rb"([A-Z-]+) ((?:/|\*|[a-z]+://)[\x21-\x7e]*) HTTP/([0-9])\.([0-9])")
HEADER = re.compile(rb"(" + TOKEN + rb"):(" + VALUE + rb")")
CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(;" + VALUE + rb")?")
HOST = re.compile(
    rb"([\w.~!$&'()*+,;=-]|%[0-9a-fA-F]{2})*(:[0-9]*)?|\[[0-9a-fA-F:.]+(%25[\w.~-]+)?\](:[0-9]*)?", re.ASCII
)
METHODS = {b"GET", b"POST", b"PUT", b"HEAD"}
MAX_BODY = 200_000


class Malformed(Exception):
    pass


class Incomplete(Exception):
    pass


@dataclass
class ParseResult:
    """The complete requests, and the end: "waits" for more input, "refused", or "closed" on the client's request."""

    requests: list[tuple[bytes, bytes, bytes]] = field(default_factory=list)
    end: str = "waits"


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def line(self) -> bytes:
        """Read to CR LF, the only valid end of a line; CR and LF must not occur elsewhere."""
        stop = self.data.find(b"\n", self.at)
        text = self.data[self.at :] if stop < 0 else self.data[self.at : stop]
        if stop < 0:
            raise Incomplete
        if not text.endswith(b"\r") or b"\r" in text[:-1]:
            raise Malformed
        self.at = stop + 1
        return text[:-1]

    def take(self, size: int) -> bytes:
        if len(self.data) - self.at < size:
            raise Incomplete
        self.at += size
        return self.data[self.at - size : self.at]


def reference(data: bytes) -> ParseResult:
    result = ParseResult()
    reader = Reader(data)
    try:
        while True:
            request, is_last = read_request(reader)
            result.requests.append(request)
            if is_last:
                result.end = "closed"
                return result
    except Malformed:
        result.end = "refused"
    except Incomplete:
        pass
    return result


def read_request(reader: Reader) -> tuple[tuple[bytes, bytes, bytes], bool]:
    while reader.data.startswith(b"\r\n", reader.at):
        reader.at += 2
    if b"\r\n\r\n" not in reader.data[reader.at :]:
        # The head may stay incomplete, so that its beginning must already be valid.
        rest = reader.data[reader.at :]
        raise Malformed if rest.count(b"\n") != rest.count(b"\r\n") else Incomplete
    lines = []
    while line := reader.line():
        lines.append(line)
    match = REQUEST_LINE.fullmatch(lines[0])
    if match is None or match[1] not in METHODS or (match[3], match[4]) not in {(b"1", b"0"), (b"1", b"1")}:
        raise Malformed
    fields: dict[bytes, list[bytes]] = {}
    for line in lines[1:]:
        header = HEADER.fullmatch(line)
        if header is None:
            raise Malformed
        fields.setdefault(header[1].lower(), []).append(header[2].strip(b" \t"))
    lengths, codings = fields.get(b"content-length", []), fields.get(b"transfer-encoding", [])
    if len(lengths) + len(codings) > 1 or not all(re.fullmatch(rb"[0-9]+", text) for text in lengths):
        raise Malformed
    if codings and (codings[0].lower() != b"chunked" or match[4] == b"0"):
        raise Malformed
    hosts = fields.get(b"host", [])
    if len(hosts) > 1 or (match[4] == b"1" and not hosts) or not all(map(HOST.fullmatch, hosts)):
        raise Malformed
    options = {each.strip().lower() for text in fields.get(b"connection", []) for each in text.split(b",")}
    is_last = b"close" in options or (match[4] == b"0" and b"keep-alive" not in options)
    if codings:
        body = read_chunks(reader)
    else:
        size = int(lengths[0]) if lengths else 0
        if size > MAX_BODY:
            raise Malformed
        body = reader.take(size)
    return (match[1], match[2], body), is_last


def read_chunks(reader: Reader) -> bytes:
    body = b""
    while True:
        match = CHUNK.fullmatch(reader.line())
        if match is None:
            raise Malformed
        size = int(match[1], 16)
        if size == 0:
            while line := reader.line():
                if HEADER.fullmatch(line) is None:
                    raise Malformed
            return body
        if len(body) + size > MAX_BODY:
            raise Malformed
        body += reader.take(size)
        end = reader.data[reader.at : reader.at + 2]
        if not b"\r\n".startswith(end):
            raise Malformed
        reader.take(2)


def server_result(parts: list[bytes]) -> ParseResult:
    async def scenario() -> ParseResult:
        client = connect()
        for part in parts:
            client.send(part)
            await turns(1)
        await turns(30)
        statuses = [text.split(b" ", 2)[1] for text in client.transport.written]
        # One answer for each request, and a last one for a refusal.
        assert len(statuses) == len(client.seen) + client.transport.eof
        assert all(status == b"200" for status in statuses[: len(client.seen)])
        assert client.log == []
        if client.transport.eof:
            assert client.transport.written[-1].count(b"\r\nConnection: close\r\n") == 1
        end = "refused" if client.transport.eof else "closed" if client.transport.closed else "waits"
        return ParseResult(client.seen, end)

    return asyncio.run(scenario())


# Valid ones, and ambiguous ones.
HEADERS = st.sampled_from(
    [
        b"Host: a",
        b"X:",
        b"x-y: z;=,/",
        b"Host: b:80",
        b"host: [::1]:8000",
        b"Host:",
        b"Host: a b",
        b"Host: a/b",
        b"Host: a@b",
        b"Host: a:b",
        b"Host: a, b",
        b"Host: [::1",
        b"Host: \xe9",
        b"Accept: */*",
        b"Cookie: \xe9",
        b"A:b",
        b"A:\tb\t",
        b"Connection: close",
        b"Connection: keep-alive",
        b"connection: Close",
        b"Connection: x, close",
        b"Upgrade: h2c",
        b"Content-Length: 3",
        b"Content-Length: 03",
        b"Content-Length: 0",
        b"Content-Length: +3",
        b"Content-Length: -3",
        b"Content-Length: 3, 3",
        b"Content-Length: 0x3",
        b"Content-Length:",
        b"Content-Length : 3",
        b" Content-Length: 3",
        b"Content-Length: 3 ",
        b"Content-Length\t: 3",
        b"Content-Length: 3\x0b",
        b"Content-Length: 99999999999999999999",
        b"Content-Length: 1 2",
        b"Content_Length: 3",
        b"Content-Length: 3;",
        b"Transfer-Encoding: chunked",
        b"transfer-encoding:chunked",
        b"Transfer-Encoding: CHUNKED ",
        b"TE: chunked",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding: chunked, identity",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding : chunked",
        b"Transfer-Encoding: \x0bchunked",
        b"Transfer-Encoding: chunked;q=1",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding:",
        b"Transfer-Encoding: chunked, chunked",
        b"X: a\x00b",
        b"X: a\rb",
        b"X: a\nTransfer-Encoding: chunked",
        b"X: a\r Transfer-Encoding: chunked",
        b" folded: y",
        b"\tfolded",
        b": no name",
        b"no colon",
        b"X Y: z",
        b"X(: z",
        b"\xe9: z",
        b"X\x00: z",
        b"Content-Length: 3\r\n 4",
    ]
)
LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1",
        b"POST /a?b=c HTTP/1.1",
        b"PUT /%00 HTTP/1.1",
        b"HEAD /x HTTP/1.0",
        b"POST /y HTTP/1.0",
        b"GET http://other/x HTTP/1.1",
        b"GET / HTTP/1.2",
        b"GET / HTTP/2.0",
        b"GET / HTTP/0.9",
        b"GET  / HTTP/1.1",
        b"GET / HTTP/1.1 ",
        b" GET / HTTP/1.1",
        b"GET /\tHTTP/1.1",
        b"GET / http/1.1",
        b"GET /",
        b"GET",
        b"get / HTTP/1.1",
        b"GET / HTTP/1.10",
        b"GET / HTTP/11",
        b"G\x00T / HTTP/1.1",
        b"GET / HTTP/1.1\r",
        b"NOPE / HTTP/1.1",
    ]
)
BODIES = st.sampled_from(
    [
        b"",
        b"abc",
        b"abcd",
        b"ab",
        b"0\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\r\n",
        b"1;x=y\r\na\r\n2\r\nbc\r\n0\r\nT: v\r\n\r\n",
        b"3\nabc\n0\n\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"-1\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"4\r\nabc\r\n0\r\n\r\n",
        b"3;\nx\r\nabc\r\n0\r\n\r\n",
        b"3\rabc\r\n0\r\n\r\n",
        b"00000000000000003\r\nabc\r\n0\r\n\r\n",
        b"fffffffffffffffff\r\n",
        b"ffffffff\r\n",
        b"\r\n",
        b"3\r\nabc0\r\n\r\n",
        b"0\r\nT : v\r\n\r\n",
        b"0\r\nContent-Length: 9\r\n\r\n",
        b"0\r\nbad\r\n\r\n",
        b"0;\x00\r\n\r\n",
        b"0\r\n\n",
        b"0\r\n\r\r\n",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    lines = [draw(LINES), *draw(st.lists(HEADERS, max_size=3))]
    if draw(st.integers(0, 3)):
        lines.insert(draw(st.integers(1, len(lines))), b"Host: c")
    return b"\r\n".join(lines) + b"\r\n\r\n" + draw(BODIES)


@st.composite
def sound_requests(draw: st.DrawFn) -> bytes:
    """Valid requests, so that others can follow."""
    framed = draw(
        st.sampled_from(
            [
                b"\r\n",
                b"Content-Length: 3\r\n\r\nabc",
                b"Transfer-Encoding: chunked\r\n\r\n3;x\r\nabc\r\n0\r\nT: v\r\n\r\n",
            ]
        )
    )
    return b"POST /sound HTTP/1.1\r\nHost: x\r\n" + framed


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Requests with one or two bytes changed, removed or doubled."""
    data = bytearray(b"".join(draw(st.lists(sound_requests(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["change", "drop", "double", "insert"])):
            case "change":
                data[at] = draw(DAMAGE)
            case "drop":
                del data[at]
            case "double":
                data.insert(at, data[at])
            case _:
                data.insert(at, draw(DAMAGE))
    return bytes(data)


DAMAGE = st.sampled_from(b"\r\n\t\0 :;,0159afxzAZ-/\x0b\x7f\x80\xff")


def check(data: bytes) -> None:
    expected = reference(data)
    for parts in ([data], [data[at : at + 1] for at in range(len(data))]):
        assert server_result(parts) == expected, (data, parts[:1])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(sound_requests(), requests()), min_size=1, max_size=3))
def test_requests_of_the_grammar_are_read_as_by_a_strict_parser(parts: list[bytes]) -> None:
    check(b"".join(parts))


@settings(max_examples=400, deadline=None)
@given(damaged())
def test_damaged_requests_are_read_as_by_a_strict_parser(data: bytes) -> None:
    check(data)
