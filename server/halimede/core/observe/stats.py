"""Counters of one model version: plain integers in one place, changed only on the event loop's thread."""

from bisect import bisect_left
from dataclasses import dataclass, field

from halimede.core.types import ErrorCode, InferenceResponse
from halimede.core.types.statistics import (
    BatchStatistics,
    Duration,
    FailureReason,
    InferStatistics,
    ModelStatistics,
    QueueOutcome,
    ResponseOutcome,
    ResponseStatistics,
)

BUCKET_EDGES_NS = tuple(
    round(ms * 1_000_000)
    for ms in (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000)
)
"""Upper edges of the duration histograms, from the fastest cached response to a long generation."""

FIRST_RESPONSE_EDGES_NS = tuple(sorted({*BUCKET_EDGES_NS, 2_000_000_000}))
"""The same, plus the edges that Triton uses for first responses."""

MAX_RESPONSE_INDICES = 1024
"""Maximum number of responses of a request with statistics of their own; all later ones share the last."""


_OUTCOMES = {
    FailureReason.REJECTED: QueueOutcome.REJECTED,
    FailureReason.EXPIRED: QueueOutcome.TIMEOUT,
    FailureReason.CANCELED: QueueOutcome.CANCELLED,
    FailureReason.BACKEND: QueueOutcome.ERROR,
    FailureReason.OTHER: QueueOutcome.ERROR,
}


@dataclass(slots=True)
class Waits:
    """How long requests were queued: a count per edge of BUCKET_EDGES_NS and one above all edges, and the sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKET_EDGES_NS) + 1))
    ns: int = 0


class ModelStats:
    """Counters for the requests of one model version since it was loaded.

    Durations are sums in nanoseconds, per successful request: each request of a batch adds the whole compute time of
    its batch, as in Triton, because `perf_analyzer` and dashboards divide them by the number of successes. The
    `request_buckets` count successes by duration, one count per edge of BUCKET_EDGES_NS and one above all edges.

    `queue` has the times that successful requests were queued, `failed_waits` those of failed ones by outcome; none for
    an ensemble (`has_queue` false), because its requests are queued as requests of its steps' models.

    `first_response_buckets` count the requests of a decoupled model by the time from their acceptance to their first
    response with outputs, and `first_response_ns` is the sum of these times; empty for any other model.
    """

    def __init__(self, name: str, version: str, *, decoupled: bool = False, has_queue: bool = True) -> None:
        self.name = name
        self.version = version
        self.decoupled = decoupled
        self.last_inference_ms = 0
        self.inference_count = 0
        self.success_count = 0
        self.request_ns = 0
        self.queue = Waits()
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self.failures = {reason: 0 for reason in FailureReason if reason is not FailureReason.EXPIRED}
        self.failed_waits = {outcome: Waits() for outcome in _OUTCOMES.values()} if has_queue else {}
        self.fail_ns = 0
        self.request_buckets = [0] * (len(BUCKET_EDGES_NS) + 1)
        self.first_response_buckets = [0] * (len(FIRST_RESPONSE_EDGES_NS) + 1) if decoupled else []
        self.first_response_ns = 0
        self.worker_restarts = 0
        # By total batch size, at most max_batch_size entries: number of executions, and their times for input, compute
        # and output.
        self._batches: dict[int, list[int]] = {}
        self._responses: list[ResponseStatistics] = []

    def __repr__(self) -> str:
        failed = sum(self.failures.values())
        return f"<ModelStats {self.name}:{self.version} success={self.success_count} fail={failed}>"

    @property
    def has_queue(self) -> bool:
        return bool(self.failed_waits)

    @property
    def execution_count(self) -> int:
        """Number of batches that instances executed."""
        return sum(batch[0] for batch in self._batches.values())

    def record_success(
        self,
        batch_size: int,
        request_ns: int,
        queue_ns: int,
        input_ns: int,
        infer_ns: int,
        output_ns: int,
        last_inference_ms: int,
    ) -> None:
        """Record a successful request of `batch_size` rows. `last_inference_ms` is wall-clock time since the epoch."""
        self.success_count += 1
        self.inference_count += batch_size
        self.request_ns += request_ns
        self.queue.ns += queue_ns
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns
        self.last_inference_ms = last_inference_ms
        self.request_buckets[bisect_left(BUCKET_EDGES_NS, request_ns)] += 1
        self.queue.buckets[bisect_left(BUCKET_EDGES_NS, queue_ns)] += 1

    def record_execution(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Record that an instance executed a batch of `rows` rows in total."""
        batch = self._batches.get(rows)
        if batch is None:
            batch = self._batches[rows] = [0, 0, 0, 0]
        batch[0] += 1
        batch[1] += input_ns
        batch[2] += infer_ns
        batch[3] += output_ns

    def record_failure(self, reason: FailureReason, request_ns: int, queue_ns: int) -> None:
        """Record a request that was answered with an error. `queue_ns` is 0 for a request that was not queued."""
        self.failures[FailureReason.REJECTED if reason is FailureReason.EXPIRED else reason] += 1
        self.fail_ns += request_ns
        if self.has_queue:
            waits = self.failed_waits[_OUTCOMES[reason]]
            waits.ns += queue_ns
            waits.buckets[bisect_left(BUCKET_EDGES_NS, queue_ns)] += 1

    def record_response(self, index: int, outcome: ResponseOutcome, infer_ns: int, output_ns: int) -> None:
        """Record response number `index`, from 0, of a request; no effect unless the model is decoupled."""
        if not self.decoupled:
            return
        index = min(index, MAX_RESPONSE_INDICES - 1)
        while len(self._responses) <= index:
            self._responses.append(ResponseStatistics())
        response = self._responses[index]
        ns = infer_ns + output_ns
        match outcome:
            case ResponseOutcome.SUCCESS:
                _add(response.compute_infer, infer_ns)
                _add(response.compute_output, output_ns)
                _add(response.success, ns)
            # Without outputs all time is compute time.
            case ResponseOutcome.FAIL:
                _add(response.compute_infer, ns)
                _add(response.fail, ns)
            case ResponseOutcome.EMPTY:
                _add(response.compute_infer, ns)
                _add(response.empty_response, ns)
            case ResponseOutcome.CANCEL:
                _add(response.cancel, ns)

    def record_first_response(self, ns: int) -> None:
        """Record the time from a request's acceptance to its first response with outputs; ignored if not decoupled."""
        if self.decoupled:
            self.first_response_buckets[bisect_left(FIRST_RESPONSE_EDGES_NS, ns)] += 1
            self.first_response_ns += ns

    def snapshot(self) -> ModelStatistics:
        """The statistics for the statistics APIs: a copy that later events do not change."""
        count = self.success_count
        return ModelStatistics(
            name=self.name,
            version=self.version,
            last_inference_ms=self.last_inference_ms,
            inference_count=self.inference_count,
            execution_count=self.execution_count,
            inference=InferStatistics(
                success=Duration(count, self.request_ns),
                fail=Duration(sum(self.failures.values()), self.fail_ns),
                queue=Duration(count, self.queue.ns),
                compute_input=Duration(count, self.input_ns),
                compute_infer=Duration(count, self.infer_ns),
                compute_output=Duration(count, self.output_ns),
            ),
            batches=[_batch(rows, *self._batches[rows]) for rows in sorted(self._batches)],
            responses=[_copy_response(response) for response in self._responses],
        )


def outcome_of(response: InferenceResponse) -> ResponseOutcome:
    """How one response of a decoupled model is counted."""
    if response.error is not None:
        return ResponseOutcome.CANCEL if response.error.code is ErrorCode.CANCELLED else ResponseOutcome.FAIL
    return ResponseOutcome.EMPTY if response.is_empty else ResponseOutcome.SUCCESS


def _add(duration: Duration, ns: int) -> None:
    duration.count += 1
    duration.ns += ns


def _batch(rows: int, count: int, input_ns: int, infer_ns: int, output_ns: int) -> BatchStatistics:
    return BatchStatistics(rows, Duration(count, input_ns), Duration(count, infer_ns), Duration(count, output_ns))


def _copy_response(response: ResponseStatistics) -> ResponseStatistics:
    return ResponseStatistics(
        _copied(response.compute_infer),
        _copied(response.compute_output),
        _copied(response.success),
        _copied(response.fail),
        _copied(response.empty_response),
        _copied(response.cancel),
    )


def _copied(duration: Duration) -> Duration:
    return Duration(duration.count, duration.ns)
