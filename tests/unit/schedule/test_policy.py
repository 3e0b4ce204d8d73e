"""The scheduler and the batching policy of a model configuration."""

from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelParameter,
    ModelQueuePolicy,
    TimeoutAction,
)
from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities, from_config, priorities_from_config
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


def test_the_levels_of_a_configuration_have_their_own_policies():
    config = ModelConfig(
        max_batch_size=4,
        dynamic_batching=ModelDynamicBatching(
            priority_levels=3,
            default_priority_level=2,
            default_queue_policy=ModelQueuePolicy(max_queue_size=5),
            priority_queue_policy={1: ModelQueuePolicy(TimeoutAction.DELAY, 7, True)},
        ),
        parameters={"PRIORITY_AGING_MICROSECONDS": ModelParameter("20")},
    )

    first = BatchPolicy(4, timeout_action=TimeoutAction.DELAY, default_timeout_ns=7000, allow_timeout_override=True)
    assert from_config(config) == BatchPolicy(4, max_queue_size=5)
    assert priorities_from_config(config) == Priorities(3, 2, {1: first}, aging_ns=20_000)


def test_the_policy_of_a_single_level_is_that_of_the_queue():
    batching = ModelDynamicBatching(
        priority_levels=1,
        default_priority_level=1,
        default_queue_policy=ModelQueuePolicy(max_queue_size=5),
        priority_queue_policy={1: ModelQueuePolicy(max_queue_size=6)},
    )
    config = ModelConfig(max_batch_size=4, dynamic_batching=batching)

    assert from_config(config) == BatchPolicy(4, max_queue_size=6)
    assert priorities_from_config(config) is None


def test_a_scheduler_that_begins_at_some_number_of_requests_holds_them():
    config = ModelConfig(max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    scheduler = make_scheduler(config, instances=1, begins_at=2)
    assert scheduler.try_start(1) is None
    scheduler.enqueue(pending(1), 0)

    assert (scheduler.poll(0), scheduler.wake_at()) == ([], None)
    scheduler.enqueue(pending(2), 1)
    assert scheduler.poll(1) == [Execute(Slot(0), (1, 2))]
    scheduler.completed(Slot(0), 1)
    assert scheduler.try_start(1) == Slot(0)


def test_make_scheduler_follows_the_configuration():
    batching = ModelDynamicBatching(max_queue_delay_microseconds=10)
    dynamic = make_scheduler(ModelConfig(max_batch_size=4, dynamic_batching=batching), instances=1)
    dynamic.enqueue(pending(1), 0)

    assert repr(dynamic) == "<DynamicBatchScheduler queue=1 running=0/1>"
    assert (dynamic.poll(0), dynamic.wake_at()) == ([], 10_000)
    assert repr(make_scheduler(ModelConfig(max_batch_size=4), 2)) == "<DefaultScheduler queue=0 running=0/2>"
