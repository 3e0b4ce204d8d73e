"""The scheduler and the batching policy of a model configuration."""

from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
    TimeoutAction,
)
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.policy import BatchPolicy, from_config
from support.scheduling import pending


def test_the_policy_of_a_full_configuration():
    config = ModelConfig(
        max_batch_size=16,
        dynamic_batching=ModelDynamicBatching(
            preferred_batch_size=(4, 8),
            max_queue_delay_microseconds=300,
            default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY, 7, True, 5),
        ),
    )

    assert from_config(config) == BatchPolicy(
        max_batch_size=16,
        preferred_batch_sizes=(4, 8),
        max_queue_delay_ns=300_000,
        max_queue_size=5,
        max_queue_bytes=256 << 20,
        timeout_action=TimeoutAction.DELAY,
        default_timeout_ns=7000,
        allow_timeout_override=True,
    )


def test_a_queue_without_a_configured_size_is_bounded():
    batching = ModelDynamicBatching(default_queue_policy=ModelQueuePolicy(max_queue_size=0))

    assert from_config(ModelConfig(max_batch_size=4, dynamic_batching=batching)) == BatchPolicy(4, max_queue_size=4096)
    assert from_config(ModelConfig()) == BatchPolicy(1, max_queue_size=4096)


def test_make_scheduler_follows_the_configuration():
    batching = ModelDynamicBatching(max_queue_delay_microseconds=10)
    dynamic = make_scheduler(ModelConfig(max_batch_size=4, dynamic_batching=batching), instances=1)
    dynamic.enqueue(pending(1), 0)

    assert repr(dynamic) == "<DynamicBatchScheduler queue=1 running=0/1>"
    assert (dynamic.poll(0), dynamic.wake_at()) == ([], 10_000)
    assert repr(make_scheduler(ModelConfig(max_batch_size=4), 2)) == "<DefaultScheduler queue=0 running=0/2>"
