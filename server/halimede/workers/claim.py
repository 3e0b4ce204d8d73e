"""Which side owns a batch that waits in a worker process: the server, which may take it back, or the process.

The server sends a batch to a process that runs another one. A token in the kernel decides who gets it: each side tries
to take the token, which is atomic, and only one succeeds. The token is the batch's number: the frame of a batch that
was taken back stays in the channel, and the process must not mistake the token of a later batch for its own.

There are two tokens, used in turn: while the process begins one batch, the server may send and take back the next.

Standard library only, for any CPython from 3.10 on.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

TOKENS = 2


class Claim:
    """The tokens of one process: an eventfd each, whose value is the batch's number, 0 for no token."""

    def __init__(self, descriptors: Sequence[int] = ()) -> None:
        """Takes over the descriptors, or makes them. OSError if there are none left."""
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self._descriptors = [*descriptors] or [os.eventfd(0, flags) for _ in range(TOKENS)]
        self._held = [0] * TOKENS
        """Tokens of later batches that this side has taken already."""

    def share(self) -> tuple[int, ...]:
        """New descriptors for the other process."""
        return tuple(os.dup(descriptor) for descriptor in self._descriptors)

    def offer(self, token: int, batch: int) -> None:
        """Set the token of a batch. Called by the server, before it sends the batch."""
        os.eventfd_write(self._descriptors[token], batch)

    def try_take(self, token: int, batch: int) -> bool:
        """Take the token of this batch; False if the other side has taken it."""
        held = self._held[token]
        if not held:
            try:
                held = os.eventfd_read(self._descriptors[token])
            except BlockingIOError:
                return False
        is_own = held == batch
        self._held[token] = 0 if is_own else held
        return is_own

    def close(self) -> None:
        """Close the descriptors. May be called again."""
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
