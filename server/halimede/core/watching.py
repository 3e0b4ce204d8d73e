"""When to look for what is to come instead of sleeping until it is there: the same on both sides of a worker's channel.

To wake a process on another, halted processor costs some 20 us on both sides on a virtual machine, as much as all else
of a small batch. Who looks gives the processor to whoever else wants it at each look. Standard library only, for any
CPython from 3.10 on.
"""

WATCH_NS = 250_000
"""How long to look, and how soon the last one must have come for the next to be looked for. With more, the looks for
what comes at the pace of gRPC take more from its threads than they save."""

WATCHED_REQUESTS = 4
"""In a batch, at most: with more of them, a wake-up is little beside the work."""


def is_worth_watching(processors: int, last_ns: int, requests: int) -> bool:
    """Whether to look; `last_ns` is how long the last one took to come. On one processor it would keep others off."""
    return processors > 1 and last_ns < WATCH_NS and requests <= WATCHED_REQUESTS
