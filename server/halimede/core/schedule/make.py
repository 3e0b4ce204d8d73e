"""The choice of a model's scheduler."""

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import max_concurrency
from halimede.core.schedule.default import DefaultScheduler
from halimede.core.schedule.dynamic import DynamicBatchScheduler
from halimede.core.schedule.levels import LevelQueue
from halimede.core.schedule.policy import NO_HOLD, StartHold, from_config, priorities_from_config
from halimede.core.schedule.queue import BatchQueue
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.schedule.sequences.ids import SequenceIds
from halimede.core.schedule.sequences.policy import sequence_policy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.schedule.strategy import BatchingStrategy


def make_scheduler(
    config: ModelConfig,
    instances: int = 0,
    strategy: BatchingStrategy | None = None,
    hold: StartHold = NO_HOLD,
    ids: SequenceIds | None = None,
) -> Scheduler:
    """The scheduler of a complete, validated configuration. It begins with one slot of each instance.

    `hold` is for models with dynamic or sequence batching, as in Triton. `ids` counts the ids of sequences.
    """
    transaction = config.model_transaction_policy
    # Instances that take several batches at a time, or end them at once, do not wait for the event loop.
    lends = max_concurrency(config) == 1 and not (transaction is not None and transaction.decoupled)
    if config.sequence_batching is not None:
        sequences = sequence_policy(config, config.sequence_batching, hold)
        # A request of an iterative model is open in its worker when it runs again, which cannot be taken back.
        return SequenceScheduler(sequences, instances, lends=lends and not sequences.iterative, ids=ids)
    policy = from_config(config)
    if config.dynamic_batching is None:
        return DefaultScheduler(policy, instances, lends=lends)
    priorities = priorities_from_config(config)
    has_levels = priorities is not None or strategy is not None
    queue = LevelQueue(policy, priorities, strategy) if has_levels else BatchQueue(policy)
    return DynamicBatchScheduler(policy, instances, queue, hold.seated, lends=lends)
