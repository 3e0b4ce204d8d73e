"""Heads and chunked bodies as bytes, without sockets."""

import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.frontends.http.framing import (
    CLOSE,
    KEEP_ALIVE,
    ChunkedBody,
    Head,
    HeadReader,
    Limits,
    Refusal,
    find_head,
)

LIMITS = Limits()


def read(head: bytes) -> Head:
    return HeadReader().read(memoryview(head))


def refusal(head: bytes) -> tuple[int, str]:
    with pytest.raises(Refusal) as raised:
        read(head)
    return raised.value.status, raised.value.message


def test_a_head_is_method_target_and_lower_case_headers() -> None:
    head = read(b"POST /v2/models/m/infer?x=1 HTTP/1.1\r\nHost: a\r\nContent-LENGTH: 12\r\nX-Empty:\r\n\r\n")
    assert head == Head(
        b"POST",
        b"/v2/models/m/infer?x=1",
        {b"host": b"a", b"content-length": b"12", b"x-empty": b""},
        b"",
        12,
    )


def test_the_connection_is_kept_as_version_and_header_say() -> None:
    def connection(version: bytes, field: bytes) -> bytes:
        return read(b"GET / HTTP/" + version + b"\r\nHost: x\r\n" + field + b"\r\n").connection

    assert connection(b"1.1", b"") == b""
    assert connection(b"1.1", b"Connection: close\r\n") == CLOSE
    assert connection(b"1.1", b"Connection: keep-alive\r\n") == KEEP_ALIVE
    assert connection(b"1.0", b"") == CLOSE
    assert connection(b"1.0", b"Connection: keep-alive\r\n") == KEEP_ALIVE


def test_space_around_a_value_is_not_part_of_it() -> None:
    reader = HeadReader(keep_names=True)
    head = reader.read(memoryview(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: \t b c \t\r\n\r\n"))
    assert (head.headers, head.sent_headers) == (
        {b"host": b"x", b"x-a": b"b c"},
        {b"Host": b"x", b"X-A": b"b c"},
    )


def test_an_offered_upgrade_is_ignored() -> None:
    head = read(
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\n"
    )
    assert (head.method, head.content_length) == (b"POST", 3)


HOST_REFUSALS = {
    b"": "it has no Host header",
    b"Host: a\r\nHost: a\r\n": "more than one Host header",
    b"host: a\r\nX: y\r\nHOST: b\r\n": "more than one Host header",
    b"Host: a b\r\n": "Host must be a host name or address, with or without a port",
    b"Host: a/b\r\n": "Host must be a host name or address, with or without a port",
    b"Host: user@a\r\n": "Host must be a host name or address, with or without a port",
    b"Host: a:b\r\n": "Host must be a host name or address, with or without a port",
    b"Host: [::1\r\n": "Host must be a host name or address, with or without a port",
    b"Host: \xe9\r\n": "Host must be a host name or address, with or without a port",
}


@pytest.mark.parametrize("headers", HOST_REFUSALS)
def test_one_valid_host_header_is_required(headers: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read(b"GET / HTTP/1.1\r\n" + headers + b"\r\n")
    assert (caught.value.status, caught.value.message) == (400, f"malformed HTTP request: {HOST_REFUSALS[headers]}")


@pytest.mark.parametrize(
    "host", [b"a", b"", b"localhost:8000", b"my_model.ns.svc:80", b"10.0.0.1:8000", b"[::1]:8000", b"[fe80::1%25eth0]"]
)
def test_common_hosts_are_accepted(host: bytes) -> None:
    assert read(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n").headers[b"host"] == host


def test_http_1_0_has_at_most_one_host() -> None:
    assert read(b"GET / HTTP/1.0\r\n\r\n").headers == {}
    with pytest.raises(Refusal, match="more than one Host"):
        read(b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n")


@pytest.mark.parametrize("second", [b"chunked", b"gzip", b"identity", b""])
def test_a_second_transfer_encoding_is_refused(second: bytes) -> None:
    for one, other in ((b"chunked", second), (second, b"chunked")):
        fields = b"Transfer-Encoding: %b\r\ntransfer-encoding: %b\r\n" % (one, other)
        with pytest.raises(Refusal) as caught:
            read(b"POST / HTTP/1.1\r\nHost: a\r\n" + fields + b"\r\n")
        assert caught.value.status == 400


def test_other_headers_may_be_repeated() -> None:
    assert read(b"GET / HTTP/1.1\r\nHost: a\r\nX: 1\r\nx: 2\r\nX: 3\r\n\r\n").content_length == 0


def test_a_reader_keeps_no_state_between_heads() -> None:
    reader = HeadReader()
    reader.read(memoryview(b"POST /a HTTP/1.1\r\nHost: x\r\nA: 1\r\nContent-Length: 7\r\n\r\n"))
    with pytest.raises(Refusal):
        reader.read(memoryview(b"POST /b HTTP/1.1\r\nHost: x\r\nB: 1\r\nC : 2\r\n\r\n"))
    assert reader.read(memoryview(b"GET /c HTTP/1.1\r\nHost: x\r\nD: 3\r\n\r\n")) == Head(
        b"GET", b"/c", {b"host": b"x", b"d": b"3"}, b"", 0
    )


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nContent-Length: 5\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 5_0\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 1" + b"0" * 30 + b"\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length\t: 5\r\n",
        b"A: b\r\n folded\r\n",
        b"A: b\0c\r\n",
        b"A: b\rc\r\n",
        b"A\0: b\r\n",
        b": b\r\n",
        b"A b\r\n",
    ],
)
def test_an_ambiguous_head_is_refused(headers: bytes) -> None:
    status, message = refusal(b"POST / HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n")
    assert (status, message[:24]) == (400, "malformed HTTP request: ")


@pytest.mark.parametrize(
    "line",
    [
        b"get / HTTP/1.1",
        b"NOPE / HTTP/1.1",
        b"GET /a b HTTP/1.1",
        b"GET  / HTTP/1.1",
        b"GET /  HTTP/1.1",
        b"\rGET / HTTP/1.1",
        b"GET / HTTP/1.7",
        b"GET / HTTX/1.1",
        b"\x16\x03\x01",
    ],
)
def test_a_bad_request_line_is_refused(line: bytes) -> None:
    assert refusal(line + b"\r\n\r\n")[0] == 400


def test_unsupported_features_of_http_are_refused_by_name() -> None:
    assert refusal(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n") == (
        501,
        "the only transfer coding that is supported is 'chunked'",
    )
    assert refusal(b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n") == (
        400,
        "malformed HTTP request: HTTP/1.0 has no Transfer-Encoding",
    )
    assert refusal(b"GET / HTTP/2.0\r\nConnection: keep-alive\r\n\r\n")[0] == 505
    assert refusal(b"GET / HTTP/2.0\r\n\r\n") == (505, "only HTTP/1.0 and HTTP/1.1 are supported")
    assert refusal(b"GET /\r\n\r\n") == (505, "only HTTP/1.0 and HTTP/1.1 are supported")


def found(data: bytes, limits: Limits = LIMITS) -> int:
    return find_head(bytearray(data), 0, len(data), limits)


def find_refusal(data: bytes, limits: Limits = LIMITS) -> int:
    with pytest.raises(Refusal) as raised:
        found(data, limits)
    return raised.value.status


def test_a_head_ends_with_its_first_empty_line() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n"
    assert found(head + b"\r\n\r\n") == len(head)
    assert [found(head[:n]) for n in range(len(head))] == [0] * len(head)


def test_a_head_has_at_most_a_hundred_headers() -> None:
    def head(count: int) -> bytes:
        return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * count + b"\r\n"

    assert found(head(99)) == len(head(99))
    assert find_refusal(head(100)) == 431


def test_a_head_has_at_most_32_kib() -> None:
    def head(size: int) -> bytes:
        rest = b"GET / HTTP/1.1\r\nHost: x\r\nA: \r\n\r\n"
        return rest[:-4] + b"x" * (size - len(rest)) + rest[-4:]

    assert found(head(32768)) == 32768
    assert find_refusal(head(32769)) == 431
    assert find_refusal(head(60000)[:32769]) == 431
    assert find_refusal(b"GET /" + b"x" * 32765) == 414
    assert find_refusal(b"GET /" + b"x" * 40000 + b" HTTP/1.1\r\nHost: x\r\n\r\n") == 414


def test_bare_line_feeds_are_refused_at_once() -> None:
    assert find_refusal(b"GET / HTTP/1.1\nA: b\n\n") == 400
    assert find_refusal(b"GET / HTTP/1.1\r\nHost: x\r\nA: b\n") == 400


def decode(data: bytes, cuts: list[int], limit: int = 1 << 20, limits: Limits = LIMITS) -> tuple[bytes, bytes]:
    """Feed `data` cut at `cuts`; returns the body, and the bytes after it."""
    chunked = ChunkedBody(Head(b"POST", b"/", {}, b"", None), limit, limits)
    places = [0, *sorted(cuts), len(data)]
    for start, stop in pairwise(places):
        at = chunked.feed(bytearray(data), start, stop)
        if chunked.is_complete:
            return bytes(chunked.body), data[at:]
        assert at == stop
    raise AssertionError("the body did not end")


def encode(chunks: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    parts = [b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk]
    return b"".join(parts) + b"0" + extension + b"\r\n" + trailers + b"\r\n"


@given(
    chunks=st.lists(st.binary(max_size=40), max_size=8),
    extension=st.sampled_from([b"", b";", b";a=b", b';a="x;y"']),
    trailers=st.sampled_from([b"", b"A: b\r\n", b"Content-Length: 9\r\nX-Y:\r\n"]),
    rest=st.binary(max_size=10),
    data=st.data(),
)
def test_a_chunked_body_is_the_same_at_every_cut(
    chunks: list[bytes], extension: bytes, trailers: bytes, rest: bytes, data: st.DataObject
) -> None:
    raw = encode(chunks, extension, trailers) + rest
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=10))
    body, after = decode(raw, cuts)
    assert body == b"".join(chunks)
    assert raw.endswith(after)
    assert rest.startswith(after)


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n",
        b"g\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b" 1\r\n",
        b"1 \r\n",
        b"1\n",
        b"1;a\0b\r\n",
        b"0;\na\r\n",
        b"1" * 17 + b"\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"0\r\nno colon\r\n",
        b"0\r\n: x\r\n",
        b"0\r\nA : x\r\n",
        b"0\r\nA: b\n",
        b"1;" + b"x" * 2000,
    ],
)
def test_bad_chunk_framing_is_refused_wherever_it_is_cut(raw: bytes) -> None:
    for cut in range(len(raw)) if len(raw) < 100 else (1, 2):
        with pytest.raises(Refusal) as raised:
            decode(raw + b"\r\n", [cut])
        assert (raised.value.status, raised.value.message[:22]) == (400, "malformed chunked body")


def test_a_chunked_body_is_refused_by_its_announced_size() -> None:
    with pytest.raises(Refusal) as raised:
        decode(b"5\r\nhello\r\n4\r\n", [], limit=8)
    assert (raised.value.status, raised.value.message) == (
        400,
        "request JSON size of 9 bytes exceeds the maximum allowed input size of 8 bytes. "
        "Use --http-max-input-size to increase the limit.",
    )
    assert decode(b"5\r\nhello\r\n3\r\nyou\r\n0\r\n\r\n", [], limit=8) == (b"helloyou", b"")


def test_chunks_are_counted() -> None:
    chunks = [b"x"] * 65_536
    assert decode(encode(chunks), [])[0] == b"x" * 65_536
    with pytest.raises(Refusal) as raised:
        decode(encode([*chunks, b"x"]), [])
    assert (raised.value.status, raised.value.message) == (
        400,
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks.",
    )


def test_trailers_are_bounded() -> None:
    with pytest.raises(Refusal) as raised:
        decode(encode([], trailers=b"A: bcd\r\n" * 5000), [])
    assert raised.value.status == 431


def test_a_refused_head_leaves_no_state() -> None:
    reader = HeadReader()
    tracemalloc.start()
    try:
        for number in range(500):
            with pytest.raises(Refusal):
                # llhttp waits for the rest of HTTP/2's preface without an error.
                reader.read(memoryview(b"PRI /%d%b HTTP/2.0\r\n\r\n" % (number, b"a" * 20_000)))
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 1 << 20
    head = reader.read(memoryview(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert (head.target, head.headers) == (b"/a", {b"host": b"x"})


def test_a_repeated_head_is_parsed_alike_and_the_cache_is_bounded() -> None:
    reader = HeadReader()
    first = reader.read(memoryview(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"))
    assert reader.read(memoryview(bytearray(b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"))) is first
    assert reader.read(memoryview(b"GET /a HTTP/1.1\r\nHost: y\r\n\r\n")).headers == {b"host": b"y"}
    for number in range(5000):
        reader.read(memoryview(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number))
    assert len(reader.known) <= 512
    long = b"GET /a HTTP/1.1\r\nHost: " + b"x" * 2000 + b"\r\n\r\n"
    assert reader.read(memoryview(long)) == reader.read(memoryview(long))
    assert long not in reader.known
