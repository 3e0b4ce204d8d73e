"""The scheduling policy of a model's configuration, in the scheduler's units."""

from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig, ModelQueuePolicy, TimeoutAction

# With an unbounded queue, overload would exhaust the memory, so 0 ("no limit") means this bound.
DEFAULT_MAX_QUEUE_SIZE = 4096
MAX_QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How batches are formed and how long a request may wait. Sizes are in rows, times in nanoseconds.

    If `preferred_batch_sizes` is empty, only a full batch is sent early. `default_timeout_ns` 0 is no
    timeout. `max_queue_size` counts requests, `max_queue_bytes` their tensors; both count queued requests only.
    """

    max_batch_size: int = 1
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    max_queue_bytes: int = MAX_QUEUE_BYTES
    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False

    def timeout_ns(self, asked_us: int) -> int:
        """How long a request with the timeout `asked_us` (0 for none) may wait, in ns; 0 for no limit.

        The default is also the maximum for clients. Without a default the client's timeout applies unchanged.
        """
        if not (asked_us and self.allow_timeout_override):
            return self.default_timeout_ns
        asked_ns = asked_us * 1000
        return min(asked_ns, self.default_timeout_ns) if self.default_timeout_ns else asked_ns


def from_config(config: ModelConfig) -> BatchPolicy:
    """The policy of a complete, validated configuration. A model that does not batch has batches of one row."""
    max_batch_size = max(1, config.max_batch_size)
    batching = config.dynamic_batching
    if batching is None:
        return BatchPolicy(max_batch_size)
    queue = batching.default_queue_policy or ModelQueuePolicy()
    return BatchPolicy(
        max_batch_size=max_batch_size,
        preferred_batch_sizes=batching.preferred_batch_size,
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1000,
        max_queue_size=queue.max_queue_size or DEFAULT_MAX_QUEUE_SIZE,
        timeout_action=queue.timeout_action,
        default_timeout_ns=queue.default_timeout_microseconds * 1000,
        allow_timeout_override=queue.allow_timeout_override,
    )
