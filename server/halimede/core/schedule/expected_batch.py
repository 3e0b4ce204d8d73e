"""How many requests closed-loop clients are expected to send together.

Closed-loop clients send the next request as soon as they are answered. So the requests that were in a model together
arrive together again, one after the other. Without this estimate the first of them would get a free slot and run
alone, while all others wait.
"""

SPLIT_NS = 500_000
"""Shorter batches are better split in two: the instance runs one half while the server prepares the other."""

MIN_REQUESTS = 4
"""Below this number a common batch gains less than the wait for it costs."""


class ExpectedBatch:
    """The estimate for one model version, made from its last batch."""

    __slots__ = ("_max_batch_size", "requests")

    def __init__(self, max_batch_size: int) -> None:
        """`max_batch_size` is the maximum number of rows of an execution."""
        self._max_batch_size = max_batch_size
        self.requests = 1
        """The expected number of requests: a batch of this size need not wait for more. 1 if no others are expected."""

    def __repr__(self) -> str:
        return f"<ExpectedBatch requests={self.requests}>"

    def note(self, in_model: int, slots: int, took_ns: int) -> None:
        """Record that a batch ended after `took_ns`, with `in_model` requests queued or executing."""
        parts = slots + 1 if took_ns < SPLIT_NS else slots
        requests = min(in_model // max(1, parts), self._max_batch_size)
        self.requests = requests if requests >= MIN_REQUESTS else 1
