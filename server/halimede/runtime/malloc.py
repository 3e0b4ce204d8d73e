"""Settings of the C library's allocator for a process that moves large buffers."""

import ctypes

from halimede.core.accounts import UNBOUNDED, MemoryBounds

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8


def keep_large_buffers(memory: MemoryBounds = UNBOUNDED) -> None:
    """Have glibc reuse large buffers instead of mapping and unmapping each: a 600 KB request costs a third of the CPU.

    In exchange, memory is not returned to the system by itself after a burst. There are two arenas instead of eight per
    core: each keeps its peak size, so if every load used another arena, the server would grow to many times a model's
    size. With little memory less is kept. No effect without glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(M_MMAP_THRESHOLD, memory.at_most(128 << 20) // 4)
    mallopt(M_TRIM_THRESHOLD, memory.at_most(2 << 30) // 4)
    mallopt(M_TOP_PAD, memory.at_most(256 << 20) // 16)
    mallopt(M_ARENA_MAX, 2)


def release_free_memory() -> None:
    """Return freed memory to the system, which glibc does not do by itself under the settings above. Blocks.

    For use after something large was freed, such as a model. No effect without glibc.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return
    malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = (
        ("arena", ctypes.c_size_t),
        ("ordblks", ctypes.c_size_t),
        ("smblks", ctypes.c_size_t),
        ("hblks", ctypes.c_size_t),
        ("hblkhd", ctypes.c_size_t),
        ("usmblks", ctypes.c_size_t),
        ("fsmblks", ctypes.c_size_t),
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    )


def allocated_bytes() -> int:
    """The bytes that malloc has given out, of all threads; 0 without glibc 2.33.

    Resident memory does not show what comes from memory that was freed before: under the settings above glibc keeps it,
    and `malloc_trim` does not return the end of a thread's arena.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Mallinfo2
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
