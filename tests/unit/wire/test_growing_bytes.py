"""Bytes that grow piece by piece."""

from itertools import accumulate

import pytest

from halimede.core.wire.growing_bytes import LARGE_BYTES, GrowingBytes
from support.forked import run_python

MIB = 1 << 20
GROWTH = """
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.runtime.malloc import keep_large_buffers

def status(key):
    return int(open("/proc/self/status").read().split(key)[1].split()[0]) >> 10

keep_large_buffers()
piece = bytes(1 << 18)
before = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
grown = GrowingBytes()
for _ in range(60 * 4):
    grown.add(piece)
assert len(grown.content()) == 60 << 20
print(status("VmHWM:") - before)
"""


@pytest.mark.parametrize("sizes", [[], [1], [LARGE_BYTES], [LARGE_BYTES, 1], [3 * MIB] * 9, [1, 40 * MIB, 0, 5]])
def test_all_pieces_are_there_in_order(sizes: list[int]) -> None:
    grown = GrowingBytes()
    pieces = [bytes([number % 251 + 1]) * size for number, size in enumerate(sizes)]
    found = []
    for piece in pieces:
        grown.add(piece)
        found.append(grown.size_bytes)
    assert found == list(accumulate(sizes))
    assert bytes(grown.content()) == b"".join(pieces)


def test_large_bytes_take_hardly_more_memory_than_their_size() -> None:
    done = run_python("-c", GROWTH)
    # With the first ones, whose memory is kept for others. A bytearray takes 109 MiB.
    assert int(done.stdout) <= 60 + LARGE_BYTES // MIB + 4, done.stderr
