"""Cuts the bytes of a connection into frames (RFC 9113 section 4.1).

DATA need not be complete: its payload comes in the pieces in which it arrives, so that a large frame is not collected
here. All other frames come whole, and are small. No result depends on how the bytes are cut, but for the pieces.
"""

from collections.abc import Iterator

from halimede.core.wire.http2.codes import END_STREAM, PADDED, ConnectionFault, FrameType, H2Code
from halimede.core.wire.http2.frames import HEAD_BYTES, PREFACE, unpack_head

MAX_COLLECTED_BYTES = 64 << 10
"""The largest frame other than DATA. Only a hostile client sends larger ones."""

DATA = FrameType.DATA
_KNOWN = len(FrameType)

Frame = tuple[int, int, int, memoryview, int]
"""Type, flags, stream, payload, size.

Of DATA the payload is without padding, and may be a piece. `size` is the whole frame's with its padding, for flow
control, and 0 in pieces after the first; END_STREAM is set in the last piece only. In other frames `size` is the
payload's.
"""

_EMPTY = memoryview(b"")


class FrameReader:
    """One client's frames, of at most `max_frame_bytes`. `data_left` is what is still to come of the payload of a DATA
    frame, of `data_stream`. While it `has_unread`, bytes are kept that `read` has not looked at."""

    __slots__ = ("_data_flags", "_is_begun", "_padding_left", "_rest", "_skip_left", "data_left", "data_stream",
                 "has_unread", "max_frame_bytes")  # fmt: skip

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        # The beginning of a frame of which more must come, and at first of the preface.
        self._rest = b""
        self._is_begun = False
        self.data_stream = 0
        self.data_left = 0
        self._data_flags = 0
        self._padding_left = 0
        # Of a frame of an unknown type, whose payload is not collected.
        self._skip_left = 0
        self.has_unread = False

    @property
    def is_within(self) -> bool:
        """Whether the client has sent a part of a frame, or of the preface."""
        return bool(self._rest or self.data_left or self._padding_left or self._skip_left)

    @property
    def kept_bytes(self) -> int:
        """What is kept of frames that are incomplete, or that `read` has not looked at."""
        return len(self._rest)

    def keep(self, data: memoryview) -> None:
        """Read these bytes by the next `read`."""
        self._rest += data
        self.has_unread = True

    def stop(self) -> None:
        """Yield no further frame: the current `read` keeps the rest of its bytes. Not after a piece of DATA."""
        self.has_unread = True

    def read(self, data: memoryview) -> Iterator[Frame]:
        """The frames in `data`, of which payloads are views. ConnectionFault for a frame that is too large."""
        self.has_unread = False
        if self._rest:
            data = memoryview(self._rest + data)
            self._rest = b""
        at, end = 0, len(data)
        if not self._is_begun:
            at = self._read_preface(data)
            if not self._is_begun:
                return
        if self.data_left:
            size = min(end, self.data_left)
            yield self.received_directly(data[:size])
            at = self._skip_padding(size, end)
        elif self._padding_left:
            at = self._skip_padding(0, end)
        if self._skip_left:
            at = self._skip(at, end)
        while end - at >= HEAD_BYTES and not self.has_unread:
            word, flags, stream_id = unpack_head(data, at)
            length = word >> 8
            stop = at + HEAD_BYTES + length
            if stop <= end and not flags & PADDED:
                if length > self.max_frame_bytes:
                    raise _too_large(length, self.max_frame_bytes)
                yield word & 0xFF, flags, stream_id & 0x7FFFFFFF, data[at + HEAD_BYTES : stop], length
                at = stop
                continue
            if length > self.max_frame_bytes:
                raise _too_large(length, self.max_frame_bytes)
            kind = word & 0xFF
            if kind == DATA:
                if flags & PADDED and length and end - at == HEAD_BYTES:
                    break  # The length of the padding has not arrived.
                start = at + HEAD_BYTES
                yield self._begin_data(data, start, length, flags, stream_id & 0x7FFFFFFF)
                at = self._skip_padding(min(end, stop - self._padding_left), end)
            elif stop <= end:
                yield kind, flags, stream_id & 0x7FFFFFFF, data[at + HEAD_BYTES : stop], length
                at = stop
            elif kind >= _KNOWN:
                yield kind, flags, stream_id & 0x7FFFFFFF, _EMPTY, length
                self._skip_left = length
                at = self._skip(at + HEAD_BYTES, end)
            elif length > MAX_COLLECTED_BYTES:
                raise ConnectionFault(H2Code.ENHANCE_YOUR_CALM, f"a frame of type {kind} with {length} bytes")
            else:
                break
        if at < end:
            self._rest = bytes(data[at:])
        else:
            self.has_unread = False

    def received_directly(self, piece: memoryview) -> Frame:
        """The frame of a piece of the DATA in receipt, at most `data_left` bytes."""
        self.data_left -= len(piece)
        flags = self._data_flags if not self.data_left else self._data_flags & ~END_STREAM
        return DATA, flags, self.data_stream, piece, 0

    def _read_preface(self, data: memoryview) -> int:
        """Section 3.4. Returns where it ends."""
        have = bytes(data[: len(PREFACE)])
        if not PREFACE.startswith(have):
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "the connection does not begin with HTTP/2's preface")
        if len(have) < len(PREFACE):
            self._rest = have
        else:
            self._is_begun = True
        return len(have)

    def _begin_data(self, data: memoryview, start: int, length: int, flags: int, stream_id: int) -> Frame:
        """The first piece of a DATA frame that is padded or incomplete."""
        padding, size = 0, length
        if flags & PADDED:
            if not length:
                # Section 4.2.
                raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, "a padded DATA frame without its length")
            # Section 6.1: padding that is as long as the payload or longer.
            if (padding := data[start]) >= length:
                raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a DATA frame with more padding than payload")
            start += 1
            length -= 1 + padding
        self.data_stream, self._data_flags = stream_id, flags
        self.data_left, self._padding_left = length, padding
        kind, flags, stream_id, payload, _ = self.received_directly(data[start : start + length])
        return kind, flags, stream_id, payload, size

    def _skip_padding(self, at: int, end: int) -> int:
        size = min(end - at, self._padding_left) if not self.data_left else 0
        self._padding_left -= size
        return at + size

    def _skip(self, at: int, end: int) -> int:
        size = min(end - at, self._skip_left)
        self._skip_left -= size
        return at + size


def _too_large(length: int, most: int) -> ConnectionFault:
    return ConnectionFault(H2Code.FRAME_SIZE_ERROR, f"a frame of {length} bytes, at most {most} are taken")
