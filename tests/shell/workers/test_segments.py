import fcntl
import gc
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from halimede.channel.segments import Lease, OwnArena, SegmentMap, make_segment
from support.forked import run_python
from support.processes import holding_no_more, open_files

SIZE = 1 << 20
BLOCK = 3, 4096


def made(size: int = SIZE) -> int:
    descriptor = make_segment(size)
    assert descriptor is not None
    return descriptor


def mapped() -> SegmentMap:
    segments = SegmentMap()
    segments.map(BLOCK[0], made())
    return segments


def lease_of(data: memoryview) -> Lease:
    assert isinstance(data.obj, Lease)
    return data.obj


def test_the_size_of_a_segment_cannot_be_changed():
    descriptor = made()

    for size in (0, SIZE // 2, SIZE * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    assert os.fstat(descriptor).st_size == SIZE
    os.close(descriptor)


def test_a_receiver_cannot_seal_a_segment_against_writes():
    descriptor = made()
    received = os.dup(descriptor)
    segments = SegmentMap()
    segments.map(1, descriptor)
    with pytest.raises(OSError, match="busy"):
        fcntl.fcntl(received, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segments.write((1, 0), b"here")
    assert os.pread(received, 4, 0) == b"here"
    os.close(received)


def test_only_the_owner_of_a_shared_segment_can_write_to_it():
    descriptor = made()
    owner = mmap.mmap(descriptor, SIZE)
    server = SegmentMap(shareable_bytes=SIZE)
    server.map(1, descriptor)
    descriptor = lease_of(server.lease((1, 0), 0, 4)).segment.read_only_descriptor()

    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, SIZE)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"mine", 0)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, SIZE)
    with pytest.raises(PermissionError):
        os.posix_fallocate(again, SIZE, 1)
    owner[:4] = b"ours"
    assert bytes(server.lease((1, 0), 0, 4)) == os.pread(descriptor, 4, 0) == b"ours"
    os.close(descriptor)
    os.close(again)


def test_a_segment_has_no_name_and_its_pages_are_reserved():
    before = set(os.listdir("/dev/shm"))
    descriptor = made()

    assert set(os.listdir("/dev/shm")) <= before
    assert os.fstat(descriptor).st_nlink == 0
    assert os.fstat(descriptor).st_blocks * 512 >= SIZE
    assert not os.get_inheritable(descriptor)
    os.close(descriptor)


def test_two_maps_of_a_segment_share_bytes():
    before = open_files()
    descriptor = made()
    owned, mapped = OwnArena(SIZE), SegmentMap()
    mapped.map(1, os.dup(descriptor))
    owned.add(1, descriptor)
    block = owned.blocks.allocate(5)
    assert block is not None

    owned.map.write(block, b"hello")

    assert bytes(mapped.lease(block, block[1], 5)) == b"hello"
    assert owned.blocks.size_bytes == SIZE
    assert open_files() <= before + 2, "a mapping has one descriptor, which is Python's"
    del owned, mapped
    assert open_files() <= before


def test_bytes_are_found_in_their_segment():
    segments = mapped()
    lease = segments.lease(BLOCK, 4096, 1000)

    assert segments.find(lease) == (3, 4096)
    assert segments.find(np.frombuffer(lease, np.uint8)[10:20].data) == (3, 4106)
    assert segments.find(bytes(100)) is None


@pytest.mark.parametrize(
    ("segment", "offset", "size"),
    [(3, SIZE, 1), (3, SIZE - 4, 5), (3, 1 << 63, 1), (3, 0, 1 << 63), (3, -1, 1), (4, 0, 1), (0, 0, 0)],
)
def test_bytes_outside_of_a_segment_are_refused(segment: int, offset: int, size: int):
    with pytest.raises(ValueError, match="not there"):
        mapped().lease((segment, offset), offset, size)


VIEWS: dict[str, Callable[[memoryview], object]] = {
    "itself": lambda lease: lease,
    "a slice": lambda lease: lease[10:20],
    "a slice of a slice": lambda lease: lease[10:200][5:6],
    "another format": lambda lease: lease.cast("f"),
    "shared with bytes": lambda lease: memoryview(lease.cast("i")).cast("B"),
    "an array": lambda lease: np.frombuffer(lease, np.float32),
    "an array in another shape": lambda lease: np.frombuffer(lease, np.uint8).reshape(10, 100)[::2, 3:].T,
    "an array of the array": lambda lease: np.asarray(np.asarray(lease)),
    "a buffer's array": lambda lease: np.ndarray((5, 5), np.int32, lease, 4),
    "another class": lambda lease: np.frombuffer(lease, np.uint8).view(np.recarray),
    "an empty slice": lambda lease: lease[1000:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_block_is_released_once_when_the_last_view_is_gone(view: Callable[[memoryview], object]):
    segments = mapped()
    lease = segments.lease(BLOCK, 4096, 1000)
    kept = view(lease)

    del lease
    gc.collect()
    assert not segments.released
    del kept
    assert list(segments.released) == [BLOCK]


def test_copies_do_not_keep_a_block():
    segments = mapped()
    lease = segments.lease(BLOCK, 4096, 1000)
    copies = [bytes(lease), np.frombuffer(lease, np.uint8).copy(), np.frombuffer(lease, np.uint8) + 1, lease.tolist()]

    del lease

    assert list(segments.released) == [BLOCK]
    assert len(copies) == 4


def test_every_lease_of_a_block_is_reported():
    segments = mapped()
    leases = [segments.lease(BLOCK, 4096 + at, 10) for at in range(3)]
    for count in (1, 2, 3):
        leases.pop()
        assert list(segments.released) == [BLOCK] * count


def test_leases_end_on_any_thread():
    segments = mapped()
    blocks = [(3, 64 * at) for at in range(800)]
    shares: list[list[memoryview]] = [[] for _ in range(8)]
    for at, block in enumerate(blocks):
        shares[at % 8].append(segments.lease(block, block[1], 64))

    def drop(share: list[memoryview]) -> None:
        while share:
            np.frombuffer(share.pop(), np.uint8).sum()

    threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(segments.released) == sorted(blocks)


def test_bytes_outlive_the_map_that_they_are_from():
    segments = mapped()
    segments.write(BLOCK, b"still here")
    lease = segments.lease(BLOCK, 4096, 10)
    released = segments.released

    del segments
    gc.collect()

    assert bytes(lease) == b"still here"
    del lease
    assert list(released) == [BLOCK]


def test_a_map_without_views_is_unmapped():
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:halimede")

    before = mappings()
    segments = mapped()
    lease = segments.lease(BLOCK, 4096, 10)
    assert mappings() == before + 1

    del segments
    assert mappings() == before + 1
    del lease
    gc.collect()
    assert mappings() == before


def test_a_descriptor_that_cannot_be_mapped_is_closed(monkeypatch: pytest.MonkeyPatch):
    with holding_no_more():
        descriptor = os.memfd_create("empty")
        with pytest.raises(ValueError, match="empty"):
            SegmentMap().map(1, descriptor)
        read, write = os.pipe()
        with pytest.raises((OSError, ValueError)):
            SegmentMap().map(1, read)
        os.close(write)


LIMITED = """
import os, resource
from halimede.channel.segments import make_segment
before = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.{limit}, ({soft}, resource.RLIM_INFINITY if {soft} > 1000 else {soft}))
made = [make_segment(4 << 20) for _ in range(3)]
assert made == [None] * 3, made
if "{limit}" == "RLIMIT_FSIZE":
    assert make_segment(1 << 16) is not None
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {soft}))
print("lives")
"""


@pytest.mark.parametrize(("limit", "soft"), [("RLIMIT_FSIZE", 1 << 20), ("RLIMIT_NOFILE", 3)])
def test_no_segment_is_made_if_the_system_refuses(limit: str, soft: int):
    """The kernel reports an exceeded file size by a signal, which Python ignores."""
    code = LIMITED.format(limit=limit, soft=soft)
    ran = run_python("-c", code)

    assert (ran.stdout, ran.returncode) == ("lives\n", 0), ran.stderr


TOO_MUCH = """
import os, resource
from halimede.channel.segments import make_segment
# If it is not refused, this ends before it takes memory that other processes need.
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
before = len(os.listdir("/proc/self/fd"))
print(make_segment(1 << 50), len(os.listdir("/proc/self/fd")) - before)
"""


def test_a_segment_larger_than_memory_is_refused():
    ran = run_python("-c", TOO_MUCH)

    assert ran.stdout == "None 0\n", (ran.returncode, ran.stderr)


def test_a_segment_may_be_made_but_not_mapped():
    """A segment counts towards the process's limit only when it is mapped; then the server works without it."""
    code = (
        "import resource\n"
        "from halimede.channel.segments import SegmentMap, make_segment\n"
        "descriptor = make_segment(64 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\n"
        "try:\n    SegmentMap().map(1, descriptor)\nexcept OSError as error:\n    print(type(error).__name__)\n"
    )
    ran = run_python("-c", code)

    assert ran.stdout == "OSError\n", ran.stderr
