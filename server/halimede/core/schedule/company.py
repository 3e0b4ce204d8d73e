"""How many requests make a batch that waits for no more.

Who waits for its answer asks again as it gets it. So the requests that were in a model together come together again,
but one after the other: the first of them finds a free instance, would run alone, and keep all others waiting.
"""

SPLIT_NS = 500_000
"""Batches that take less are better half as large: while an instance runs one, the server works on the next."""

MIN_SHARE = 4
"""Fewer gain less by running together than they lose by waiting."""


class Company:
    """Of one model version."""

    __slots__ = ("_max_batch_size", "share")

    def __init__(self, max_batch_size: int) -> None:
        """`max_batch_size`: of how many rows an execution is at most."""
        self._max_batch_size = max_batch_size
        self.share = 1
        """So many requests in the queue are a batch. 1 where nobody is likely to come."""

    def __repr__(self) -> str:
        return f"<Company share={self.share}>"

    def note(self, requests: int, instances: int, took_ns: int) -> None:
        """A batch has ended that took so long; so many requests, its own among them, were queued or running."""
        parts = instances + 1 if took_ns < SPLIT_NS else instances
        share = min(requests // max(1, parts), self._max_batch_size)
        self.share = share if share >= MIN_SHARE else 1
