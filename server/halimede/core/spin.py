"""When to spin: to check for the next frame repeatedly before blocking. Both sides of a worker's channel use this
policy.

On a virtual machine, waking a process on a halted processor costs some 20 us on both sides, as much as all other work
of a small batch. A spinning process yields the processor after each check. Standard library only, for any CPython from
3.10 on.
"""

from dataclasses import dataclass

SPIN_NS = 250_000
"""How long to spin. Also the maximum wait for the last frame after which spinning is worthwhile."""

SPIN_REQUESTS = 4
"""Maximum number of requests in a batch: with more of them, the cost of a wake-up is small in comparison."""


@dataclass(frozen=True, slots=True)
class SpinPolicy:
    """Whether to spin. `processors` is how many the process may use: with one, spinning would block other threads."""

    is_on: bool
    processors: int

    def is_worth(self, last_ns: int, requests: int) -> bool:
        """Whether to spin. `last_ns` is the wait for the last frame, `requests` the number of requests in the batch."""
        return self.is_on and self.processors > 1 and last_ns < SPIN_NS and requests <= SPIN_REQUESTS
