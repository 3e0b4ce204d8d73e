"""Collects header blocks from HEADERS and CONTINUATION frames (RFC 9113 sections 6.2 and 6.10)."""

from dataclasses import dataclass

from halimede.core.wire.http2.codes import (
    END_HEADERS,
    END_STREAM,
    MAX_STREAM_ID,
    PADDED,
    PRIORITY_FIELDS,
    ConnectionFault,
    H2Code,
)
from halimede.core.wire.http2.frames import unpack_number
from halimede.core.wire.http2.limits import MAX_BLOCK_BYTES, MAX_CONTINUATIONS


@dataclass(slots=True)
class Block:
    """A complete header block. `depends_on_itself`: its priority names its own stream, which is a fault."""

    stream_id: int
    content: bytes
    is_end: bool
    depends_on_itself: bool = False


class BlockReader:
    """One client's header blocks. `is_within`: CONTINUATION must follow, and no other frame. `kept_bytes` are those of
    the incomplete block."""

    __slots__ = ("_block", "_continuations", "_pieces", "is_within", "kept_bytes")

    def __init__(self) -> None:
        self.is_within = False
        self._block = Block(0, b"", is_end=False)
        self._continuations = 0
        self._pieces: list[bytes] = []
        self.kept_bytes = 0

    def headers(self, flags: int, stream_id: int, payload: memoryview) -> Block | None:
        """A HEADERS frame; returns the block if it is complete. ConnectionFault for a malformed or large one."""
        if not stream_id & 1:
            # Section 5.1.1; stream 0 has no requests.
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        if len(payload) > MAX_BLOCK_BYTES:
            raise _large()
        depends_on_itself = False
        if flags & (PADDED | PRIORITY_FIELDS):
            payload, depends_on_itself = _without_extras(flags, stream_id, payload)
        block = Block(stream_id, bytes(payload), flags & END_STREAM != 0, depends_on_itself)
        if flags & END_HEADERS:
            return block
        self.is_within = True
        self._block = block
        self._continuations = 0
        self._pieces = [block.content]
        self.kept_bytes = len(payload)
        return None

    def continuation(self, flags: int, stream_id: int, payload: memoryview) -> Block | None:
        """A CONTINUATION frame, as `headers`."""
        block = self._block
        if not self.is_within or block.stream_id != stream_id:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "CONTINUATION without a header block of its stream")
        self._continuations += 1
        self.kept_bytes += len(payload)
        if self.kept_bytes > MAX_BLOCK_BYTES or self._continuations > MAX_CONTINUATIONS:
            raise _large()
        self._pieces.append(bytes(payload))
        if not flags & END_HEADERS:
            return None
        self.is_within = False
        block.content = b"".join(self._pieces)
        self._pieces = []
        self.kept_bytes = 0
        return block


def depends_on(payload: memoryview) -> int:
    """The stream that a priority names (section 6.3)."""
    return int(unpack_number(payload)[0]) & MAX_STREAM_ID


def _large() -> ConnectionFault:
    return ConnectionFault(H2Code.ENHANCE_YOUR_CALM, f"a header block of more than {MAX_BLOCK_BYTES} bytes")


def _without_extras(flags: int, stream_id: int, payload: memoryview) -> tuple[memoryview, bool]:
    """The payload of HEADERS without padding and priority, and whether the stream depends on itself."""
    at, end = 0, len(payload)
    if flags & PADDED:
        if not end:
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, "a padded HEADERS frame without its length")
        end -= payload[0]
        at = 1
        if at > end:
            raise ConnectionFault(H2Code.PROTOCOL_ERROR, "a HEADERS frame with more padding than payload")
    depends_on_itself = False
    if flags & PRIORITY_FIELDS:
        if end - at < 5:
            raise ConnectionFault(H2Code.FRAME_SIZE_ERROR, "a HEADERS frame without its priority")
        depends_on_itself = depends_on(payload[at : at + 4]) == stream_id
        at += 5
    return payload[at:end], depends_on_itself
