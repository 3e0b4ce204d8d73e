"""Segments of other workers in a worker process: read in place, with private writes."""

import ctypes
import mmap
import os
from collections import deque

import numpy as np
import pytest
from numpy.typing import NDArray

from halimede.channel.frames import FIRST_SHARED
from halimede.channel.process_end.shared_segments import SharedSegments
from halimede.channel.segments import Block, make_segment
from halimede.core.shm.arena import ALIGNMENT
from support.channel import mappings
from support.forked import run_python
from support.processes import open_files

NUMBER = FIRST_SHARED
PAGES = 64
BLOCK_BYTES = 8 * ALIGNMENT


class Owner:
    """The worker that owns the segment."""

    def __init__(self) -> None:
        descriptor = make_segment(PAGES * ALIGNMENT)
        assert descriptor is not None
        self.descriptor = descriptor
        self.bytes = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)

    def fill(self, offset: int, value: int) -> None:
        self.bytes[offset : offset + BLOCK_BYTES] = value


class Reader:
    """A worker that reads the segment, and its reports about blocks and segments."""

    def __init__(self, owner: Owner) -> None:
        self.released: deque[Block] = deque()
        self.written: list[int] = []
        self.segments = SharedSegments(self.released, self.written.append)
        assert self.segments.try_map(NUMBER, os.dup(owner.descriptor))

    def look(self, offset: int, size: int = BLOCK_BYTES) -> NDArray[np.uint8]:
        return np.frombuffer(self.segments.lease((NUMBER, offset), offset, size), np.uint8)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def reader(owner: Owner) -> Reader:
    return Reader(owner)


def test_the_reader_sees_writes_of_the_owner(owner: Owner, reader: Reader):
    for value in range(1, 200):
        owner.fill(BLOCK_BYTES, value)
        seen = reader.look(BLOCK_BYTES)
        assert np.all(seen == value)
        assert reader.segments.find_unwritten(seen.data) == (NUMBER, BLOCK_BYTES)
        assert reader.segments.find_unwritten(seen[100:5000].data) == (NUMBER, BLOCK_BYTES + 100)
        del seen
        assert reader.released.pop() == (NUMBER, BLOCK_BYTES)
    assert reader.written == []


@pytest.mark.parametrize("at", [0, ALIGNMENT - 1, ALIGNMENT, BLOCK_BYTES - 1])
def test_writes_of_a_reader_are_private_and_the_next_use_is_a_copy(owner: Owner, reader: Reader, at: int):
    owner.fill(0, 1)
    owner.fill(BLOCK_BYTES, 1)
    mine, other = reader.look(0), reader.look(BLOCK_BYTES)
    mine[at] = 99
    other[at] = 77
    assert np.all(owner.bytes[: 2 * BLOCK_BYTES] == 1)
    assert reader.segments.find_unwritten(mine.data) is None, "the server has not these bytes"
    assert reader.written == []
    del mine

    owner.fill(0, 2)
    again = reader.look(0)
    assert np.all(again == 2)
    assert reader.written == [NUMBER]
    assert reader.released.pop() == (NUMBER, 0), "a copy needs no block"
    assert other[at] == 77, "a block beside it keeps what was written to it"
    assert reader.segments.find_unwritten(again.data) is None
    assert reader.segments.find_unwritten(other.data) is None


def test_private_pages_are_freed_with_the_last_view_of_a_written_segment(owner: Owner, reader: Reader):
    one, other = reader.look(0), reader.look(BLOCK_BYTES)
    one[0] = other[0] = 99
    mapped = mappings()
    del one
    for value in (1, 2):
        owner.fill(0, value)
        assert np.all(reader.look(0) == value)
        assert mappings() == mapped
    assert reader.written == [NUMBER]
    del other
    assert mappings() == mapped - 1


def test_memory_outside_of_segments_is_not_found(reader: Reader):
    assert reader.segments.find_unwritten(np.zeros(10, np.uint8).data) is None


def test_a_model_that_locks_its_memory_sees_the_owners_bytes_too(owner: Owner, reader: Reader):
    """Locked private memory is a copy from the time of the lock, and its pages cannot be dropped."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = reader.look(0).__array_interface__["data"][0]
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(BLOCK_BYTES)) != 0:
        pytest.skip(f"this system does not allow to lock memory: {os.strerror(ctypes.get_errno())}")
    reader.released.clear()

    for value in (1, 2, 3):
        owner.fill(0, value)
        seen = reader.look(0)
        assert np.all(seen == value)
        assert reader.released.pop() == (NUMBER, 0), "a copy needs no block"
        seen[:] = 9
    assert np.all(owner.bytes[:BLOCK_BYTES] == 3)
    assert reader.written == [NUMBER]


def test_pages_count_as_written_if_pagemap_fails():
    code = (
        "import mmap, os\nfrom collections import deque\nfrom halimede.channel.process_end.shared_segments import SharedSegments\n"
        "from halimede.channel.segments import make_segment\n"
        "descriptor = make_segment(1 << 20)\nowner = mmap.mmap(descriptor, 0)\nsegments = SharedSegments(deque(), print)\n"
        "assert segments.try_map(40000, descriptor)\n"
        "def fail(*_): raise OSError\nos.pread = fail\n"
        "first = segments.lease((40000, 0), 0, 4096)\nfirst[:] = bytes(4096)\nowner[:4096] = b'x' * 4096\n"
        "seen = segments.lease((40000, 0), 0, 4096)\nprint(bytes(seen) == b'x' * 4096, segments.find_unwritten(seen))"
    )
    ran = run_python("-c", code)
    assert (ran.stdout.splitlines(), ran.stderr) == (["40000", "True None"], "")


def test_a_model_that_closes_all_descriptors_sees_the_owners_bytes():
    """A file of the model gets the number of a closed descriptor."""
    code = (
        "import mmap, os\nfrom collections import deque\nfrom halimede.channel.process_end.shared_segments import SharedSegments\n"
        "from halimede.channel.segments import make_segment\n"
        "descriptor = make_segment(1 << 20)\nowner = mmap.mmap(descriptor, 0)\nsegments = SharedSegments(deque(), print)\n"
        "assert segments.try_map(40000, descriptor)\n"
        "os.closerange(3, 100)\nfiles = [open('/dev/zero', 'rb', buffering=0) for _ in range(10)]\n"
        "first = segments.lease((40000, 0), 0, 4096)\nfirst[:] = bytes(4096)\nowner[:4096] = b'x' * 4096\n"
        "print(bytes(segments.lease((40000, 0), 0, 4096)) == b'x' * 4096)"
    )
    ran = run_python("-c", code)
    assert (ran.stdout.splitlines(), ran.stderr) == (["40000", "True"], "")


def test_bytes_outside_of_a_mapped_segment_are_refused(reader: Reader):
    with pytest.raises(ValueError, match="which are not there"):
        reader.look(PAGES * ALIGNMENT - 10)
    reader.segments.unmap(NUMBER)
    reader.segments.unmap(NUMBER)
    with pytest.raises(ValueError, match="which is not there"):
        reader.look(0)


def test_a_segment_stays_mapped_until_the_last_view_is_gone(owner: Owner):
    before = open_files(), mappings()
    reader = Reader(owner)
    open_then = open_files()
    owner.fill(0, 5)
    seen = reader.look(0)
    reader.segments.unmap(NUMBER)
    assert np.all(seen == 5)
    assert mappings() == before[1] + 1
    del seen
    assert open_files() <= open_then - 2
    assert mappings() == before[1]
    del reader
    assert open_files() <= before[0]
    assert mappings() == before[1]


WITHOUT = """
import os, resource, sys
from collections import deque
from halimede.channel.process_end.shared_segments import SharedSegments
from halimede.channel.segments import make_segment

lacks = sys.argv[1]
descriptor = make_segment(1 << 20)
segments = SharedSegments(deque(), print)
before = len(os.listdir("/proc/self/fd"))
limit = None
if lacks == "page map":
    real = os.open
    os.open = lambda path, *more: real("/proc/self/nothing" if "pagemap" in path else path, *more)
elif lacks == "descriptors":
    limit, value = resource.RLIMIT_NOFILE, before - 1
elif lacks == "address space":
    limit, value = resource.RLIMIT_AS, int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
if limit is not None:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
worked = segments.try_map(40000, descriptor)
if limit is not None:
    resource.setrlimit(limit, (soft, hard))
if worked:
    del segments
print(worked, len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.parametrize("lacks", ["nothing", "page map", "descriptors", "address space"])
def test_without_kernel_support_nothing_is_mapped_or_left_open(lacks: str):
    ran = run_python("-c", WITHOUT, lacks)
    assert (ran.stdout.strip(), ran.stderr) == (f"{lacks == 'nothing'} -1", ""), "the segment's is closed"
