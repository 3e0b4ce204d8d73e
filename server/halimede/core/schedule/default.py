"""The default scheduler, of a model without `dynamic_batching`: one request per execution, first come, first served."""

from dataclasses import replace

from halimede.core.schedule.dynamic import DynamicBatchScheduler
from halimede.core.schedule.policy import BatchPolicy


class DefaultScheduler(DynamicBatchScheduler):
    """A batcher with a limit of one row: every request closes its batch, also one with several rows."""

    def __init__(self, policy: BatchPolicy, instances: int = 0, *, lends: bool = False) -> None:
        single = replace(policy, max_batch_size=1, preferred_batch_sizes=(), max_queue_delay_ns=0)
        super().__init__(single, instances, lends=lends)
