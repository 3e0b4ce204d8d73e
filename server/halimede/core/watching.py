"""When to look for what is to come instead of sleeping until it is there: the same on both sides of a worker's channel.

To wake a process on another, halted processor costs some 20 us on both sides on a virtual machine, as much as all else
of a small batch. Who looks gives the processor to whoever else wants it at each look; a look that takes long says that
somebody does, and then looking costs more than it saves. Standard library only, for any CPython from 3.10 on.
"""

WATCH_NS = 700_000
"""How long to look, and how soon the last one must have come for the next to be looked for."""

WATCHED_REQUESTS = 3
"""In a batch, at most: with more of them, the processors have enough to do."""

BUSY_LOOK_NS = 25_000
PAUSED_BATCHES = 256
"""Batches for which nobody looks after looks that took BUSY_LOOK_NS each."""


class Watching:
    """Decides for one side of one worker. With one processor to share nobody ever looks."""

    __slots__ = ("_may_look", "_pause")

    def __init__(self, processors: int) -> None:
        self._may_look = processors > 1
        self._pause = 0

    def is_worth_it(self, last_ns: int, requests: int) -> bool:
        """Whether to look now; asked once per batch. `last_ns` is how long the last one took to come."""
        if not self._may_look or last_ns >= WATCH_NS or requests > WATCHED_REQUESTS:
            return False
        if self._pause:
            self._pause -= 1
            return False
        return True

    def ended(self, looks: int, elapsed_ns: int) -> None:
        """So many looks were made in this time."""
        if elapsed_ns > looks * BUSY_LOOK_NS:
            self._pause = PAUSED_BATCHES
