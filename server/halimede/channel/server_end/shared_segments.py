"""Segments of other workers that one worker, the reader, may read: the server's end.

1. The first time that bytes of another worker's segment (its owner's) go to the reader, the server sends the reader a
   read-only descriptor of the segment, and a copy of the bytes.
2. The reader reports whether it has mapped the segment. If it has, the server sends places in it instead of copies,
   until the reader reports that its model has written to the segment.
3. The server holds a view of the bytes until the reader gives the block back, so that the owner cannot reuse them.
4. When the last view of a segment is gone, the server has the reader unmap it.

Only bytes that no model can write to are shared: answers in a worker's own arena, and inputs of a worker that has given
them back.
"""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress

from halimede.channel.frames import FIRST_SHARED, FrameError
from halimede.channel.segments import Block, Lease, Segment, address
from halimede.core.shm.arena import ALIGNMENT
from halimede.core.types import Buffer

MIN_SHARED_BYTES = 1 << 20
"""Smaller tensors are copied: below half of this size a copy costs less than the reader's check of its pages."""

MAX_SEGMENTS = 64
"""Maximum segments of other workers that one reader maps at a time."""

_LAST_NUMBER = 0xFFFF


class SharedSegments:
    """The segments of other workers that one reader has. All methods are called on the event loop's thread."""

    def __init__(
        self,
        send_segment: Callable[[int, int], None],
        send_unmap: Callable[[int], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`send_segment` gets the number of a segment and a descriptor, which it takes over; `send_unmap` the number of
        a segment that the reader is to unmap."""
        self._send_segment = send_segment
        self._send_unmap = send_unmap
        self._loop = loop
        self._next = FIRST_SHARED
        self._numbers: dict[weakref.ref[Segment], int] = {}
        self._mapped: set[int] = set()
        """Segments that the reader reads in place, or has read in place: numbers are not used again."""
        self._shared: dict[Block, memoryview] = {}

    def __repr__(self) -> str:
        return f"<SharedSegments {len(self._numbers)} segments, {len(self._shared)} blocks>"

    def can_share(self, data: Buffer) -> bool:
        """Whether `share` would return a block."""
        found = _lease_of(data)
        return found is not None and self._block(found, len(data), address(data)) is not None

    def share(self, data: Buffer) -> Block | None:
        """The place of these bytes for the reader, valid until it gives the block back; None if they must be copied."""
        lease = _lease_of(data)
        if lease is None:
            return None
        if weakref.ref(lease.segment) not in self._numbers:
            self._try_send(lease.segment)
            return None
        block = self._block(lease, len(data), address(data))
        if block is not None:
            self._shared[block] = memoryview(data)
            lease.segment.sharing.shared_bytes += len(data)
        return block

    def _block(self, lease: Lease, size: int, start: int) -> Block | None:
        segment = lease.segment
        number = self._numbers.get(weakref.ref(segment))
        sharing, offset = segment.sharing, start - segment.start
        if (
            number not in self._mapped
            or offset != lease.block[1]
            or offset % ALIGNMENT
            or lease.block in sharing.writable
            or sharing.shared_bytes + size > sharing.limit_bytes
        ):
            return None
        block = number, offset
        # A block is shared once at a time: two tensors would share the reader's private pages.
        return block if block not in self._shared else None

    def _try_send(self, segment: Segment) -> None:
        if len(self._numbers) >= MAX_SEGMENTS or self._next > _LAST_NUMBER or segment.descriptor < 0:
            return
        try:
            descriptor = segment.read_only_descriptor()
        except OSError:
            return
        number = self._next
        self._next += 1
        self._numbers[weakref.ref(segment, self._on_gone)] = number
        self._send_segment(number, descriptor)

    def on_mapped(self, number: int, is_mapped: bool) -> None:
        """The reader has reported whether it reads a segment in place. FrameError."""
        if not FIRST_SHARED <= number < self._next:
            raise FrameError(f"an answer about segment {number}, which was not sent to it")
        if is_mapped:
            self._mapped.add(number)
        else:
            self._mapped.discard(number)

    def view(self, number: int, offset: int, size_bytes: int) -> memoryview:
        """Shared bytes that the reader answers with. ValueError if they are not shared with it."""
        for (segment, start), data in self._shared.items():
            if segment == number and start <= offset and offset + size_bytes <= start + len(data):
                return data[offset - start : offset - start + size_bytes]
        raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {number}, which it was not given")

    def take_back(self, block: Block) -> None:
        """The reader no longer needs the block."""
        data = self._shared.pop(block, None)
        if data is not None and (lease := _lease_of(data)) is not None:
            lease.segment.sharing.shared_bytes -= len(data)

    def close(self) -> None:
        """Free all blocks: the reader has ended."""
        # Without these references the connection and its memory are freed at once.
        self._send_segment = self._send_unmap = _nowhere
        self._numbers.clear()
        for block in list(self._shared):
            self.take_back(block)

    def _on_gone(self, segment: "weakref.ref[Segment]") -> None:
        """The last view of a segment is gone. Called on any thread."""
        number = self._numbers.pop(segment, None)
        if number is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._send_unmap, number)


def _nowhere(*_: int) -> None:
    """No effect: the reader has ended."""


def _lease_of(data: Buffer) -> Lease | None:
    """The lease that these bytes are a view of; None for bytes that are not in shared memory."""
    return data.obj if isinstance(data, memoryview) and isinstance(data.obj, Lease) else None
