"""What the C library's allocator reports, in a process of its own: its settings last for the process."""

import pytest

from support.forked import run_python

CODE = """
import threading
import numpy as np
from halimede.runtime.malloc import allocated_bytes, keep_large_buffers, release_free_memory

def on_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

kept = []
keep_large_buffers()
# Memory that glibc may keep: what is allocated from it need not make the process larger.
on_thread(lambda: [np.ones(1 << 20) for _ in range(2)])
release_free_memory()
before = allocated_bytes()
on_thread(lambda: kept.append(np.ones(1 << 20)))
allocated = allocated_bytes()
kept.clear()
print(allocated - before, allocated - allocated_bytes())
"""
MIB = 1 << 20


def test_allocated_and_freed_memory_of_threads_is_counted() -> None:
    got = run_python("-c", CODE).stdout
    allocated, freed = map(int, got.split())
    # The interpreter allocates some KiB meanwhile.
    assert 7 * MIB < allocated < 9 * MIB
    assert 7 * MIB < freed < 9 * MIB


RETAINED = """
import numpy as np, psutil
from halimede.core.accounts import MemoryBounds
from halimede.runtime.malloc import keep_large_buffers

keep_large_buffers(MemoryBounds({total_mib} << 20))
process = psutil.Process()
before = process.memory_info().rss
# Each is below the size from which glibc maps buffers one by one.
buffers = [np.ones(1 << 19) for _ in range(16)]
buffers.clear()
print(process.memory_info().rss - before)
"""


@pytest.mark.parametrize(("total_mib", "is_retained"), [(256, False), (1 << 20, True)])
def test_little_freed_memory_is_retained_in_a_small_container(total_mib: int, is_retained: bool) -> None:
    retained = int(run_python("-c", RETAINED.format(total_mib=total_mib)).stdout)
    # 64 MiB were freed. A small container allows a quarter of that.
    assert (retained > 40 * MIB) == is_retained, retained
