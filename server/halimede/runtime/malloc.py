"""Settings of the C library's allocator for a process that moves large buffers."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_large_buffers() -> None:
    """Have glibc reuse large buffers instead of mapping and unmapping each: a 600 KB request costs a third of the CPU.

    The price is that memory does not go back to the system by itself after a burst. Elsewhere than on glibc: nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(M_MMAP_THRESHOLD, 32 << 20)
    mallopt(M_TRIM_THRESHOLD, 512 << 20)
    mallopt(M_TOP_PAD, 16 << 20)
