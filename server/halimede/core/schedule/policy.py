"""The scheduling policy of a model's configuration, in the scheduler's units."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from halimede.core.config.batching_options import priority_aging_us
from halimede.core.config.model_config import ModelConfig, ModelQueuePolicy, TimeoutAction

# With an unbounded queue, overload would exhaust the memory, so 0 ("no limit") means this bound.
DEFAULT_MAX_QUEUE_SIZE = 4096
MAX_QUEUE_BYTES = 256 << 20

PICK_UP_NS = 5_000
"""Timeouts up to this are over before a request begins, also if an instance is idle, as in Triton."""


@dataclass(frozen=True, slots=True)
class StartHold:
    """A hold for Triton's tests: a model executes nothing until so many requests are queued for the first time.

    `assigned` counts requests that wait for an instance (TRITONSERVER_DELAY_SCHEDULER), `backlogged` those of sequences
    that wait for a sequence slot (TRITONSERVER_BACKLOG_DELAY_SCHEDULER).
    """

    assigned: int = 0
    backlogged: int = 0


NO_HOLD = StartHold()


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How batches are formed and how long a request may wait. Sizes are in rows, times in nanoseconds.

    If `preferred_batch_sizes` is empty, only a full batch is sent early. `default_timeout_ns` 0 is no
    timeout. Requests with a timeout up to `pick_up_ns` expire as they arrive. `max_queue_size` counts requests,
    `max_queue_bytes` their tensors; both count queued requests only.
    """

    max_batch_size: int = 1
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    max_queue_bytes: int = MAX_QUEUE_BYTES
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    pick_up_ns: int = 0

    @property
    def may_expire(self) -> bool:
        """Whether requests may have a deadline."""
        return self.default_timeout_ns > 0 or self.allow_timeout_override

    def expires_at_once(self, asked_us: int) -> bool:
        """Whether a request with the timeout `asked_us` (0 for none) expires as it arrives."""
        return 0 < self.timeout_ns(asked_us) <= self.pick_up_ns

    def deadline(self, asked_us: int, now_ns: int) -> int | None:
        """When a request expires that arrives now with the timeout `asked_us` (0 for none); None for never."""
        timeout_ns = self.timeout_ns(asked_us)
        if not timeout_ns:
            return None
        return now_ns + timeout_ns if timeout_ns > self.pick_up_ns else now_ns

    def timeout_ns(self, asked_us: int) -> int:
        """How long a request with the timeout `asked_us` (0 for none) may wait, in ns; 0 for no limit.

        The default is also the maximum for clients. Without a default the client's timeout applies unchanged.
        """
        if not (asked_us and self.allow_timeout_override):
            return self.default_timeout_ns
        asked_ns = asked_us * 1000
        return min(asked_ns, self.default_timeout_ns) if self.default_timeout_ns else asked_ns


@dataclass(frozen=True, slots=True)
class Priorities:
    """The levels 1 (the highest) to `levels`. Level `default` is for requests of priority 0 or of no such level.

    Levels that are not in `policies` have the policy of the queue. `aging_ns` is how long a request waits in a level
    before it moves to the next higher one; 0 for ever.
    """

    levels: int = 1
    default: int = 1
    policies: Mapping[int, BatchPolicy] = field(default_factory=dict)
    aging_ns: int = 0

    def level_of(self, priority: int) -> int:
        return priority if 1 <= priority <= self.levels else self.default


def from_config(config: ModelConfig) -> BatchPolicy:
    """The policy of a complete, validated configuration.

    A model without `dynamic_batching`, or that does not batch, has a limit of one row: each request runs alone, also
    one with several rows. With a single priority level its policy, if it has one, is the policy of the queue.
    """
    batching = config.dynamic_batching
    if batching is None:
        return BatchPolicy()
    policy = BatchPolicy(
        max_batch_size=max(1, config.max_batch_size),
        preferred_batch_sizes=batching.preferred_batch_size,
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1000,
    )
    queue = batching.default_queue_policy
    if batching.priority_levels == 1:
        queue = batching.priority_queue_policy.get(1, queue)
    return _with_queue(policy, queue or ModelQueuePolicy())


def priorities_from_config(config: ModelConfig) -> Priorities | None:
    """The priority levels of a complete, validated configuration; None for one level."""
    batching = config.dynamic_batching
    if batching is None or batching.priority_levels <= 1:
        return None
    policy = from_config(config)
    return Priorities(
        batching.priority_levels,
        batching.default_priority_level,
        {level: _with_queue(policy, queue) for level, queue in batching.priority_queue_policy.items()},
        priority_aging_us(config) * 1000,
    )


def _with_queue(policy: BatchPolicy, queue: ModelQueuePolicy) -> BatchPolicy:
    return replace(
        policy,
        max_queue_size=queue.max_queue_size or DEFAULT_MAX_QUEUE_SIZE,
        timeout_action=queue.timeout_action,
        default_timeout_ns=queue.default_timeout_microseconds * 1000,
        allow_timeout_override=queue.allow_timeout_override,
        pick_up_ns=PICK_UP_NS,
    )
