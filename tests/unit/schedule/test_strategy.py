"""Batching strategies in the scheduler: what they see, which batches they make, and what their failures do."""

from dataclasses import dataclass, field

import pytest

from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching
from halimede.core.schedule.actions import Action, Execute, Fail, Slot
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.scheduler import Pending, Scheduler
from halimede.core.schedule.strategy import BatchedRequest
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.core.types.statistics import FailureReason
from support.scheduling import TOOK
from support.strategies import Groups

MS = 1_000_000


@dataclass(slots=True)
class Scripted:
    """Fails where it is told to, and notes its calls. Takes `most` requests into a batch."""

    most: int = 100
    fails_in: str = ""
    calls: list[object] = field(default_factory=list)
    included: int = 0

    def begin(self) -> "Scripted":
        self.note("begin")
        self.included = 0
        return self

    def include(self, request: BatchedRequest) -> bool:
        self.note("include")
        self.included += 1
        return self.included <= self.most

    def end(self) -> None:
        self.note("end")

    def note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.fails_in:
            raise KeyError("no")


def scheduler_of(strategy: object, **batching: object) -> Scheduler:
    config = ModelConfig(max_batch_size=8, dynamic_batching=ModelDynamicBatching(**batching))
    scheduler = make_scheduler(config, strategy=strategy)
    scheduler.add_slot(Slot(0))
    return scheduler


def run_all(scheduler: Scheduler, now_ns: int = 10) -> list[Action]:
    actions: list[Action] = []
    while given := scheduler.poll(now_ns):
        actions += given
        scheduler.completed(Slot(0), TOOK)
    return actions


def test_a_refused_request_begins_the_next_batch():
    strategy = Groups(most_bytes=10)
    scheduler = scheduler_of(strategy)
    for key, size_bytes in enumerate((4, 4, 4, 9, 30, 1), 1):
        scheduler.enqueue(Pending(key, 1, size_bytes), 0)

    assert run_all(scheduler) == [Execute(Slot(0), keys) for keys in ((1, 2), (3,), (4,), (5,), (6,))]
    assert len(strategy.ended) == 5


def test_rules_of_batches_hold_with_a_strategy():
    scheduler = scheduler_of(Groups(most_bytes=100))
    for key, (rows, shape) in enumerate(((5, "a"), (3, "a"), (1, "a"), (1, "b")), 1):
        scheduler.enqueue(Pending(key, rows, 4, shape), 0)

    assert run_all(scheduler) == [Execute(Slot(0), keys) for keys in ((1, 2), (3,), (4,))]


def test_a_request_that_is_refused_as_the_first_runs_alone():
    scheduler = scheduler_of(Scripted(most=0))
    for key in (1, 2):
        scheduler.enqueue(Pending(key, 1, 4), 0)

    assert run_all(scheduler) == [Execute(Slot(0), (1,)), Execute(Slot(0), (2,))]


def test_a_batch_that_the_strategy_closes_does_not_wait_for_its_delay():
    scheduler = scheduler_of(Scripted(most=2), max_queue_delay_microseconds=1000)
    given = []
    for key in (1, 2, 3):
        scheduler.enqueue(Pending(key, 1, 4), key)
        given.append(scheduler.poll(key))

    assert given == [[], [], [Execute(Slot(0), (1, 2))]]


def test_a_waiting_batch_includes_each_request_once():
    strategy = Scripted()
    scheduler = scheduler_of(strategy, max_queue_delay_microseconds=1000)
    for key in (1, 2, 3):
        scheduler.enqueue(Pending(key, 1, 4), key)
        assert scheduler.poll(key) == []
    assert scheduler.poll(MS + 1) == [Execute(Slot(0), (1, 2, 3))]

    assert strategy.calls == ["begin", "include", "include", "include", "end"]


def test_a_batch_is_formed_again_without_a_cancelled_request():
    strategy = Scripted()
    scheduler = scheduler_of(strategy, max_queue_delay_microseconds=1000)
    for key in (1, 2):
        scheduler.enqueue(Pending(key, 1, 4), 0)
    assert scheduler.poll(0) == []
    assert scheduler.try_cancel(1)
    assert scheduler.poll(MS) == [Execute(Slot(0), (2,))]

    assert strategy.calls == ["begin", "include", "include", "begin", "include", "end"]


def test_a_request_of_a_higher_level_begins_the_batch_again():
    strategy = Scripted()
    levels = {"priority_levels": 2, "default_priority_level": 2}
    scheduler = scheduler_of(strategy, max_queue_delay_microseconds=1000, **levels)
    scheduler.enqueue(Pending(1, 1, 4), 0)
    assert scheduler.poll(0) == []
    scheduler.enqueue(Pending(2, 1, 4, priority=1), 1)
    assert scheduler.poll(MS) == [Execute(Slot(0), (2, 1))]

    assert strategy.calls == ["begin", "include", "begin", "include", "include", "end"]


@pytest.mark.parametrize("where", ["begin", "include", "end"])
def test_a_failure_fails_the_requests_of_its_batch_alone(where: str):
    strategy = Scripted(most=2, fails_in=where)
    scheduler = scheduler_of(strategy)
    for key in (1, 2, 3, 4):
        scheduler.enqueue(Pending(key, 1, 4, "a" if key < 3 else "b"), 0)

    (first, *rest) = scheduler.poll(10)
    error = InferenceError(ErrorCode.INTERNAL, f"batching strategy 'Scripted' failed in '{where}': KeyError: 'no'")
    assert first == Fail(1, error, FailureReason.OTHER)
    assert [fail.request for fail in rest if isinstance(fail, Fail)] == [2, 3, 4]
    assert (scheduler.queued, scheduler.poll(10), scheduler.wake_at()) == (0, [], None)

    strategy.fails_in = ""
    scheduler.enqueue(Pending(5, 1, 4), 11)
    assert scheduler.poll(11) == [Execute(Slot(0), (5,))]


def test_requests_of_other_batches_run_beside_a_failed_one():
    scheduler = scheduler_of(Groups(bad_bytes=13))
    for key, size_bytes in enumerate((13, 4, 4), 1):
        scheduler.enqueue(Pending(key, 1, size_bytes), 0)

    execute, fail = scheduler.poll(10)
    assert execute == Execute(Slot(0), (2, 3))
    assert isinstance(fail, Fail)
    assert fail.request == 1


def test_a_strategy_sees_sizes_shapes_and_parameters():
    tensor = Tensor("IN", DataType.FP32, (2, 3), bytes(24))
    request = InferenceRequest("m", id="r", inputs=[tensor], parameters={"tenant": "a"}, priority=2)
    seen = BatchedRequest(Pending(7, 2, 24, (), request.form.priority, request=request))

    assert (seen.id, seen.rows, seen.size_bytes, seen.priority) == ("r", 2, 24, 2)
    assert (seen.shapes, seen.parameters) == ({"IN": (2, 3)}, {"tenant": "a"})
    assert repr(seen) == "<BatchedRequest 'r' rows=2 shapes={'IN': (2, 3)}>"
    bare = BatchedRequest(Pending(7, 2, 24))
    assert (bare.id, bare.shapes, bare.parameters) == ("", {}, {})


def test_every_request_is_queued_for_its_strategy():
    assert scheduler_of(Groups()).try_start(1) is None
