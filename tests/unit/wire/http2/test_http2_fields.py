"""Header blocks: HPACK and its cache, and the fields of requests and trailers."""

from collections.abc import Callable

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.wire.http2.codes import ConnectionFault, H2Code, StreamFault
from halimede.core.wire.http2.fields import (
    MAX_HEADER_LIST_BYTES,
    HeaderBlocks,
    RequestFields,
    check_request,
    check_trailers,
    literal,
)
from support.examples import Draws, drawn, examples
from support.http2 import REQUEST, Fields, block

PATH = (b":path", b"/a")


def with_fields(*fields: tuple[bytes, bytes]) -> Fields:
    return (*REQUEST, *fields)


def outcome(read: Callable[[], object]) -> object:
    """What a call returns, or the kind and code of its fault."""
    try:
        return read()
    except (StreamFault, ConnectionFault) as fault:
        return type(fault), fault.code


def is_malformed(fields: Fields) -> bool:
    got = outcome(lambda: check_request(fields))
    assert got == (StreamFault, H2Code.PROTOCOL_ERROR) or isinstance(got, RequestFields)
    return isinstance(got, tuple)


def test_a_request_has_its_method_path_fields_and_content_length() -> None:
    fields = (*REQUEST[:3], (b":authority", b"host"), (b"te", b"trailers"), (b"content-length", b"12"), (b"x", b""))
    assert check_request(fields) == RequestFields(
        b"POST", b"/a", ((b"te", b"trailers"), (b"content-length", b"12"), (b"x", b"")), 12
    )
    assert check_request(REQUEST).content_length is None


@pytest.mark.parametrize("missing", range(3))
def test_a_request_has_a_method_a_scheme_and_a_path(missing: int) -> None:
    """RFC 9113 section 8.3.1."""
    assert is_malformed([field for at, field in enumerate(REQUEST) if at != missing])


@pytest.mark.parametrize("name", [b":method", b":path"])
def test_the_method_and_the_path_are_not_empty(name: bytes) -> None:
    """RFC 9113 section 8.3.1."""
    assert is_malformed([(each, b"" if each == name else value) for each, value in REQUEST])


@pytest.mark.parametrize("field", [PATH, (b":status", b"200"), (b":protocol", b"x"), (b":", b"")])
def test_pseudo_header_fields_are_defined_ones_and_not_repeated(field: tuple[bytes, bytes]) -> None:
    """RFC 9113 section 8.3."""
    assert is_malformed((field, *REQUEST))


def test_pseudo_header_fields_come_first() -> None:
    """RFC 9113 section 8.3."""
    assert is_malformed((REQUEST[0], REQUEST[1], REQUEST[3], REQUEST[2]))


NAME_CHARACTERS = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")


def test_names_consist_of_the_characters_of_a_token_in_lower_case() -> None:
    """RFC 9113 section 8.2.1."""
    taken = {byte for byte in range(256) if not is_malformed(with_fields((b"x" + bytes((byte,)), b"1")))}
    assert taken == NAME_CHARACTERS


def test_a_name_is_not_empty() -> None:
    assert is_malformed(with_fields((b"", b"1")))


def refused_in_value(before: bytes, after: bytes, name: bytes = b"x") -> set[int]:
    values = [before + bytes((byte,)) + after for byte in range(256)]
    return {byte for byte, value in enumerate(values) if is_malformed((*REQUEST[:3], (name, value)))}


def test_values_have_no_line_ends_or_nulls() -> None:
    """RFC 9113 section 8.2.1. It also forbids white space around a value, but clients of gRPC send it in metadata."""
    assert refused_in_value(b"a", b"b") == set(b"\0\r\n")
    assert refused_in_value(b"", b"b") == refused_in_value(b"a", b"") == set(b"\0\r\n")
    assert refused_in_value(b"a", b"", name=b":authority") == set(b"\0\r\n\t ")


@pytest.mark.parametrize("name", [b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"])
def test_fields_of_a_connection_are_malformed(name: bytes) -> None:
    """RFC 9113 section 8.2.2."""
    assert is_malformed(with_fields((name, b"x")))


@pytest.mark.parametrize("value", [b"gzip", b"trailers, gzip", b"Trailers", b""])
def test_te_is_trailers_alone(value: bytes) -> None:
    """RFC 9113 section 8.2.2."""
    assert is_malformed((*REQUEST[:3], (b"te", value)))


@pytest.mark.parametrize("value", [b"", b"-1", b"+1", b"1 2", b"0x1", b"1.0", b"9" * 19, "١".encode()])
def test_a_content_length_is_a_number(value: bytes) -> None:
    assert is_malformed(with_fields((b"content-length", value)))
    assert check_request(with_fields((b"content-length", b"9" * 18))).content_length == 10**18 - 1


def test_content_lengths_that_differ_are_malformed() -> None:
    """RFC 9110 section 8.6."""
    assert is_malformed(with_fields((b"content-length", b"1"), (b"content-length", b"2")))
    assert check_request(with_fields((b"content-length", b"1"), (b"content-length", b"1"))).content_length == 1


@pytest.mark.parametrize(
    "field",
    [
        (b":path", b"/"),
        (b":status", b"0"),
        (b"X", b"1"),
        (b"", b""),
        (b"te", b"gzip"),
        (b"upgrade", b"x"),
        (b"x", b"a\n"),
    ],
)
def test_trailers_have_no_fields_that_are_forbidden_there(field: tuple[bytes, bytes]) -> None:
    """RFC 9113 sections 8.1 and 8.2."""
    check_trailers([(b"checksum", b"1"), (b"te", b"trailers")])
    with pytest.raises(StreamFault) as caught:
        check_trailers([(b"checksum", b"1"), field])
    assert caught.value.code is H2Code.PROTOCOL_ERROR


# HPACK.


def blocks() -> HeaderBlocks[RequestFields]:
    return HeaderBlocks(lambda fields: fields)


@pytest.mark.parametrize(
    "raw", [b"\x80", b"\xff", b"\x41", b"\0\x05abc", b"\x3f\xff\xff\xff\xff\xff", b"\x3f\xe2\x1f", b"\x20" * 3]
)
def test_a_block_that_is_no_hpack_ends_the_connection(raw: bytes) -> None:
    """RFC 9113 section 4.3."""
    for read in (blocks().request, blocks().trailers, blocks().skip):
        with pytest.raises(ConnectionFault) as caught:
            read(raw)
        assert caught.value.code is H2Code.COMPRESSION_ERROR


def test_the_fields_of_a_block_have_a_size_limit_with_32_bytes_for_each() -> None:
    large = Encoder()
    name, value = b"x" * 8, b"y" * 2_000
    room = MAX_HEADER_LIST_BYTES - sum(len(name) + len(value) + 32 for name, value in REQUEST)
    count = room // (len(name) + len(value) + 32)
    rest = room - count * (len(name) + len(value) + 32)
    fitting = [*REQUEST, *[(name, value)] * count, (b"z", bytes(rest - 33).replace(b"\0", b"z"))]
    assert len(blocks().request(large.encode(fitting))[0].fields) == count + 2
    with pytest.raises(ConnectionFault) as caught:
        blocks().request(Encoder().encode([*fitting[:-1], (b"z", b"z" * (rest - 32))]))
    assert caught.value.code is H2Code.ENHANCE_YOUR_CALM


def test_a_malformed_request_leaves_the_tables_equal() -> None:
    encoder, reader = Encoder(), blocks()
    with pytest.raises(StreamFault):
        reader.request(encoder.encode([(b"x-first", b"1"), (b":path", b"/")]))
    assert reader.request(encoder.encode(with_fields((b"x-first", b"1"))))[0].fields[-1] == (b"x-first", b"1")


def test_blocks_that_are_skipped_or_trailers_change_the_table() -> None:
    encoder, reader = Encoder(), blocks()
    reader.skip(encoder.encode([(b"a", b"1")]))
    reader.trailers(encoder.encode([(b"b", b"2")]))
    assert reader.request(encoder.encode(with_fields((b"a", b"1"), (b"b", b"2"))))[0].fields[1:] == (
        (b"a", b"1"),
        (b"b", b"2"),
    )


def test_equal_blocks_are_interpreted_once_when_they_change_no_table() -> None:
    interpreted: list[bytes] = []

    def interpret(request: RequestFields) -> int:
        interpreted.append(request.path)
        return len(interpreted)

    reader: HeaderBlocks[int] = HeaderBlocks(interpret)
    encoder = Encoder()
    sent = [encoder.encode(with_fields((b"content-length", b"3"))) for _ in range(4)]
    assert sent[1] == sent[2] == sent[3] != sent[0]
    assert [reader.request(each) for each in sent] == [(1, 3), (2, 3), (2, 3), (2, 3)]
    reader.skip(encoder.encode([(b"new", b"entry")]))
    assert reader.request(encoder.encode(with_fields((b"content-length", b"3")))) == (3, 3)


def test_the_cache_is_bounded_in_blocks_and_in_their_size() -> None:
    interpreted = 0

    def interpret(_: RequestFields) -> int:
        nonlocal interpreted
        interpreted += 1
        return interpreted

    reader: HeaderBlocks[int] = HeaderBlocks(interpret)
    small = [block(with_fields((b"x", b"%d" % at))) for at in range(17)]
    large = block(with_fields(*[(b"x", b"y" * 100)] * 5))
    for each in (*small, large, *small, large):
        reader.request(each)
    assert interpreted == 18 + 2


def added(name: bytes, value: bytes) -> bytes:
    """A field that enters the dynamic table."""
    return b"\x40" + bytes((len(name),)) + name + bytes((len(value),)) + value


POST = b"\x83\x86\x84"
"""Fields of the static table: `:method POST`, `:scheme http`, `:path /`."""
NEWEST = b"\xbe"
"""The newest field of the dynamic table."""
RESIZED = {size: b"\x3f" + bytes((size - 31,)) for size in (60, 100)} | {0: b"\x20", 4096: b"\x3f\xe1\x1f"}


@pytest.mark.parametrize("how", ["request", "trailers", "skip"])
@pytest.mark.parametrize("change", [added(b"b", b"2"), RESIZED[0] + RESIZED[4096] + added(b"b", b"2")])
def test_an_equal_block_has_another_meaning_after_a_change_of_the_table(how: str, change: bytes) -> None:
    reader = blocks()
    reader.skip(added(b"a", b"1"))
    assert reader.request(POST + NEWEST)[0].fields == ((b"a", b"1"),)
    outcome(lambda: getattr(reader, how)(change))
    assert reader.request(POST + NEWEST)[0].fields == ((b"b", b"2"),)


def test_a_block_that_adds_a_field_adds_it_each_time() -> None:
    reader = blocks()
    for _ in range(2):
        reader.request(POST + added(b"a", b"1"))
    assert reader.request(POST + b"\xbe\xbf")[0].fields == ((b"a", b"1"), (b"a", b"1"))


def test_an_entry_that_leaves_a_full_table_makes_blocks_mean_something_else() -> None:
    reader = blocks()
    for name in (b"a", b"b"):
        reader.skip(RESIZED[100] + added(name, b"1" * 10))  # 43 bytes each
    assert reader.request(POST + b"\xbf")[0].fields == ((b"a", b"1" * 10),)
    reader.request(POST + added(b"c", b"1" * 10))
    assert reader.request(POST + b"\xbf")[0].fields == ((b"b", b"1" * 10),)


def test_a_block_that_changes_the_size_of_the_table_does_so_each_time() -> None:
    reader = blocks()
    for size in (60, 4096, 60):
        reader.request(RESIZED[size] + POST)
    reader.skip(added(b"a", b"1" * 30))  # 63 bytes
    assert outcome(lambda: reader.request(POST + NEWEST)) == (ConnectionFault, H2Code.COMPRESSION_ERROR)


def test_old_entries_leave_a_table_that_was_smaller_for_a_moment() -> None:
    reader = blocks()
    for name in (b"a", b"b"):
        reader.skip(added(name, b"1"))
    assert reader.request(POST + b"\xbf")[0].fields == ((b"a", b"1"),)
    reader.request(RESIZED[60] + RESIZED[4096] + POST)
    assert outcome(lambda: reader.request(POST + b"\xbf")) == (ConnectionFault, H2Code.COMPRESSION_ERROR)


def representation(draws: Draws) -> bytes:
    match draws.below(3):
        case 0:
            return draws.pick((NEWEST, b"\xbf", b"\xc0"))
        case 1:
            return added(draws.pick((b"a", b"b")), draws.pick((b"1", b"2", b"x" * 30)))
        case _:
            # The name of an entry with another value, which is added, not indexed, or never indexed.
            return draws.pick((b"\x7e\x013", b"\x0f\x2f\x014", b"\x1f\x30\x015"))


# Rare, because an index of an entry that has left the table ends an example.
SIZES = (*(b"",) * 12, RESIZED[100], RESIZED[60], RESIZED[4096], RESIZED[0] + RESIZED[4096])


def raw_block(draws: Draws) -> bytes:
    fields = [representation(draws) for _ in range(1 + draws.below(2))]
    return b"".join([draws.pick(SIZES), draws.pick((POST, POST, POST, b"")), *fields])


def pool_and_order(draws: Draws) -> tuple[list[bytes], list[tuple[int, bool]]]:
    pool = [raw_block(draws) for _ in range(2 + draws.below(3))]
    return pool, [(draws.below(4), draws.pick((True, True, False))) for _ in range(4 + draws.below(13))]


def plainly(decoder: Decoder, raw: bytes) -> tuple[RequestFields, int | None]:
    """As `HeaderBlocks.request`, without a cache."""
    try:
        fields = tuple((bytes(name), bytes(value)) for name, value in decoder.decode(raw, raw=True))
    except HPACKError:
        raise ConnectionFault(H2Code.COMPRESSION_ERROR, "") from None
    checked = check_request(fields)
    return checked, checked.content_length


@settings(max_examples=examples(500))
@given(drawn(pool_and_order, 70))
def test_the_cache_changes_no_result(case: tuple[list[bytes], list[tuple[int, bool]]]) -> None:
    """Blocks repeat, as requests or as trailers, while others change the dynamic table."""
    pool, order = case
    reader, decoder = blocks(), Decoder(max_header_list_size=MAX_HEADER_LIST_BYTES)
    first = b"".join(added(b"a", b"%d" % number) for number in range(3))
    reader.skip(first)
    decoder.decode(first, raw=True)
    for number, is_request in order:
        raw = pool[number % len(pool)]
        expected = outcome(lambda raw=raw: plainly(decoder, raw))
        is_fatal = isinstance(expected, tuple) and expected[0] is ConnectionFault
        if is_request:
            assert outcome(lambda raw=raw: reader.request(raw)) == expected
        else:
            assert outcome(lambda raw=raw: reader.skip(raw)) == (expected if is_fatal else None)
        if is_fatal:
            return


@given(st.lists(st.tuples(st.binary(max_size=3), st.binary(max_size=300)), max_size=4))
def test_literals_are_what_hpack_reads(fields: list[tuple[bytes, bytes]]) -> None:
    decoder = Decoder()
    raw = b"".join(literal(name, value) for name, value in fields)
    assert [(bytes(name), bytes(value)) for name, value in decoder.decode(raw, raw=True)] == fields
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize("size", [126, 127, 128, 254, 255, 256, 127 + 128 * 128 - 1, 127 + 128 * 128, 40_000])
def test_long_literals_have_lengths_of_several_bytes(size: int) -> None:
    """RFC 7541 section 5.1."""
    assert list(Decoder().decode(literal(b"n", bytes(size)), raw=True)) == [(b"n", bytes(size))]
