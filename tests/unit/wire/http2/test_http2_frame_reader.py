"""Bytes of a client to frames."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.frame_reader import MAX_COLLECTED_BYTES, FrameReader
from support.http2 import DATA, END_STREAM, HEADERS, PADDED, PING, PREFACE, frame, padded

MAX = 16_384
UNKNOWN = 77


def read(reader: FrameReader, *pieces: bytes) -> list[tuple[int, int, int, bytes, int]]:
    return [
        (kind, flags, stream, bytes(payload), size)
        for piece in pieces
        for kind, flags, stream, payload, size in reader.read(memoryview(piece))
    ]


def begun(max_frame_bytes: int = MAX) -> FrameReader:
    reader = FrameReader(max_frame_bytes)
    assert read(reader, PREFACE) == []
    return reader


def fault(*pieces: bytes, reader: FrameReader | None = None) -> H2Code:
    with pytest.raises(ConnectionFault) as caught:
        read(reader or begun(), *pieces)
    return caught.value.code


def test_frames_come_whole_with_their_type_flags_stream_and_size() -> None:
    raw = frame(PING, 1, 0, b"12345678") + frame(HEADERS, 5, 3, b"block") + frame(DATA, 1, 3, b"abc")
    assert read(begun(), raw) == [
        (PING, 1, 0, b"12345678", 8),
        (HEADERS, 5, 3, b"block", 5),
        (DATA, 1, 3, b"abc", 3),
    ]


def test_the_reserved_bit_of_a_stream_is_ignored() -> None:
    assert read(begun(), frame(HEADERS, 4, 3 | 1 << 31, b"x")) == [(HEADERS, 4, 3, b"x", 1)]


def test_the_preface_may_come_in_pieces() -> None:
    reader = FrameReader(MAX)
    assert not reader.is_within
    for at in range(len(PREFACE) - 1):
        assert read(reader, PREFACE[at : at + 1]) == []
        assert reader.is_within
    assert read(reader, PREFACE[-1:] + frame(PING)) == [(PING, 0, 0, b"", 0)]
    assert not reader.is_within


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.1", PREFACE[:-1] + b"\r", b"\x16\x03\x01"])
def test_what_is_no_preface_is_refused_at_its_first_wrong_byte(raw: bytes) -> None:
    """RFC 9113 section 3.4."""
    assert fault(raw, reader=FrameReader(MAX)) is H2Code.PROTOCOL_ERROR


def test_data_comes_in_the_pieces_in_which_it_arrives() -> None:
    reader = begun()
    raw = frame(DATA, END_STREAM, 1, b"abcdef")
    assert read(reader, raw[:8]) == []
    assert read(reader, raw[8:9]) == [(DATA, 0, 1, b"", 6)]
    assert (reader.data_left, reader.data_stream) == (6, 1)
    assert read(reader, raw[9:12]) == [(DATA, 0, 1, b"abc", 0)]
    assert reader.is_within
    assert read(reader, raw[12:] + frame(PING)) == [(DATA, END_STREAM, 1, b"def", 0), (PING, 0, 0, b"", 0)]
    assert (reader.data_left, reader.is_within) == (0, False)


def test_a_piece_that_is_in_its_place_already_counts_as_received() -> None:
    reader = begun()
    assert read(reader, frame(DATA, END_STREAM, 5, b"abcd")[:10]) == [(DATA, 0, 5, b"a", 4)]
    assert reader.received_directly(memoryview(b"bc")) == (DATA, 0, 5, memoryview(b"bc"), 0)
    assert reader.received_directly(memoryview(b"d")) == (DATA, END_STREAM, 5, memoryview(b"d"), 0)
    assert read(reader, frame(PING)) == [(PING, 0, 0, b"", 0)]


def test_the_end_of_a_stream_is_told_once_wherever_padding_is_cut() -> None:
    raw = frame(DATA, PADDED | END_STREAM, 1, padded(b"ab", 3))
    for cut in range(len(raw)):
        got = read(begun(), raw[:cut], raw[cut:])
        assert b"".join(payload for _, _, _, payload, _ in got) == b"ab"
        assert sum(size for *_, size in got) == 6
        assert [flags & END_STREAM for _, flags, *_ in got] == [0] * (len(got) - 1) + [END_STREAM]


def test_padding_after_data_that_was_received_directly_is_skipped() -> None:
    reader = begun()
    raw = frame(DATA, PADDED | END_STREAM, 1, padded(b"ab", 3))
    assert read(reader, raw[:10]) == [(DATA, PADDED, 1, b"", 6)]
    assert reader.received_directly(memoryview(b"ab"))[1] & END_STREAM
    assert reader.is_within
    assert read(reader, raw[12:13]) == []
    assert read(reader, raw[13:] + frame(PING)) == [(PING, 0, 0, b"", 0)]


def test_data_may_be_padding_alone() -> None:
    raw = frame(DATA, PADDED, 1, padded(b"", 4))
    assert read(begun(), raw) == [(DATA, PADDED, 1, b"", 5)]
    assert read(begun(), raw[:11], raw[11:]) == [(DATA, PADDED, 1, b"", 5)]


@pytest.mark.parametrize("padding", [2, 3, 255])
def test_padding_of_data_is_shorter_than_the_payload(padding: int) -> None:
    """RFC 9113 section 6.1."""
    assert fault(frame(DATA, PADDED, 1, bytes((padding, 0)))) is H2Code.PROTOCOL_ERROR
    assert read(begun(), frame(DATA, PADDED, 1, b"\1\0")) == [(DATA, PADDED, 1, b"", 2)]


def test_a_padded_frame_has_the_length_of_its_padding() -> None:
    """RFC 9113 section 4.2."""
    assert fault(frame(DATA, PADDED, 1)) is H2Code.FRAME_SIZE_ERROR


def test_other_padded_frames_come_with_their_padding() -> None:
    raw = padded(b"block", 2)
    assert read(begun(), frame(HEADERS, PADDED, 1, raw)) == [(HEADERS, PADDED, 1, raw, 8)]


@pytest.mark.parametrize("kind", [DATA, HEADERS, UNKNOWN])
@pytest.mark.parametrize("flags", [0, PADDED])
def test_a_frame_above_the_largest_size_is_refused_at_its_head(kind: int, flags: int) -> None:
    """RFC 9113 section 4.2."""
    whole = frame(kind, flags, 1, bytes(MAX + 1))
    assert fault(whole) is H2Code.FRAME_SIZE_ERROR
    assert fault(whole[:9]) is H2Code.FRAME_SIZE_ERROR
    assert sum(size for *_, size in read(begun(), frame(kind, flags, 1, bytes(MAX)))) == MAX


def test_frames_that_are_collected_have_a_limit_of_their_own() -> None:
    large = frame(HEADERS, 4, 1, bytes(MAX_COLLECTED_BYTES + 1))
    assert fault(large[:9], reader=begun(1 << 20)) is H2Code.ENHANCE_YOUR_CALM
    fitting = frame(HEADERS, 4, 1, bytes(MAX_COLLECTED_BYTES))
    assert len(read(begun(1 << 20), fitting[:9], fitting[9:])) == 1


def test_the_payload_of_an_unknown_frame_is_not_collected() -> None:
    reader = begun(1 << 20)
    raw = frame(UNKNOWN, 0, 0, bytes(MAX_COLLECTED_BYTES + 1))
    assert read(reader, raw[:20]) == [(UNKNOWN, 0, 0, b"", MAX_COLLECTED_BYTES + 1)]
    assert read(reader, raw[20:100]) == []
    assert reader.is_within
    assert read(reader, raw[100:] + frame(PING)) == [(PING, 0, 0, b"", 0)]
    assert not reader.is_within


def joined(got: Iterable[tuple[int, int, int, bytes, int]]) -> list[tuple[int, int, int, bytes, int]]:
    """The pieces of DATA as the frames that they are of: a piece with size 0 continues the frame before it."""
    frames: list[tuple[int, int, int, bytes, int]] = []
    for kind, flags, stream, payload, size in got:
        if kind == DATA and not size and frames and frames[-1][0] == DATA and len(frames[-1][3]) < frames[-1][4]:
            _, _, _, before, whole = frames.pop()
            frames.append((kind, flags, stream, before + payload, whole))
        elif kind == UNKNOWN:
            frames.append((kind, flags, stream, b"", size))
        else:
            frames.append((kind, flags, stream, payload, size))
    return frames


PAYLOADS = st.binary(min_size=1, max_size=40)
FRAMES = st.one_of(
    st.builds(frame, st.sampled_from([HEADERS, PING, UNKNOWN]), st.integers(0, 255), st.integers(0, 5), PAYLOADS),
    st.builds(frame, st.just(DATA), st.sampled_from([0, END_STREAM]), st.integers(0, 5), PAYLOADS),
    st.builds(
        lambda flags, payload, padding: frame(DATA, flags | PADDED, 1, padded(payload, padding)),
        st.sampled_from([0, END_STREAM]),
        st.binary(max_size=20),
        st.integers(0, 20),
    ),
)


@given(st.lists(FRAMES, max_size=6), st.data())
def test_frames_do_not_depend_on_how_their_bytes_are_cut(sent: list[bytes], data: st.DataObject) -> None:
    raw = PREFACE + b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[start:end] for start, end in pairwise([0, *cuts, len(raw)])]
    reader = FrameReader(MAX)
    assert joined(read(reader, *pieces)) == joined(read(FrameReader(MAX), raw))
    assert not reader.is_within
