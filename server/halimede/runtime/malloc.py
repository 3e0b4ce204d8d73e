"""Settings of the C library's allocator for a process that moves large buffers."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


def keep_large_buffers() -> None:
    """Have glibc reuse large buffers instead of mapping and unmapping each: a 600 KB request costs a third of the CPU.

    The price is that memory does not go back to the system by itself after a burst. Elsewhere than on glibc: nothing.
    Two arenas and not eight for each core: each keeps what it had at its fullest, so that with every load on another
    thread the server would grow to as many times a model's size.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(M_MMAP_THRESHOLD, 32 << 20)
    mallopt(M_TRIM_THRESHOLD, 512 << 20)
    mallopt(M_TOP_PAD, 16 << 20)
    mallopt(M_ARENA_MAX, 2)


def release_free_memory() -> None:
    """Give what was freed back to the system, which glibc does not do by itself under the settings above. Blocking.

    For after something large has gone for good, such as a model. Elsewhere than on glibc: nothing.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    malloc_trim(0)
