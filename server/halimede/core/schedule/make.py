"""Which scheduler a model gets."""

from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.default import DefaultScheduler
from halimede.core.schedule.dynamic import DynamicBatchScheduler
from halimede.core.schedule.policy import from_config
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.types import ErrorCode, InferenceError


def make_scheduler(config: ModelConfig, instances: int = 0) -> Scheduler:
    """The scheduler that a complete, validated configuration asks for, with the instances 0 to `instances` - 1.

    UNSUPPORTED for a configuration whose scheduling would be silently another one than it asks for.
    """
    if config.sequence_batching is not None:
        raise _unsupported(config, "sequence_batching", "dynamic_batching or no scheduler")
    if config.dynamic_batching is None:
        return DefaultScheduler(from_config(config), instances)
    if config.dynamic_batching.priority_levels > 1:
        raise _unsupported(config, "dynamic_batching.priority_levels above 1", "0 or 1")
    return DynamicBatchScheduler(from_config(config), instances)


def _unsupported(config: ModelConfig, what: str, instead: str) -> InferenceError:
    return InferenceError(
        ErrorCode.UNSUPPORTED, f"model '{config.name}' asks for {what}, which is not supported; use {instead}"
    )
