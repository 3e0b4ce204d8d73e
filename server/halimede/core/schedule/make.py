"""The choice of a model's scheduler."""

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import max_concurrency
from halimede.core.schedule.dynamic_batcher import DynamicBatchScheduler
from halimede.core.schedule.policy import NO_HOLD, StartHold, from_config, priorities_from_config
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.schedule.sequences.ids import SequenceIds
from halimede.core.schedule.sequences.policy import sequence_policy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.schedule.strategy import BatchingStrategy


def make_scheduler(
    config: ModelConfig,
    take_back: TakeBack | None = None,
    strategy: BatchingStrategy | None = None,
    hold: StartHold = NO_HOLD,
    ids: SequenceIds | None = None,
) -> Scheduler:
    """The scheduler of a complete, validated configuration. It begins without slots.

    Without `take_back` no batch is prefetched. `hold` is for models with dynamic or sequence batching, as in Triton.
    `ids` counts the ids of sequences.
    """
    if max_concurrency(config) > 1 or config.is_decoupled:
        # Instances that take several batches at a time, or end them at once, do not wait for the event loop.
        take_back = None
    if config.sequence_batching is not None:
        policy = sequence_policy(config, config.sequence_batching, hold)
        return SequenceScheduler(policy, take_back=take_back, ids=ids)
    batches = from_config(config)
    if config.dynamic_batching is None:
        return DynamicBatchScheduler(batches, queue=BatchQueue(batches, take_back))
    queue = BatchQueue(batches, take_back, priorities_from_config(config), strategy)
    return DynamicBatchScheduler(batches, queue=queue, begins_at=hold.assigned)
