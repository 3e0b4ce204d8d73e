"""Statistics of a model version, as a snapshot. Every `ns` is a sum over the counted events, in nanoseconds.

The fields of sums and durations have the names and the order of the protocol, which prints them as they are.
"""

from dataclasses import dataclass, field
from enum import Enum


class FailureReason(Enum):
    """Why a request failed. The value is the `reason` label of `nv_inference_request_failure`, except for EXPIRED."""

    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    """Its timeout ended while it was queued. It counts as REJECTED, as in Triton."""
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class QueueOutcome(Enum):
    """What became of a request: the `outcome` label of `halimede_queue_duration_seconds`."""

    SUCCESS = "success"
    ERROR = "error"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


class ResponseOutcome(Enum):
    """The outcome of one response of a decoupled model. EMPTY is a final response without content."""

    SUCCESS = "success"
    FAIL = "fail"
    EMPTY = "empty_response"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class SequenceCount:
    """`open` sequences have a sequence slot of an instance or wait for one; the instances that are up have
    `sequence_slots` in all."""

    open: int
    sequence_slots: int


@dataclass(slots=True)
class Duration:
    count: int = 0
    ns: int = 0


@dataclass(slots=True)
class InferStatistics:
    """Sums per request, as Triton defines them: each request of a batch adds the whole compute time of its batch.

    success includes cache hits, and queue counts the same requests; compute_* count success minus cache hits.
    """

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class BatchStatistics:
    """Sums per execution of one total batch size."""

    batch_size: int
    compute_input: Duration = field(default_factory=Duration)
    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ResponseStatistics:
    """Sums over the responses with one index, of all requests; each response counts as one of the last four fields.

    compute_infer counts all but cancel, compute_output the same responses as success.
    """

    compute_infer: Duration = field(default_factory=Duration)
    compute_output: Duration = field(default_factory=Duration)
    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    empty_response: Duration = field(default_factory=Duration)
    cancel: Duration = field(default_factory=Duration)


@dataclass(slots=True)
class ModelStatistics:
    """`last_inference_ms` is a wall-clock time since the epoch; inference_count is a sum of batch sizes.

    `responses` are indexed by a response's position in its request; empty unless the model is decoupled.
    """

    name: str
    version: str
    last_inference_ms: int = 0
    inference_count: int = 0
    execution_count: int = 0
    inference: InferStatistics = field(default_factory=InferStatistics)
    batches: list[BatchStatistics] = field(default_factory=list)
    responses: list[ResponseStatistics] = field(default_factory=list)
