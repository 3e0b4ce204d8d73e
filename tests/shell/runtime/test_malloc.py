"""What the C library's allocator reports, in a process of its own: its settings last for the process."""

import subprocess
import sys

CODE = """
import os, threading
import numpy as np
from halimede.runtime.malloc import allocated_bytes, keep_large_buffers, release_free_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def on_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

kept = []
keep_large_buffers()
on_thread(lambda: [np.ones(1 << 20) for _ in range(2)])
release_free_memory()
before = resident(), allocated_bytes()
on_thread(lambda: kept.append(np.ones(1 << 20)))
print(resident() - before[0], allocated_bytes() - before[1])
"""
MIB = 1 << 20


def test_allocations_from_memory_that_was_freed_are_counted() -> None:
    got = subprocess.check_output([sys.executable, "-c", CODE], text=True, timeout=60)
    resident, allocated = map(int, got.split())
    assert resident < 4 * MIB, "glibc has returned the memory: nothing is shown here"
    assert 8 * MIB <= allocated < 9 * MIB
