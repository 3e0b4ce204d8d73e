"""gRPC's header fields: the head of a call, the status, and the blocks of answers."""

from urllib.parse import unquote_to_bytes

import pytest
from hpack import Decoder
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.wire import grpc_call
from halimede.core.wire.grpc_call import CallHead, percent_encode, read_head, read_timeout
from halimede.core.wire.http2.fields import RequestFields

GRPC = (b"content-type", b"application/grpc")


def head(*fields: tuple[bytes, bytes], method: bytes = b"POST", path: bytes = b"/s/M") -> CallHead:
    return read_head(RequestFields(method, path, fields, None))


def test_the_head_of_a_call() -> None:
    fields = (
        (b"te", b"trailers"),
        GRPC,
        (b"user-agent", b"grpc-python"),
        (b"grpc-timeout", b"2S"),
        (b"grpc-encoding", b"gzip"),
        (b"grpc-accept-encoding", b"identity, gzip,br"),
        (b"authorization", "é\udcff".encode("utf-8", "surrogateescape")),
        (b"trace-bin", b"AAAA"),
        (b"host", b"h"),
    )
    assert head(*fields) == CallHead(
        path="/s/M",
        is_grpc=True,
        timeout_s=2.0,
        encoding=b"gzip",
        accepts=frozenset({b"identity", b"gzip"}),
        metadata=(("user-agent", "grpc-python"), ("authorization", "é�")),
        size_bytes=len("/s/M") + sum(len(name) + len(value) + 32 for name, value in fields),
    )


def test_the_head_of_a_call_without_options() -> None:
    assert head(GRPC, path=b"/\xff") == CallHead(
        path="/�",
        is_grpc=True,
        timeout_s=None,
        encoding=b"identity",
        accepts=frozenset(),
        metadata=(),
        size_bytes=2 + len("content-type") + len("application/grpc") + 32,
    )


def test_the_last_of_repeated_fields_counts() -> None:
    call = head(GRPC, (b"grpc-timeout", b"1S"), (b"grpc-timeout", b"3S"), (b"a", b"1"), (b"a", b"2"))
    assert (call.timeout_s, call.metadata) == (3.0, (("a", "1"), ("a", "2")))


@pytest.mark.parametrize(
    ("content_type", "is_grpc"),
    [
        (b"application/grpc", True),
        (b"application/grpc+proto", True),
        (b"application/grpc;charset=utf-8", True),
        (b"application/grpc-web", False),
        (b"application/json", False),
        (b"", False),
    ],
)
def test_a_call_has_the_content_type_of_grpc(content_type: bytes, is_grpc: bool) -> None:
    assert head((b"content-type", content_type)).is_grpc is is_grpc


def test_a_call_has_the_method_post_and_a_content_type() -> None:
    assert not head(GRPC, method=b"GET").is_grpc
    assert not head().is_grpc


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"3S", 3.0),
        (b"4m", 0.004),
        (b"5u", 5e-6),
        (b"6n", 6e-9),
        (b"0S", 0.0),
        (b"99999999H", 99_999_999 * 3600.0),
    ],
)
def test_timeouts_in_all_units(text: bytes, seconds: float) -> None:
    assert read_timeout(text) == pytest.approx(seconds)
    assert head(GRPC, (b"grpc-timeout", text)).fault == ""


@pytest.mark.parametrize(
    "text", [b"", b"S", b"1", b"100000000S", b"1s", b"1h", b"-1S", b"+1S", b"1.5S", b" 1S", b"1 S", b"1S\n", b"1SS"]
)
def test_other_timeouts_are_a_fault_of_the_call(text: bytes) -> None:
    assert read_timeout(text) is None
    call = head(GRPC, (b"grpc-timeout", text))
    assert (call.timeout_s, call.fault) == (
        None,
        "grpc-timeout is no number of at most eight digits with a unit of H, M, S, m, u or n",
    )


# Answers.


def fields(block: bytes) -> list[tuple[bytes, bytes]]:
    decoder = Decoder()
    found = [(bytes(name), bytes(value)) for name, value in decoder.decode(block, raw=True)]
    assert not decoder.header_table.dynamic_entries, "a block must be the same for all connections"
    return found


OPENING = [(b":status", b"200"), GRPC]


def test_an_answer_begins_with_its_content_type_and_encoding() -> None:
    assert fields(grpc_call.opening()) == OPENING
    for encoding in (b"gzip", b"deflate"):
        assert fields(grpc_call.opening(encoding)) == [*OPENING, (b"grpc-encoding", encoding)]


def test_trailers_have_the_status_and_a_message_if_there_is_one() -> None:
    assert fields(grpc_call.OK_TRAILERS) == [(b"grpc-status", b"0")]
    assert fields(grpc_call.trailers(16, "no way")) == [(b"grpc-status", b"16"), (b"grpc-message", b"no way")]
    assert fields(grpc_call.trailers(5, "")) == [(b"grpc-status", b"5")]
    long = "x" * 4096
    assert fields(grpc_call.trailers(3, long))[1] == (b"grpc-message", long.encode())


def test_an_answer_without_messages_is_trailers_alone() -> None:
    assert fields(grpc_call.trailers_only(12, "50%")) == [
        *OPENING,
        (b"grpc-status", b"12"),
        (b"grpc-message", b"50%25"),
    ]


def test_a_request_that_is_none_of_grpcs_has_an_answer_of_http() -> None:
    assert fields(grpc_call.NOT_GRPC_BLOCK) == [(b":status", b"415"), (b"content-type", b"text/plain; charset=utf-8")]


def test_only_printable_ascii_is_not_percent_encoded() -> None:
    assert percent_encode("a b~") == b"a b~"
    assert percent_encode("100%\n\x7fé\ud800") == b"100%25%0A%7F%C3%A9?"


@given(st.text())
def test_percent_encoding_can_be_undone(message: str) -> None:
    encoded = percent_encode(message)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert unquote_to_bytes(encoded) == message.encode("utf-8", "replace")
