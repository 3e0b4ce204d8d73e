"""What the server and a worker process both know of batches: which have begun, and who owns one that waits.

The server sends a batch to a process that runs another one. A token in the kernel decides who gets it, the server,
which may take it back, or the process: each side tries to take the token, which is atomic, and only one succeeds. The
token is the batch's number: the frame of a batch that was taken back stays in the channel, and the process must not
mistake the token of a later batch for its own. There are two tokens, used in turn: while the process begins one batch,
the server may send and take back the next.

The number of the batch that began last is in a page of shared memory. So the server knows which batches a process that
has died had not begun: these run again.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress

from halimede.channel.segments import make_segment

TOKENS = 2
DESCRIPTORS = TOKENS + 1
_NUMBER = struct.Struct("<I")
_NUMBERS = 1 << 32


class Claim:
    """A token is an eventfd, whose value is the batch's number, 0 for no token."""

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        """Takes over the descriptors of the other side, or makes them. OSError if the system has none left."""
        self._descriptors = [*descriptors] or _made()
        self._page = mmap.mmap(self._descriptors[-1], mmap.PAGESIZE)
        self._at_end = 0
        self._held = [0] * TOKENS
        """Tokens of later batches that this side has taken already."""

    def share(self) -> tuple[int, ...]:
        """New descriptors for the other process."""
        return tuple(os.dup(descriptor) for descriptor in self._descriptors)

    def publish(self, token: int, batch: int) -> None:
        """Set the token of a batch. Called by the server, before it sends the batch."""
        os.eventfd_write(self._descriptors[token], batch)

    def try_take(self, token: int, batch: int) -> bool:
        """Take the token of this batch; False if the other side has taken it, and after `close`."""
        if not self._descriptors:
            return False
        held = self._held[token]
        if not held:
            try:
                held = os.eventfd_read(self._descriptors[token])
            except BlockingIOError:
                return False
        is_own = held == batch
        self._held[token] = 0 if is_own else held
        return is_own

    def begin(self, batch: int) -> None:
        """Record that a batch begins. Called by the process; the server numbers batches in the order of sending."""
        _NUMBER.pack_into(self._page, 0, batch)

    def has_begun(self, batch: int) -> bool:
        """Whether this batch, or a later one, has begun."""
        return (self._last - batch) % _NUMBERS < _NUMBERS // 2

    @property
    def _last(self) -> int:
        number: int = self._at_end if self._page.closed else _NUMBER.unpack_from(self._page)[0]
        return number

    def close(self) -> None:
        """Free everything; `has_begun` answers as at this moment. May be called again."""
        self._at_end = self._last
        self._page.close()
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()


def _made() -> list[int]:
    page = make_segment(mmap.PAGESIZE, "halimede batches")
    if page is None:
        raise OSError("there is no memory or no file descriptor for a page that is shared with a process")
    made = [page]
    try:
        for _ in range(TOKENS):
            made.insert(0, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
    except OSError:
        for descriptor in made:
            os.close(descriptor)
        raise
    return made
