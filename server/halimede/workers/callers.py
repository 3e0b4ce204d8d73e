"""Makes the `Caller` of each call that the code of one instance makes."""

from collections.abc import Iterable, Sequence

from halimede.core.types.caller import Answers, Beside, Caller, RunningBatch
from halimede.workers.worker import BatchItem

NS_PER_MS = 1_000_000


class Callers:
    """Makes the `Caller` of each call. `queue_timeout_ms`: how long calls may be queued, 0 for no limit."""

    __slots__ = ("_beside", "_made", "_model", "_queue_timeout_ns", "_version")

    def __init__(self, model: str, version: str, ordinal: int, queue_timeout_ms: int) -> None:
        self._model = model
        self._version = version
        self._beside = Beside(model, version, ordinal)
        self._queue_timeout_ns = queue_timeout_ms * NS_PER_MS
        # The caller for the batch that called last, by its first request: most batches call more than once.
        self._made: tuple[int, Caller] | None = None

    def of_batch(self, items: Sequence[BatchItem]) -> Caller:
        """The caller for code that executes this batch; its depth is the largest depth of the requests, plus one."""
        first = items[0].key
        made = self._made
        if made is None or made[0] != first:
            depth = max((item.caller.depth for item in items if item.caller is not None), default=0)
            waiter = RunningBatch(self._model, self._version, first)
            made = self._made = first, self._caller(depth, waiter)
        return made[1]

    def beside(self, requests: Iterable[tuple[BatchItem, int]]) -> Caller:
        """The caller for code outside of a batch's execution, on behalf of some of these requests.

        Each request comes with the first request of its batch. If all belong to one batch, the answers of that batch
        wait for the call. Otherwise the server cannot determine which answers wait.
        """
        depth = 0
        firsts: set[int] = set()
        for item, first in requests:
            if item.caller is not None:
                depth = max(depth, item.caller.depth)
            firsts.add(first)
        if len(firsts) != 1:
            return self._caller(depth, self._beside)
        return self._caller(depth, Answers(RunningBatch(self._model, self._version, firsts.pop())))

    def _caller(self, depth: int, waiter: RunningBatch | Answers | Beside) -> Caller:
        return Caller(depth + 1, waiter, None, self._model, self._queue_timeout_ns)
