"""The framing of HTTP/1.1 requests, without sockets: heads, chunked bodies, and the limits on both.

A complete head is parsed by llhttp in strict mode. Each head gets a fresh parser state, so that nothing of one request
(a trailer, a flag) can leak into the next. llhttp never sees a body: a body of known length is received into its final
memory, and a chunked body is decoded here. Anything that makes the end of a request ambiguous is a `Refusal`, and the
connection is closed: otherwise two parties could disagree on where the next request begins.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import httptools


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one listener and its connections, besides those of its port. Times are seconds, sizes are bytes.

    A head must be complete within `head_timeout_s`; a body must bring `body_progress_bytes` in every
    `body_progress_s`; a connection whose client reads nothing for `write_timeout_s` is closed. After a refusal,
    input is discarded for `linger_s` or `linger_bytes`, so that the client reads the answer instead of a reset.

    Over all connections, bodies that are received or processed hold at most `max_held_bytes`, with incomplete heads and
    what is kept of further requests. When half of it is held, a body must bring `scarce_progress_bytes` instead:
    otherwise a few slow clients would block the bodies of all others. During a request, no more is received when
    `pipelined_bytes` of further ones are kept.
    """

    max_held_bytes: int = 1 << 30
    max_headers: int = 100
    max_head_bytes: int = 32 << 10
    max_chunks: int = 65_536
    head_timeout_s: float = 10.0
    body_progress_s: float = 10.0
    body_progress_bytes: int = 1 << 10
    scarce_progress_bytes: int = 1 << 20
    write_timeout_s: float = 60.0
    write_buffer_bytes: int = 1 << 20
    pipelined_bytes: int = 4 << 10
    linger_s: float = 5.0
    linger_bytes: int = 1 << 20


class Refusal(Exception):
    """A refused request: it is answered with this status and text, then the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Head:
    """Request line and headers. Names of `headers` are in lower case; the last of several equal names counts.

    `sent_headers` has the names as they were sent; it is empty unless its `HeadReader` keeps them.
    `content_length` is None when the body is chunked. `connection` is the header line that the answer needs to keep or
    close the connection as the client asked, "" where that is the default of HTTP/1.1. `takes_chunks` is false for
    HTTP/1.0, which has no chunked answers.
    """

    method: bytes
    target: bytes
    headers: Mapping[bytes, bytes]
    connection: bytes
    content_length: int | None
    sent_headers: Mapping[bytes, bytes] = field(default_factory=dict)
    takes_chunks: bool = True


KEEP_ALIVE = b"Connection: keep-alive\r\n"
CLOSE = b"Connection: close\r\n"

_HEAD_END = b"\r\n\r\n"
_LF = ord("\n")
_SPACE = b" \t"
# llhttp accepts any number of spaces between the parts, and a CR before them.
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.[01]\r\n")
# A name (which may be empty, RFC 9110), an IPv4 address, or an IPv6 address in brackets; and a port.
_HOST = re.compile(
    rb"(?:(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*|\[[0-9A-Fa-f:.]+(?:%25[A-Za-z0-9._~-]+)?\])(?::[0-9]*)?"
)
_SHORTEST_HEADER = len(b"a:\r\n")
_KNOWN_HEADS = 512
_KNOWN_HEAD_BYTES = 1 << 10


def find_head(data: bytearray, at: int, end: int, limits: Limits) -> int:
    """Where the body begins after the head at `at`, 0 while the head is incomplete. Refuses a head that is too long."""
    stop = data.find(_HEAD_END, at, end)
    if stop < 0:
        _check_partial_head(data, at, end, limits)
        return 0
    if data[at] == _LF:
        # llhttp would skip it in a complete head and refuse it in pieces. The result must not depend on the pieces.
        raise _bare_line_feed()
    stop += len(_HEAD_END)
    size = stop - at
    if size > limits.max_head_bytes:
        raise _too_long(data, at, stop, limits)
    # Two of the line ends belong to the request line and the empty line.
    if size > limits.max_headers * _SHORTEST_HEADER and data.count(b"\r\n", at, stop) - 2 > limits.max_headers:
        raise Refusal(431, f"the request has more than {limits.max_headers} headers")
    return stop


def _check_partial_head(data: bytearray, at: int, end: int, limits: Limits) -> None:
    if end - at > limits.max_head_bytes:
        raise _too_long(data, at, end, limits)
    # A client that ends lines with a bare LF never sends the expected CRLF CRLF.
    if data.count(b"\n", at, end) != data.count(b"\r\n", at, end):
        raise _bare_line_feed()


def _bare_line_feed() -> Refusal:
    return Refusal(400, "malformed HTTP request: lines must end with CR LF")


def _too_long(data: bytearray, at: int, end: int, limits: Limits) -> Refusal:
    if data.find(b"\r\n", at, min(end, at + limits.max_head_bytes)) < 0:
        return Refusal(414, f"the request target is longer than {limits.max_head_bytes} bytes")
    return Refusal(431, f"request line and headers are longer than {limits.max_head_bytes} bytes")


class HeadReader:
    """Parses complete heads, and caches them: a client's next head is mostly equal to its last one.

    One reader serves many connections. It keeps at most _KNOWN_HEADS heads of at most _KNOWN_HEAD_BYTES each.
    """

    def __init__(self, *, keep_names: bool = False) -> None:
        self.known: dict[bytes, Head] = {}
        self._keep_names = keep_names
        self._raw: dict[bytes, bytes] = {}
        self._targets: list[bytes] = []
        self._method = b""
        self._keep_alive = False
        # The parser's callbacks are bound to C functions: no Python frame per header.
        self.on_header: Callable[[bytes, bytes], None] = self._raw.__setitem__
        self.on_url: Callable[[bytes], None] = self._targets.append
        self._parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        self._method = self._parser.get_method()
        self._keep_alive = self._parser.should_keep_alive()

    def read(self, data: memoryview) -> Head:
        """The head in `data`, which ends with its empty line. Refuses a malformed or ambiguous head."""
        raw = bytes(data)
        if len(raw) > _KNOWN_HEAD_BYTES:
            return self._parse(raw)
        head = self.known.get(raw)
        if head is None:
            head = self._parse(raw)
            if len(self.known) >= _KNOWN_HEADS:
                self.known.clear()
            self.known[raw] = head
        return head

    def _parse(self, raw: bytes) -> Head:
        # A refused head may have left something: the preface of HTTP/2 leaves its target, and llhttp reports no error.
        self._method = b""
        self._raw.clear()
        self._targets.clear()
        self._parser = parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass  # An Upgrade header may be ignored; the request is served as it is.
        except httptools.HttpParserError as error:
            raise Refusal(400, f"malformed HTTP request: {error}") from None
        if not self._method:
            raise Refusal(400, "malformed HTTP request: no request line")
        # llhttp leaves the space after a value.
        headers = {name.lower(): value.rstrip(_SPACE) for name, value in self._raw.items()}
        sent = {name: value.rstrip(_SPACE) for name, value in self._raw.items()} if self._keep_names else {}
        target = self._targets.pop()  # llhttp makes one call per value, because the head is in one piece.
        # Every line except the request line and the empty line is a header.
        if len(headers) != raw.count(b"\r\n") - 2:
            _refuse_repeated(raw)
        if headers.get(b"expect", b"100-continue").lower() not in {b"", b"100-continue"}:
            raise Refusal(417, "the only expectation that is supported is '100-continue'")
        if parser.get_http_version() not in {"1.0", "1.1"}:
            raise Refusal(505, "only HTTP/1.0 and HTTP/1.1 are supported")
        if _REQUEST_LINE.match(raw) is None:
            raise Refusal(400, "malformed HTTP request: a request line is method, target and version, one space apart")
        host = headers.get(b"host")
        if host is None:
            if parser.get_http_version() == "1.1":
                raise Refusal(400, "malformed HTTP request: it has no Host header")
        elif _HOST.fullmatch(host) is None:
            raise Refusal(400, "malformed HTTP request: Host must be a host name or address, with or without a port")
        connection = b""
        if not self._keep_alive:
            connection = CLOSE
        elif b"connection" in headers:
            connection = KEEP_ALIVE
        if b"transfer-encoding" in headers:
            if headers[b"transfer-encoding"].strip().lower() != b"chunked":
                raise Refusal(501, "the only transfer coding that is supported is 'chunked'")
            if parser.get_http_version() != "1.1":
                raise Refusal(400, "malformed HTTP request: HTTP/1.0 has no Transfer-Encoding")
            return Head(self._method, target, headers, connection, None, sent)
        length = headers.get(b"content-length")
        is_new = parser.get_http_version() == "1.1"
        # llhttp has checked that it is one decimal number below 2^64.
        return Head(self._method, target, headers, connection, 0 if length is None else int(length), sent, is_new)


def _refuse_repeated(raw: bytes) -> None:
    """Refuse a head that repeats Host or Transfer-Encoding: they decide the target and the end of the request."""
    names = [line.partition(b":")[0].lower() for line in raw.split(b"\r\n")]
    for name in (b"Host", b"Transfer-Encoding"):
        if names.count(name.lower()) > 1:
            raise Refusal(400, f"malformed HTTP request: more than one {name.decode()} header")


def body_too_large(head: Head, size: int, limit: int) -> Refusal:
    """The refusal of a body of `size` bytes, with Triton's text for JSON or binary data."""
    if b"inference-header-content-length" in head.headers:
        excess = f"request binary size of {size} bytes exceeds the maximum allowed value of {limit} bytes"
    else:
        excess = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes"
    return Refusal(400, f"{excess}. Use --http-max-input-size to increase the limit.")


_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_COPY_BELOW = 1 << 10
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")
_MAX_LINE_BYTES = 1 << 10


class _Part(Enum):
    """The part of a chunked body that comes next."""

    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    NOTHING = auto()


class ChunkedBody:
    """Decodes one chunked body, fed in pieces cut anywhere. Extensions and trailers are checked and dropped.

    `body` grows with the bytes that arrive, never with announced sizes. `chunks` is the number of chunks so far.
    """

    __slots__ = ("_head", "_left", "_limit", "_limits", "_line", "_part", "_trailer_bytes", "body", "chunks")

    def __init__(self, head: Head, max_body: int, limits: Limits) -> None:
        self.body = bytearray()
        self._head = head
        self._limit = max_body
        self._limits = limits
        self.chunks = 0
        self._left = 0
        self._trailer_bytes = 0
        self._line = bytearray()
        self._part = _Part.SIZE

    @property
    def is_complete(self) -> bool:
        return self._part is _Part.NOTHING

    def feed(self, data: bytearray, at: int, end: int) -> int:
        """Decode bytes from `at`. Returns where the body ended, or `end`. Refuses bad framing and too large bodies."""
        while at < end:
            part = self._part
            if part is _Part.SIZE:
                if not self._line:
                    at = self._read_whole_chunks(data, at, end)
                    if at == end:
                        break
                at = self._read_size(data, at, end)
            elif part is _Part.DATA:
                at = self._read_data(data, at, end)
            elif part is _Part.DATA_END:
                at = self._read_data_end(data, at, end)
            elif part is _Part.TRAILER:
                at = self._read_trailer(data, at, end)
            else:
                break
        return at

    def _take_line(self, data: bytearray, at: int, end: int) -> int:
        """Add to `_line` up to and including the next LF; the line is complete when it ends with one."""
        stop = data.find(b"\n", at, end) + 1 or end
        if len(self._line) + stop - at > _MAX_LINE_BYTES:
            raise Refusal(400, f"malformed chunked body: a line is longer than {_MAX_LINE_BYTES} bytes")
        self._line += data[at:stop]
        return stop

    def _read_whole_chunks(self, data: bytearray, at: int, end: int) -> int:
        """Decode the chunks that are complete. Returns where the first incomplete one begins.

        This takes a quarter of the time of decoding in pieces, which counts for a body of many small chunks.
        """
        room = min(self._limit - len(self.body), end)
        while self.chunks < self._limits.max_chunks:
            match = _SIZE_LINE.match(data, at, end)
            if match is None or match.end() - at > _MAX_LINE_BYTES:
                break
            size = int(match[1], 16)
            begin = match.end()
            stop = begin + size
            if not 0 < size <= room or data[stop : stop + 2] != b"\r\n" or stop + 2 > end:
                break
            self.body += data[begin:stop] if size < _COPY_BELOW else memoryview(data)[begin:stop]
            self.chunks += 1
            room -= size
            at = stop + 2
        return at

    def _read_size(self, data: bytearray, at: int, end: int) -> int:
        at = self._take_line(data, at, end)
        line = self._line
        if line[-1] != 10:
            return at
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise Refusal(400, "malformed chunked body: bad chunk size")
        size = int(match[1], 16)
        self._line = bytearray()
        if size == 0:
            self._part = _Part.TRAILER
            return at
        self.chunks += 1
        if self.chunks > self._limits.max_chunks:
            raise Refusal(
                400,
                f"Chunked request body exceeds maximum of {self._limits.max_chunks} non-empty chunks. "
                "Send fewer or larger HTTP chunks.",
            )
        if len(self.body) + size > self._limit:
            raise body_too_large(self._head, len(self.body) + size, self._limit)
        self._left = size
        self._part = _Part.DATA
        return at

    def _read_data(self, data: bytearray, at: int, end: int) -> int:
        stop = min(end, at + self._left)
        self.body += memoryview(data)[at:stop]
        self._left -= stop - at
        if self._left == 0:
            self._part = _Part.DATA_END
        return stop

    def _read_data_end(self, data: bytearray, at: int, end: int) -> int:
        stop = min(end, at + 2 - len(self._line))
        self._line += data[at:stop]
        if not b"\r\n".startswith(self._line):
            raise Refusal(400, "malformed chunked body: a chunk is longer than its announced size")
        if len(self._line) == 2:
            self._line = bytearray()
            self._part = _Part.SIZE
        return stop

    def _read_trailer(self, data: bytearray, at: int, end: int) -> int:
        stop = self._take_line(data, at, end)
        self._trailer_bytes += stop - at
        if self._trailer_bytes > self._limits.max_head_bytes:
            raise Refusal(431, f"trailers are longer than {self._limits.max_head_bytes} bytes")
        if self._line[-1] != 10:
            return stop
        if self._line == b"\r\n":
            self._part = _Part.NOTHING
        elif _TRAILER_LINE.fullmatch(self._line) is None:
            raise Refusal(400, "malformed chunked body: bad trailer")
        self._line = bytearray()
        return stop
