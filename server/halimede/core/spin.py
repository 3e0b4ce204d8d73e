"""When to spin: to look for the next frame again and again for a while before blocking. The same on both sides of a
worker's channel.

To wake a process on another, halted processor costs some 20 us on both sides on a virtual machine, as much as all else
of a small batch. A spinning process yields the processor after each check. Standard library only, for any CPython from
3.10 on.
"""

from dataclasses import dataclass

SPIN_NS = 250_000
"""How long to spin, and how soon the last frame must have come for the next to be spun for. With more, spinning for
what comes at the pace of gRPC takes more from its threads than it saves."""

SPIN_REQUESTS = 4
"""In a batch, at most: with more of them, a wake-up is little beside the work."""


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """Whether to spin. `processors` are those of the process: with one, spinning would keep others off."""

    is_on: bool
    processors: int

    def is_worth(self, last_ns: int, requests: int) -> bool:
        """`last_ns` is how long the last frame took to come, `requests` how many the batch has."""
        return self.is_on and self.processors > 1 and last_ns < SPIN_NS and requests <= SPIN_REQUESTS
