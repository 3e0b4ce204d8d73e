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
from typing import Any

import numpy as np

from halimede.core.shm.arena import Arena
from halimede.core.types import Buffer

Block = tuple[int, int]
"""Segment and offset."""


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
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
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


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a block, as an array that says when the last view of it is gone, on whichever thread that is.

    Views of any kind keep it alive: memoryviews, slices, numpy arrays made from them.
    """

    block: Block
    released: "deque[Block]"

    def __del__(self) -> None:
        # Whole segments are of this class too, without these attributes. Appending is atomic, and takes no lock: this
        # may run in the middle of anything.
        if "block" in self.__dict__:
            self.released.append(self.block)


class SegmentMap:
    """The segments of one direction, mapped into this process."""

    def __init__(self) -> None:
        self._arrays: dict[int, Lease] = {}
        self._starts: dict[int, int] = {}
        self.released: deque[Block] = deque()
        """Blocks of which the last lease has gone."""

    def map(self, number: int, descriptor: int) -> int:
        """Map a segment and close its descriptor; returns its size."""
        try:
            size = os.fstat(descriptor).st_size
            # Of the leases' class, so that a lease is a slice of it whose base is no plain array: numpy makes a plain
            # array over another one a view of that one's base, if that is plain too, and would leave the lease out.
            array = np.frombuffer(mmap.mmap(descriptor, size), np.uint8).view(Lease)
        finally:
            os.close(descriptor)
        self._arrays[number] = array
        self._starts[number] = array.__array_interface__["data"][0]
        return size

    def write(self, block: Block, data: Buffer) -> None:
        """Copy into a block, without the interpreter lock where it takes long."""
        segment, offset = block
        self._arrays[segment][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The bytes at `offset` of the block's segment. ValueError when they are not all in the segment."""
        array = self._arrays.get(block[0])
        if array is None or offset < 0 or offset + size_bytes > len(array):
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {block[0]}, which are not there")
        lease: Lease = array[offset : offset + size_bytes]  # type: ignore[assignment]  # slices keep their class
        lease.block = block
        lease.released = self.released
        return memoryview(lease)  # type: ignore[arg-type]  # numpy says so from Python 3.12 on

    def find(self, data: Buffer) -> Block | None:
        """Where bytes that this process has in hand lie in a segment; None for other memory."""
        start = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        for number, base in self._starts.items():
            if base <= start and start + len(data) <= base + len(self._arrays[number]):
                return number, start - base
        return None

    def sizes(self) -> Mapping[int, int]:
        """Bytes by segment."""
        return {number: len(array) for number, array in self._arrays.items()}


class OwnArena:
    """An arena whose blocks this process allocates."""

    def __init__(self, limit_bytes: int) -> None:
        self.blocks = Arena(limit_bytes)
        self.map = SegmentMap()

    def add(self, number: int, descriptor: int) -> None:
        """Take a segment over, with its descriptor."""
        self.blocks.add(number, self.map.map(number, descriptor))
