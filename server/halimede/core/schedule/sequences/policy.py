"""The scheduling policy of a sequence model's configuration, in the scheduler's units."""

from dataclasses import dataclass, field
from sys import maxsize

from halimede.core.config.model_config import ModelConfig, ModelSequenceBatching
from halimede.core.config.sequence_plan import sequence_plan
from halimede.core.schedule.policy import DEFAULT_MAX_QUEUE_SIZE, MAX_QUEUE_BYTES, NO_HOLD, BatchPolicy, StartHold
from halimede.core.sequences.plan import CorrelationControl

DEFAULT_IDLE_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class DirectPolicy:
    """A batch waits for more sequence slots up to `max_queue_delay_ns`, until the share `minimum_utilization` has a
    request."""

    max_queue_delay_ns: int = 0
    minimum_utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class SequencePolicy:
    """How sequences are scheduled. Times are nanoseconds.

    `keeps_state`: an instance keeps states for its sequence slots. `sequence_slots` is how many sequences an instance
    has at a time. `strategy` is how its batches are formed: a `BatchPolicy` is the oldest strategy. An `iterative`
    model gets requests that are sequences of their own. `max_queue_size` counts the queued requests of all sequences,
    `max_queue_bytes` their tensors.
    """

    model: str = ""
    max_batch_size: int = 1
    sequence_slots: int = 1
    strategy: DirectPolicy | BatchPolicy = field(default_factory=DirectPolicy)
    idle_ns: int = DEFAULT_IDLE_NS
    iterative: bool = False
    correlation: CorrelationControl | None = None
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    max_queue_bytes: int = MAX_QUEUE_BYTES
    hold: StartHold | None = None
    keeps_state: bool = False


def sequence_policy(config: ModelConfig, batching: ModelSequenceBatching, hold: StartHold = NO_HOLD) -> SequencePolicy:
    """The policy of a complete, validated configuration. `batching` is its sequence batching.

    Without a strategy it is direct, as in Triton. Only an iterative model then has the oldest strategy, whose batches
    have no null rows. An oldest strategy without a positive number of candidates has one for each row of a batch.
    """
    max_batch_size = max(1, config.max_batch_size)
    sequence_slots, strategy = max_batch_size, _strategy(batching, max_batch_size)
    if batching.oldest is not None and batching.oldest.max_candidate_sequences > 0:
        sequence_slots = batching.oldest.max_candidate_sequences
    plan = sequence_plan(config)
    return SequencePolicy(
        model=config.name,
        max_batch_size=max_batch_size,
        sequence_slots=sequence_slots,
        strategy=strategy,
        idle_ns=batching.max_sequence_idle_microseconds * 1000 or DEFAULT_IDLE_NS,
        iterative=batching.iterative_sequence,
        correlation=None if plan is None else plan.correlation,
        hold=hold if hold.assigned or hold.backlogged else None,
        keeps_state=plan is not None and bool(plan.states),
    )


def oldest_policy(max_batch_size: int, preferred: tuple[int, ...] = (), max_queue_delay_ns: int = 0) -> BatchPolicy:
    """How the oldest strategy forms the batches of an instance. The bounds are those of the whole model."""
    return BatchPolicy(max_batch_size, preferred, max_queue_delay_ns, max_queue_size=maxsize, max_queue_bytes=maxsize)


def _strategy(batching: ModelSequenceBatching, max_batch_size: int) -> DirectPolicy | BatchPolicy:
    oldest, direct = batching.oldest, batching.direct
    if oldest is not None:
        # `preserve_ordering` needs nothing: an instance has one batch at a time, which answers in the queue's order.
        return oldest_policy(max_batch_size, oldest.preferred_batch_size, oldest.max_queue_delay_microseconds * 1000)
    if direct is not None:
        return DirectPolicy(direct.max_queue_delay_microseconds * 1000, direct.minimum_slot_utilization)
    return oldest_policy(max_batch_size) if batching.iterative_sequence else DirectPolicy()
