"""Segments of other workers, of which this one reads what they answered.

A model may write to its inputs. So the segment is mapped as private memory: what is written to becomes, page by page,
this process's own, and no other ever sees it. What was written to has to be given up before the same bytes are lent
again, since the owner has written others there meanwhile; which pages these are the kernel tells in
`/proc/self/pagemap`. Pages that become our own cost more than a copy of all: a model that was seen to write borrows
nothing any more, and nobody does where the kernel does not do all of this.

Standard library and numpy only, for any CPython from
3.10 on.
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
"""Bits of an entry's last byte. A page that is there and is no page of the file is our own."""

_OWN = bytes(byte & _PRESENT_OR_SWAPPED != 0 and not byte & _FILE for byte in range(256))


class Borrowed(SegmentMap):
    """The borrowed segments, by the server's numbers. A block is lent to this process once at a time."""

    def __init__(self, released: "deque[Block]") -> None:
        """`released`: where blocks go of which the last lease has gone."""
        super().__init__()
        self.released = released
        self.on_written: Callable[[int], None] = _nobody
        """Is told a segment that the model has written to."""
        self._pages: _Pages | None = None
        self._works = True

    def try_map(self, number: int, descriptor: int) -> bool:
        """Whether tensors may lie in this segment from now on. The descriptor is taken over."""
        try:
            if self._pages is None and self._works:
                self._works = False
                self._pages = _Pages()
                self._works = does_what_it_should(self._pages)
            if not self._works:
                return False
            memory = _map_private(descriptor, os.fstat(descriptor).st_size)
            self._segments[number] = Segment(memory, os.dup(descriptor), self.released, self.loans)
            return True
        except (OSError, ValueError):
            return False
        finally:
            os.close(descriptor)

    def forget(self, number: int) -> None:
        """Nothing of it is lent any more, and nothing will be."""
        self._segments.pop(number, None)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The owner's bytes, to write to for this process alone. ValueError when they are not all in the segment."""
        lease = super().lease(block, offset, size_bytes)
        segment = self._segments[block[0]]
        if not self._is_written(segment, offset, size_bytes):
            return lease
        self.on_written(block[0])
        try:
            segment.memory.madvise(mmap.MADV_DONTNEED, offset, size_bytes)
        except OSError:
            # The model has locked its memory: what it borrowed became its own at once, and cannot be given up.
            copied = bytearray(size_bytes)
            os.preadv(segment.descriptor, [copied], offset)
            return memoryview(copied)
        return lease

    def find_unwritten(self, data: Buffer) -> Block | None:
        """Where bytes that this process has in hand lie in a segment of which they are still the owner's."""
        if not self._segments or (where := self.find(data)) is None:
            return None
        number, offset = where
        return None if self._is_written(self._segments[number], offset, len(data)) else where

    def _is_written(self, segment: Segment, offset: int, size_bytes: int) -> bool:
        return self._pages is None or self._pages.is_any_own(segment.start + offset, size_bytes)


class _Pages:
    """What the kernel says of this process's pages."""

    def __init__(self) -> None:
        self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        with suppress(AttributeError):
            os.close(self._descriptor)

    def is_any_own(self, start: int, size_bytes: int) -> bool:
        """Whether a page of private memory at this address was written to. True where the kernel does not say."""
        first = start // _PAGE
        size = (-(-(start + size_bytes) // _PAGE) - first) * _ENTRY_BYTES
        try:
            said = os.pread(self._descriptor, size, first * _ENTRY_BYTES)
        except OSError:
            return True
        return len(said) != size or 1 in said[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_OWN)


def does_what_it_should(pages: _Pages) -> bool:
    """Whether all that this module relies on is so here: other kernels, and what is in between, may differ. OSError."""
    if ALIGNMENT % _PAGE:
        return False
    descriptor = os.memfd_create("halimede", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 2 * _PAGE)
        theirs, ours = mmap.mmap(descriptor, 2 * _PAGE), _map_private(descriptor, 2 * _PAGE)
    finally:
        os.close(descriptor)
    segment = Segment(ours, -1, deque(), SegmentMap().loans)
    first, second = segment.start, segment.start + _PAGE

    def own() -> tuple[bool, bool]:
        return pages.is_any_own(first, _PAGE), pages.is_any_own(second, 1)

    theirs[0] = theirs[_PAGE] = 1
    seen = [ours[0], ours[_PAGE], own()]
    theirs[0] = 2
    ours[_PAGE] = 3
    seen += [ours[0], theirs[_PAGE], own()]
    theirs[_PAGE] = 4
    ours.madvise(mmap.MADV_DONTNEED, _PAGE, 1)
    seen += [own(), ours[_PAGE], own()]
    return seen == [1, 1, (False, False), 2, 1, (False, True), (False, False), 4, (False, False)]


def _nobody(_: int) -> None:
    """Nobody needs to know."""


def _map_private(descriptor: int, size_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
