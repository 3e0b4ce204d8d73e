"""How many requests closed-loop clients are expected to send together.

Closed-loop clients send the next request as soon as they are answered. So the requests that were in a model together
come again together, but one after the other. The first of them would find a free slot, run alone, and keep all others
waiting.
"""

SPLIT_NS = 500_000
"""Batches that take less are better half as large: while an instance runs one, the server works on the next."""

MIN_REQUESTS = 4
"""Fewer gain less by running together than they lose by waiting."""


class ExpectedBatch:
    """The estimate of one model version, from its last batch."""

    __slots__ = ("_max_batch_size", "requests")

    def __init__(self, max_batch_size: int) -> None:
        """`max_batch_size`: of how many rows an execution is at most."""
        self._max_batch_size = max_batch_size
        self.requests = 1
        """A batch of so many queued requests need not wait for more. 1 where no others are expected."""

    def __repr__(self) -> str:
        return f"<ExpectedBatch requests={self.requests}>"

    def note(self, in_model: int, slots: int, took_ns: int) -> None:
        """A batch has ended that took so long; `in_model` requests, its own among them, were queued or executing."""
        parts = slots + 1 if took_ns < SPLIT_NS else slots
        requests = min(in_model // max(1, parts), self._max_batch_size)
        self.requests = requests if requests >= MIN_REQUESTS else 1
