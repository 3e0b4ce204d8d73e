"""Shared memory between the server and one worker process: segments that both map once.

A segment is a memfd: it has no name, so that nothing is left behind whoever dies, and it is not limited by the size of
/dev/shm, which is 64 MiB in most containers. The server makes all of them and seals their size: a worker that could
truncate one would kill the server by SIGBUS at its next look. The pages are reserved when the segment is made, so that
a machine without memory refuses the segment and no process is killed at a write.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import fcntl
import mmap
import os
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from halimede.core.shm.arena import Arena
from halimede.core.types import Buffer

Block = tuple[int, int]
"""Segment and offset."""

_F_SEAL_FUTURE_WRITE = 0x10
"""Of Linux 5.1; the standard library has no name for it."""


def make_segment(size_bytes: int) -> int | None:
    """The descriptor of a new segment; None when the system has no memory for it."""
    if size_bytes > _available_bytes():
        return None
    try:
        descriptor = os.memfd_create("halimede", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        # Not F_SEAL_SEAL: who is lent the segment must not write to it, and is kept from that by one more seal.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _available_bytes() -> int:
    """Linux does not refuse pages of shared memory: it gives what there is, then it kills a process. So look first."""
    try:
        with open("/proc/meminfo", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file)
        return int(lines[b"MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return sys.maxsize


@dataclass(slots=True)
class Loans:
    """What other workers may look at in the segments of one map, and what they do."""

    limit_bytes: int = 0
    """0 where nothing is ever lent."""
    lent_bytes: int = 0
    writable: set[Block] = field(default_factory=set)
    """Blocks that the worker whose segments they are may still write to: none of these is lent."""


class Segment:
    """A segment in this process's memory, for as long as somebody looks at it."""

    __slots__ = ("__weakref__", "array", "descriptor", "loans", "memory", "released", "start")

    def __init__(self, memory: mmap.mmap, descriptor: int, released: "deque[Block]", loans: Loans) -> None:
        self.memory = memory
        self.descriptor = descriptor
        """Its own, -1 for none."""
        self.released = released
        self.loans = loans
        # Of the leases' class, so that a lease is a slice of it whose base is no plain array: numpy makes a plain
        # array over another one a view of that one's base, if that is plain too, and would leave the lease out.
        self.array = np.frombuffer(memory, np.uint8).view(Lease)
        self.start: int = self.array.__array_interface__["data"][0]

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def lent_descriptor(self) -> int:
        """A descriptor for a process that may read the segment. OSError.

        Nobody can map it anew to write to it from now on; its owner, who answered with what lies in it, has mapped it.
        """
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        return os.dup(self.descriptor)


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a block, as an array that says when the last view of it is gone, on whichever thread that is.

    Views of any kind keep it alive: memoryviews, slices, numpy arrays made from them.
    """

    block: Block
    segment: Segment

    def __del__(self) -> None:
        # Whole segments are of this class too, without these attributes. Appending is atomic, and takes no lock: this
        # may run in the middle of anything.
        if "block" in self.__dict__:
            self.segment.released.append(self.block)


class SegmentMap:
    """The segments of one direction, mapped into this process."""

    def __init__(self, lendable_bytes: int = 0) -> None:
        """So many of their bytes may be lent at a time."""
        self._segments: dict[int, Segment] = {}
        self.released: deque[Block] = deque()
        """Blocks of which the last lease has gone."""
        self.loans = Loans(lendable_bytes)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def map(self, number: int, descriptor: int) -> int:
        """Map a segment, and close its descriptor unless it may be lent; returns its size."""
        try:
            size = os.fstat(descriptor).st_size
            memory = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        if not self.loans.limit_bytes:
            os.close(descriptor)
            descriptor = -1
        self._segments[number] = Segment(memory, descriptor, self.released, self.loans)
        return size

    def write(self, block: Block, data: Buffer) -> None:
        """Copy into a block, without the interpreter lock where it takes long."""
        segment, offset = block
        self._segments[segment].array[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The bytes at `offset` of the block's segment. ValueError when they are not all in the segment."""
        segment = self._segments.get(block[0])
        if segment is None or offset < 0 or offset + size_bytes > len(segment.array):
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {block[0]}, which are not there")
        lease: Lease = segment.array[offset : offset + size_bytes]  # type: ignore[assignment]  # slices keep their class
        lease.block = block
        lease.segment = segment
        return memoryview(lease)  # type: ignore[arg-type]  # numpy says so from Python 3.12 on

    def find(self, data: Buffer) -> Block | None:
        """Where bytes that this process has in hand lie in a segment; None for other memory."""
        start = address(data)
        # At once, because segments come on any thread.
        for number, segment in tuple(self._segments.items()):
            if segment.start <= start and start + len(data) <= segment.start + len(segment.array):
                return number, start - segment.start
        return None

    def sizes(self) -> Mapping[int, int]:
        """Bytes by segment."""
        return {number: len(segment.array) for number, segment in tuple(self._segments.items())}


def address(data: Buffer) -> int:
    """Where the bytes are in this process's memory."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class OwnArena:
    """An arena whose blocks this process allocates."""

    def __init__(self, limit_bytes: int, lendable_bytes: int = 0) -> None:
        self.blocks = Arena(limit_bytes)
        self.map = SegmentMap(lendable_bytes)

    def add(self, number: int, descriptor: int) -> None:
        """Take a segment over, with its descriptor."""
        self.blocks.add(number, self.map.map(number, descriptor))
