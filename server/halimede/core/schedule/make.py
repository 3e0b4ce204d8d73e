"""The choice of a model's scheduler."""

from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.default import DefaultScheduler
from halimede.core.schedule.dynamic import DynamicBatchScheduler
from halimede.core.schedule.policy import from_config
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.schedule.sequences.policy import StartHold, sequence_policy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler


def make_scheduler(config: ModelConfig, instances: int = 0, hold: StartHold | None = None) -> Scheduler:
    """The scheduler of a complete, validated configuration. It begins with one slot of each instance.

    `hold` is for sequence models.
    """
    if config.sequence_batching is not None:
        return SequenceScheduler(sequence_policy(config, config.sequence_batching, hold), instances)
    if config.dynamic_batching is None:
        return DefaultScheduler(from_config(config), instances)
    return DynamicBatchScheduler(from_config(config), instances)
