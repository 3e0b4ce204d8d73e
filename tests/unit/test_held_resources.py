"""The check for leaks that other tests use finds those that there are, and no others."""

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support.processes import check_holds_no_more

MIB = 1 << 20


@pytest.fixture
def kept() -> Iterator[list[bytearray | int]]:
    """What a test keeps: memory and descriptors."""
    kept: list[bytearray | int] = []
    yield kept
    for each in kept:
        if isinstance(each, int):
            with suppress(OSError):
                os.close(each)


def test_memory_that_grows_each_time_is_a_leak(kept: list[bytearray | int]) -> None:
    with pytest.raises(AssertionError, match="files, threads, bytes: "):
        check_holds_no_more(lambda: kept.append(bytearray(b"x") * (4 * MIB)), os.getpid(), growth_bytes=2 * MIB)
    assert len(kept) == 3


def test_memory_that_grows_once_is_no_leak(kept: list[bytearray | int]) -> None:
    def work() -> None:
        if not kept:
            kept.append(bytearray(b"x") * (4 * MIB))

    check_holds_no_more(work, os.getpid(), growth_bytes=2 * MIB)


def test_a_descriptor_for_each_time_is_a_leak(kept: list[bytearray | int]) -> None:
    with pytest.raises(AssertionError, match="files, threads, bytes: "):
        check_holds_no_more(lambda: kept.append(os.open(os.devnull, os.O_RDONLY)), os.getpid())
