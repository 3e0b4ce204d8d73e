"""The scheduler and the batching policy of a model configuration."""

from dataclasses import replace
from typing import Any

from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelParameter,
    ModelQueuePolicy,
    ModelSequenceBatching,
    SequenceControl,
    SequenceControlInput,
    StrategyDirect,
    StrategyOldest,
    TimeoutAction,
)
from halimede.core.schedule.actions import Execute, Slot
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.policy import BatchPolicy, Priorities, StartHold, from_config, priorities_from_config
from halimede.core.schedule.sequences.policy import (
    DirectPolicy,
    SequencePolicy,
    oldest_policy,
    sequence_policy,
)
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.sequences.plan import ControlKind, CorrelationControl
from halimede.core.types import DataType
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
        pick_up_ns=5_000,
    )


def test_a_queue_without_a_configured_size_is_bounded():
    batching = ModelDynamicBatching(default_queue_policy=ModelQueuePolicy(max_queue_size=0))

    policy = from_config(ModelConfig(max_batch_size=4, dynamic_batching=batching))
    assert policy == BatchPolicy(4, max_queue_size=4096, pick_up_ns=5_000)
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
        parameters={"PRIORITY_AGING_MICROSECONDS": ModelParameter("2000")},
    )

    queue = BatchPolicy(4, max_queue_size=5, pick_up_ns=5_000)
    first = replace(
        queue,
        max_queue_size=4096,
        timeout_action=TimeoutAction.DELAY,
        default_timeout_ns=7000,
        allow_timeout_override=True,
    )
    assert from_config(config) == queue
    assert priorities_from_config(config) == Priorities(3, 2, {1: first}, aging_ns=2_000_000)


def test_the_policy_of_a_single_level_is_that_of_the_queue():
    batching = ModelDynamicBatching(
        priority_levels=1,
        default_priority_level=1,
        default_queue_policy=ModelQueuePolicy(max_queue_size=5),
        priority_queue_policy={1: ModelQueuePolicy(max_queue_size=6)},
    )
    config = ModelConfig(max_batch_size=4, dynamic_batching=batching)

    assert from_config(config) == BatchPolicy(4, max_queue_size=6, pick_up_ns=5_000)
    assert priorities_from_config(config) is None


def test_a_scheduler_that_begins_at_some_number_of_requests_holds_them():
    config = ModelConfig(max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    scheduler = make_scheduler(config, hold=StartHold(2))
    scheduler.add_slot(Slot(0))
    assert scheduler.try_start(1) is None
    scheduler.enqueue(pending(1), 0)

    assert (scheduler.poll(0), scheduler.wake_at()) == ([], None)
    scheduler.enqueue(pending(2), 1)
    assert scheduler.poll(1) == [Execute(Slot(0), (1, 2))]
    scheduler.completed(Slot(0), 1)
    assert scheduler.try_start(1) == Slot(0)


def test_a_held_scheduler_begins_if_no_more_requests_are_expected():
    config = ModelConfig(max_batch_size=4, dynamic_batching=ModelDynamicBatching())
    scheduler = make_scheduler(config, hold=StartHold(2))
    scheduler.add_slot(Slot(0))
    scheduler.enqueue(pending(1), 0)

    assert scheduler.poll(0) == []
    scheduler.expect_no_more()
    assert scheduler.poll(0) == [Execute(Slot(0), (1,))]


def test_make_scheduler_follows_the_configuration():
    batching = ModelDynamicBatching(max_queue_delay_microseconds=10)
    dynamic = make_scheduler(ModelConfig(max_batch_size=4, dynamic_batching=batching))
    dynamic.add_slot(Slot(0))
    dynamic.enqueue(pending(1), 0)

    assert repr(dynamic) == "<DynamicBatchScheduler queue=1 running=0/1>"
    assert (dynamic.poll(0), dynamic.wake_at()) == ([], 10_000)
    assert make_scheduler(ModelConfig(max_batch_size=4)).max_batch_size == 1, "one request per execution"


def test_the_policy_of_sequences():
    def policy(max_batch_size: int, **batching: Any) -> SequencePolicy:
        config = ModelConfig(
            name="m", max_batch_size=max_batch_size, sequence_batching=ModelSequenceBatching(**batching)
        )
        assert isinstance(make_scheduler(config), SequenceScheduler)
        return sequence_policy(config, ModelSequenceBatching(**batching))

    assert policy(0) == SequencePolicy("m")
    assert policy(4, direct=StrategyDirect(5, 0.5)) == SequencePolicy("m", 4, 4, DirectPolicy(5000, 0.5))
    assert policy(4, oldest=StrategyOldest(9, (2,), 5), max_sequence_idle_microseconds=7) == SequencePolicy(
        "m", 4, 9, oldest_policy(4, (2,), 5000), 7000
    )
    for candidates in (0, -1):
        oldest = StrategyOldest(max_candidate_sequences=candidates)
        assert policy(4, oldest=oldest) == SequencePolicy("m", 4, 4, oldest_policy(4))
    assert policy(4, iterative_sequence=True) == SequencePolicy("m", 4, 4, oldest_policy(4), iterative=True)
    control = SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=DataType.INT32)
    made = policy(4, control_input=(SequenceControlInput("ID", (control,)),))
    assert made.correlation == CorrelationControl("ID", DataType.INT32, (1, 1))
