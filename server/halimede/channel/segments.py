"""Shared memory between the server and one worker process: segments that both map once.

A segment is a memfd. It has no name, so nothing is left behind when a process dies, and it is not limited by the size
of /dev/shm, which is 64 MiB in most containers. The server makes all segments and seals their size: a worker that could
truncate a segment would kill the server with SIGBUS. The pages are reserved when the segment is made, so that on a
machine without free memory the segment is refused, and no process is killed when it writes.

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
from halimede.memory_group import own_groups

Block = tuple[int, int]
"""Segment and offset."""

_F_SEAL_FUTURE_WRITE = 0x10
"""Of Linux 5.1; the standard library has no name for it."""


def make_segment(size_bytes: int, name: str = "halimede") -> int | None:
    """The descriptor of a new segment; None when the system has no memory for it. `name` is for /proc/PID/maps."""
    if not has_memory(size_bytes):
        return None
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        # Not F_SEAL_SEAL: `read_only_descriptor` adds one more seal.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def has_memory(size_bytes: int) -> bool:
    """Whether so much memory is free. Asked first, because Linux kills a process when it runs out of pages for shared
    memory."""
    return size_bytes <= _available_bytes() and own_groups().has_free(size_bytes)


def _available_bytes() -> int:
    """The free memory of the machine."""
    try:
        with open("/proc/meminfo", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file)
        return int(lines[b"MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):
        return sys.maxsize


@dataclass(slots=True)
class Sharing:
    """How much of the segments of one map other workers may read, and how much is shared now."""

    limit_bytes: int = 0
    """0 if nothing of the map is ever shared."""
    shared_bytes: int = 0
    writable: set[Block] = field(default_factory=set)
    """Blocks that the owner of the segments may still write to. They are never shared."""


class Segment:
    """A segment in this process's memory, mapped as long as a view of it exists."""

    __slots__ = ("__weakref__", "array", "descriptor", "memory", "released", "sharing", "start")

    def __init__(self, memory: mmap.mmap, descriptor: int, released: "deque[Block]", sharing: Sharing) -> None:
        self.memory = memory
        self.descriptor = descriptor
        """Owned by this object; -1 if the segment cannot be shared."""
        self.released = released
        self.sharing = sharing
        # Of class Lease, so that a lease is a slice whose base is not a plain array. numpy makes a view of a view of a
        # plain array refer to the plain array, and would not keep the lease in between alive.
        self.array = np.frombuffer(memory, np.uint8).view(Lease)
        self.start: int = self.array.__array_interface__["data"][0]

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The bytes at `offset`, a part of this block. ValueError if they are not all in the segment."""
        if offset < 0 or offset + size_bytes > len(self.array):
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {block[0]}, which are not there")
        lease: Lease = self.array[offset : offset + size_bytes]  # type: ignore[assignment]  # slices keep their class
        lease.block = block
        lease.segment = self
        return memoryview(lease)  # type: ignore[arg-type, unused-ignore]  # numpy 2.4 declares it from Python 3.12 on

    def read_only_descriptor(self) -> int:
        """A descriptor for a process that may only read the segment. OSError.

        From now on no process can map the segment for writing. Its owner has mapped it already.
        """
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        return os.dup(self.descriptor)


class Lease(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of a block, as an array that reports the end of its last view, on any thread.

    Views of any kind keep it alive: memoryviews, slices, numpy arrays made from them.
    """

    block: Block
    segment: Segment

    def __del__(self) -> None:
        # The array of a whole segment is of this class too, without these attributes. Appending is atomic and needs no
        # lock: a finalizer may interrupt any code.
        if "block" in self.__dict__:
            self.segment.released.append(self.block)


class SegmentMap:
    """The segments of one direction, mapped into this process."""

    def __init__(self, released: "deque[Block] | None" = None, shareable_bytes: int = 0) -> None:
        """At most `shareable_bytes` of the segments are shared with other workers at a time."""
        self._segments: dict[int, Segment] = {}
        self.released: deque[Block] = deque() if released is None else released
        """Blocks whose last lease is gone."""
        self.sharing = Sharing(shareable_bytes)

    def __contains__(self, number: int) -> bool:
        return number in self._segments

    def map(
        self, number: int, descriptor: int, flags: int = mmap.MAP_SHARED, prot: int = mmap.PROT_READ | mmap.PROT_WRITE
    ) -> int:
        """Map a segment and return its size. Closes the descriptor, unless the segment may be shared. OSError."""
        try:
            size = os.fstat(descriptor).st_size
            memory = mmap.mmap(descriptor, size, flags=flags, prot=prot)
        except BaseException:
            os.close(descriptor)
            raise
        if not self.sharing.limit_bytes:
            os.close(descriptor)
            descriptor = -1
        self._segments[number] = Segment(memory, descriptor, self.released, self.sharing)
        return size

    def unmap(self, number: int) -> None:
        """Unmap a segment, if it is here, once no lease of it is left."""
        self._segments.pop(number, None)

    def write(self, block: Block, data: Buffer) -> None:
        """Copy into a block; a large copy releases the interpreter lock."""
        segment, offset = block
        self._segments[segment].array[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def lease(self, block: Block, offset: int, size_bytes: int) -> memoryview:
        """The bytes at `offset` of the block's segment. ValueError if they are not all in the segment."""
        segment = self._segments.get(block[0])
        if segment is None:
            raise ValueError(f"segment {block[0]}, which is not there")
        return segment.lease(block, offset, size_bytes)

    def find(self, data: Buffer) -> Block | None:
        """The segment and offset of bytes of this process; None if they are not in a segment."""
        start = address(data)
        # A copy, because another thread may add a segment at the same time.
        for number, segment in tuple(self._segments.items()):
            if segment.start <= start and start + len(data) <= segment.start + len(segment.array):
                return number, start - segment.start
        return None

    def sizes(self) -> Mapping[int, int]:
        """Bytes by segment."""
        return {number: len(segment.array) for number, segment in tuple(self._segments.items())}


def address(data: Buffer) -> int:
    """The address of the bytes in this process."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class OwnArena:
    """An arena whose blocks this process allocates."""

    def __init__(self, limit_bytes: int, shareable_bytes: int = 0) -> None:
        self.blocks = Arena(limit_bytes)
        self.map = SegmentMap(shareable_bytes=shareable_bytes)

    def add(self, number: int, descriptor: int) -> None:
        """Take over a segment and its descriptor."""
        self.blocks.add(number, self.map.map(number, descriptor))
