"""The check for leaks that other tests use finds those that there are, and no others."""

import mmap
import os
from collections.abc import Iterator

import pytest

from support.processes import check_holds_no_more

MIB = 1 << 20


def used_memory() -> mmap.mmap:
    """Memory of its own mapping: the allocator could take it from what it has."""
    memory = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    return memory


@pytest.fixture
def kept() -> Iterator[list[mmap.mmap | int]]:
    """The memory and the descriptors that a test keeps."""
    kept: list[mmap.mmap | int] = []
    yield kept
    for each in kept:
        if isinstance(each, int):
            os.close(each)
        else:
            each.close()


def test_memory_that_grows_each_time_is_a_leak(kept: list[mmap.mmap | int]) -> None:
    with pytest.raises(AssertionError, match="files, threads, bytes: "):
        check_holds_no_more(lambda: kept.append(used_memory()), os.getpid(), growth_bytes=2 * MIB)
    assert len(kept) == 3


def test_memory_that_grows_once_is_no_leak(kept: list[mmap.mmap | int]) -> None:
    def work() -> None:
        if not kept:
            kept.append(used_memory())

    check_holds_no_more(work, os.getpid(), growth_bytes=2 * MIB)


def test_a_descriptor_for_each_time_is_a_leak(kept: list[mmap.mmap | int]) -> None:
    with pytest.raises(AssertionError, match="files, threads, bytes: "):
        check_holds_no_more(lambda: kept.append(os.open(os.devnull, os.O_RDONLY)), os.getpid())
