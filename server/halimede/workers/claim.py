"""Which side owns a batch that waits in a worker process: the server, which may take it back, or the process.

The server sends a batch to a process that runs another one. A token, held by the kernel, decides who gets it: each side
tries to take the token, which is atomic, and only one succeeds.

Standard library only, for any CPython from 3.10 on.
"""

import os
from contextlib import suppress


class Claim:
    """A counter of tokens: an eventfd, shared by the server and one process."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Takes over the descriptor, or makes one. OSError if there is none left."""
        flags = os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._descriptor = os.eventfd(0, flags) if descriptor is None else descriptor

    def share(self) -> int:
        """A new descriptor for the other process."""
        return os.dup(self._descriptor)

    def offer(self) -> None:
        """Add the token of a batch. Called by the server, before it sends the batch."""
        os.eventfd_write(self._descriptor, 1)

    def try_take(self) -> bool:
        """Take a token; False if there is none, because the other side has taken it."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
