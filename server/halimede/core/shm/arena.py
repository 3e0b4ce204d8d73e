"""Allocation of blocks in an arena: arithmetic over shared memory segments, which other code maps.

Only one process allocates in an arena, so processes only share the bytes: a dead process cannot hold a lock, and the
arena ends with its owner. Segments are only added, never removed.
Standard library only, for any CPython from 3.10 on.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ALIGNMENT = 4096
"""Bytes: a page. No two blocks share one, because the pages of a shared block may become private to a reader."""

FIRST_SEGMENT_BYTES = 1 << 20


@dataclass
class _Segment:
    """Free ranges by offset, merged so that no two are adjacent, and the sizes of the blocks in use."""

    size: int
    free: list[tuple[int, int]] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)


class Arena:
    """Blocks in segments that add up to at most `limit_bytes`. Offsets are multiples of ALIGNMENT."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._segments: dict[int, _Segment] = {}
        self.size_bytes = 0
        """Total size of all segments."""

    def __repr__(self) -> str:
        blocks = sum(len(segment.used) for segment in self._segments.values())
        return f"<Arena {len(self._segments)} segments, {self.size_bytes} bytes, {blocks} blocks>"

    @property
    def blocks(self) -> int:
        """How many blocks are in use."""
        return sum(len(segment.used) for segment in self._segments.values())

    @property
    def free_bytes(self) -> int:
        """Size of the largest free range."""
        return max((length for segment in self._segments.values() for _, length in segment.free), default=0)

    def growth(self, size_bytes: int) -> int:
        """The size of a segment to add so that a block of this size fits; 0 if the limit does not allow one.

        Each segment doubles the arena, and the last one takes the rest of the limit, so that their number is small.
        """
        needed = _aligned(size_bytes)
        room = (self._limit_bytes - self.size_bytes) // ALIGNMENT * ALIGNMENT
        return min(max(needed, self.size_bytes, FIRST_SEGMENT_BYTES), room) if needed <= room else 0

    def add(self, segment: int, size_bytes: int) -> None:
        """Add the segment with this number. Its size must be a multiple of ALIGNMENT."""
        self._segments[segment] = _Segment(size_bytes, [(0, size_bytes)])
        self.size_bytes += size_bytes

    def allocate(self, size_bytes: int) -> tuple[int, int] | None:
        """Segment and offset of a block of at least this size, first fit; None if no free range is large enough."""
        size = _aligned(size_bytes)
        for number, segment in self._segments.items():
            for at, (offset, length) in enumerate(segment.free):
                if length < size:
                    continue
                if length == size:
                    del segment.free[at]
                else:
                    segment.free[at] = (offset + size, length - size)
                segment.used[offset] = size
                return number, offset
        return None

    def free(self, segment: int, offset: int) -> bool:
        """Free a block; False if no block begins at this offset."""
        found = self._segments.get(segment)
        size = found.used.pop(offset, 0) if found is not None else 0
        if found is None or not size:
            return False
        ranges = found.free
        at = bisect_left(ranges, (offset, 0))
        if at < len(ranges) and ranges[at][0] == offset + size:
            size += ranges.pop(at)[1]
        if at and sum(ranges[at - 1]) == offset:
            before, length = ranges.pop(at - 1)
            offset, size = before, length + size
        insort(ranges, (offset, size))
        return True

    def holding(self, segment: int, offset: int, size_bytes: int) -> int | None:
        """The offset of the block in use that contains this whole range; None if no block does."""
        found = self._segments.get(segment)
        if found is None or offset < 0:
            return None
        if offset in found.used:
            return offset if size_bytes <= found.used[offset] else None
        for start, size in found.used.items():
            if start <= offset and offset + size_bytes <= start + size:
                return start
        return None


def _aligned(size_bytes: int) -> int:
    return max(ALIGNMENT, -(-size_bytes // ALIGNMENT) * ALIGNMENT)
