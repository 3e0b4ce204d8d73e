"""Segments of other workers that this worker, the reader, may read: the worker's end.

A model may write to its inputs. So the reader maps the segment as private memory: the first write to a page copies the
page for this process, and no other process ever sees the write. Such a private page would hide what the owner writes
there later. So private pages are dropped before a block is used again; `/proc/self/pagemap` shows which pages are
private. Copying pages one by one costs more than one copy of the whole tensor, so a model that writes to its inputs is
reported to the server, which sends it only copies from then on. Where a kernel does not support all of this, nothing is
shared.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from halimede.core.shm.arena import ALIGNMENT
from halimede.core.types import Buffer
from halimede.workers.segments import Block, Segment, SegmentMap

_PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8
_FILE, _PRESENT_OR_SWAPPED = 0x20, 0xC0
"""Bits of an entry's last byte. A page that is present and is not a page of the file is private."""

_PRIVATE = bytes(byte & _PRESENT_OR_SWAPPED != 0 and not byte & _FILE for byte in range(256))


class SharedSegments(SegmentMap):
    """The segments, by the server's numbers. The server shares a block with this process once at a time."""

    def __init__(self, released: "deque[Block]") -> None:
        """`released` gets each block whose last lease is gone."""
        super().__init__()
        self.released = released
        self.on_written: Callable[[int], None] = _no_callback
        """Called with the number of a segment that the model has written to."""
        self._pages: _Pages | None = None
        self._works = True

    def try_map(self, number: int, descriptor: int) -> bool:
        """Map a segment; False if that is not possible here. Takes over the descriptor."""
        try:
            if self._pages is None and self._works:
                self._works = False
                self._pages = _Pages()
                self._works = supports_shared_segments(self._pages)
            if not self._works:
                return False
            memory = _map_private(descriptor, os.fstat(descriptor).st_size)
            self._segments[number] = Segment(memory, os.dup(descriptor), self.released, self.sharing)
            return True
        except (OSError, ValueError):
            return False
        finally:
            os.close(descriptor)

    def unmap(self, number: int) -> None:
        """Unmap a segment once no lease of it is left. No block of it is shared at that time."""
        self._segments.pop(number, None)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The owner's bytes; writes to them are private. ValueError if they are not all in the segment."""
        lease = super().lease(block, offset, size_bytes)
        segment = self._segments[block[0]]
        if not self._is_written(segment, offset, size_bytes):
            return lease
        self.on_written(block[0])
        try:
            segment.memory.madvise(mmap.MADV_DONTNEED, offset, size_bytes)
        except OSError:
            # The model has locked its memory (mlockall): every page became private at once, and cannot be dropped.
            copied = bytearray(size_bytes)
            os.preadv(segment.descriptor, [copied], offset)
            return memoryview(copied)
        return lease

    def find_unwritten(self, data: Buffer) -> Block | None:
        """Where bytes of this process lie in a segment; None for other memory, and if a page of them is private."""
        if not self._segments or (where := self.find(data)) is None:
            return None
        number, offset = where
        return None if self._is_written(self._segments[number], offset, len(data)) else where

    def _is_written(self, segment: Segment, offset: int, size_bytes: int) -> bool:
        return self._pages is None or self._pages.is_any_private(segment.start + offset, size_bytes)


class _Pages:
    """Reads which pages of this process are private, from `/proc/self/pagemap`."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with suppress(AttributeError):
            os.close(self._descriptor)

    def is_any_private(self, start: int, size_bytes: int) -> bool:
        """Whether a page of these bytes was written to. True if the kernel does not report it."""
        first = start // _PAGE
        size = (-(-(start + size_bytes) // _PAGE) - first) * _ENTRY_BYTES
        try:
            entries = os.pread(self._descriptor, size, first * _ENTRY_BYTES)
        except OSError:
            return True
        return len(entries) != size or 1 in entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_PRIVATE)


def supports_shared_segments(pages: _Pages) -> bool:
    """Whether this kernel, or what emulates it, behaves as this module needs. OSError."""
    if ALIGNMENT % _PAGE:
        return False
    descriptor = os.memfd_create("halimede", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 2 * _PAGE)
        owner, reader = mmap.mmap(descriptor, 2 * _PAGE), _map_private(descriptor, 2 * _PAGE)
    finally:
        os.close(descriptor)
    segment = Segment(reader, -1, deque(), SegmentMap().sharing)
    first, second = segment.start, segment.start + _PAGE

    def private() -> tuple[bool, bool]:
        return pages.is_any_private(first, _PAGE), pages.is_any_private(second, 1)

    owner[0] = owner[_PAGE] = 1
    seen = [reader[0], reader[_PAGE], private()]
    owner[0] = 2
    reader[_PAGE] = 3
    seen += [reader[0], owner[_PAGE], private()]
    owner[_PAGE] = 4
    reader.madvise(mmap.MADV_DONTNEED, _PAGE, 1)
    seen += [private(), reader[_PAGE], private()]
    return seen == [1, 1, (False, False), 2, 1, (False, True), (False, False), 4, (False, False)]


def _no_callback(_: int) -> None:
    """No callback is set."""


def _map_private(descriptor: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
