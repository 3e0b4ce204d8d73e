"""Segments of other workers that this worker, the reader, may read: the worker's end.

A model may write to its inputs. So the model gets the segment as private memory: the first write to a page copies the
page for this process, and no other process ever sees the write. Such a private page would hide what the owner writes
there later. So `/proc/self/pagemap` is asked for private pages before a block is used again. If there are any, the
reader reports that it no longer has the segment, and the server sends copies from then on: copying pages one by one
costs more than one copy of the whole tensor. Blocks that are on their way then are copied from a read-only mapping.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable

from halimede.channel.segments import Block, SegmentMap, address
from halimede.core.shm.arena import ALIGNMENT
from halimede.core.types import Buffer

_PAGE = mmap.PAGESIZE
_ENTRY_BYTES = 8
_FILE, _PRESENT_OR_SWAPPED = 0x20, 0xC0
"""Bits of an entry's last byte. A page that is present and is not a page of the file is private."""

_PRIVATE = bytes(byte & _PRESENT_OR_SWAPPED != 0 and not byte & _FILE for byte in range(256))


class SharedSegments(SegmentMap):
    """The segments, by the server's numbers. The server shares a block with this process once at a time."""

    def __init__(self, released: "deque[Block]", on_written: Callable[[int], None]) -> None:
        """`released` gets each block whose last lease is gone, `on_written` the number of a segment that the model has
        written to."""
        super().__init__(released)
        self._on_written = on_written
        self._read_only = SegmentMap(released)
        self._pages: _Pages | None = None

    def try_map(self, number: int, descriptor: int) -> bool:
        """Map a segment; False if that is not possible here. Takes over the descriptor."""
        try:
            self.map(number, os.dup(descriptor), flags=mmap.MAP_PRIVATE)
            self._read_only.map(number, os.dup(descriptor), prot=mmap.PROT_READ)
            if self._pages is None:
                self._pages = _Pages(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))
            if ALIGNMENT % _PAGE == 0:
                return True
        except OSError:
            pass
        finally:
            os.close(descriptor)
        self.unmap(number)
        return False

    def unmap(self, number: int) -> None:
        """Unmap a segment once no lease of it is left. No block of it is shared at that time."""
        super().unmap(number)
        self._read_only.unmap(number)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The owner's bytes; writes to them are private. ValueError if they are not all in the segment."""
        segment = self._segments.get(block[0])
        if segment is not None:
            if not self._is_written(segment.start + offset, size_bytes):
                return segment.lease(block, offset, size_bytes)
            # The private pages are freed with the last lease.
            super().unmap(block[0])
            self._on_written(block[0])
        return memoryview(bytearray(self._read_only.lease(block, offset, size_bytes)))

    def find_unwritten(self, data: Buffer) -> Block | None:
        """Where bytes of this process lie in a segment; None for other memory, and if a page of them is private."""
        where = self.find(data)
        return None if where is None or self._is_written(address(data), len(data)) else where

    def _is_written(self, start: int, size_bytes: int) -> bool:
        return self._pages is None or self._pages.is_any_private(start, size_bytes)


class _Pages:
    """Which pages of this process are private, from `/proc/self/pagemap`."""

    def __init__(self, descriptor: int) -> None:
        """Takes over the descriptor. It stays open, because opening costs as much as checking half a megabyte."""
        self._descriptor = descriptor
        self._stat = os.fstat(descriptor)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def is_any_private(self, start: int, size_bytes: int) -> bool:
        """Whether this process has written to a page of these bytes. True if the kernel does not report it."""
        first = start // _PAGE
        size = (-(-(start + size_bytes) // _PAGE) - first) * _ENTRY_BYTES
        try:
            entries = os.pread(self._descriptor, size, first * _ENTRY_BYTES)
            # A model may close any descriptor, and open another file with its number.
            is_right = os.path.samestat(os.fstat(self._descriptor), self._stat) and len(entries) == size
        except OSError:
            return True
        return not is_right or 1 in entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(_PRIVATE)
