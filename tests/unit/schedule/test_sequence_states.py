"""The states of seats are dropped when their sequences end, in whatever way."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from halimede.core.schedule.actions import Action, Execute, Forget, Slot
from halimede.core.schedule.scheduler import Outcome
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from support.sequence_requests import in_sequence, oldest

ONE = Slot(0)
IDLE = 10**9
STATES = replace(oldest(2, idle_ns=IDLE), keeps_state=True)


def begun(instances: int = 1) -> SequenceScheduler:
    """A sequence whose first request has run."""
    scheduler = SequenceScheduler(STATES, instances)
    scheduler.enqueue(in_sequence(1, 7, "S"), 0)
    assert [*scheduler.poll(0)] == [Execute(ONE, (1,), (0,))]
    scheduler.completed(ONE, 1, [Outcome.DONE])
    assert [*scheduler.poll(0)] == []
    return scheduler


def last(scheduler: SequenceScheduler) -> list[Action]:
    scheduler.enqueue(in_sequence(2, 7, "E"), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.DONE])
    return [*scheduler.poll(0)]


def idle(scheduler: SequenceScheduler) -> list[Action]:
    return [*scheduler.poll(IDLE)]


def cancelled(scheduler: SequenceScheduler) -> list[Action]:
    scheduler.enqueue(in_sequence(2, 7), 0)
    assert scheduler.try_cancel(2)
    return [*scheduler.poll(0)]


def gone(scheduler: SequenceScheduler) -> list[Action]:
    scheduler.enqueue(in_sequence(2, 7), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.GONE])
    return [*scheduler.poll(0)]


def unloaded(scheduler: SequenceScheduler) -> list[Action]:
    scheduler.expect_no_more()
    return [*scheduler.poll(0)]


@pytest.mark.parametrize("ends", [last, idle, cancelled, gone, unloaded], ids=lambda ends: ends.__name__)
def test_the_end_of_a_sequence_drops_its_state(ends: Callable[[SequenceScheduler], list[Action]]) -> None:
    scheduler = begun()
    assert ends(scheduler) == [Forget(ONE, 0)]
    assert [*scheduler.poll(IDLE)] == []


def test_a_state_is_dropped_before_another_sequence_runs_on_its_seat() -> None:
    scheduler = begun()
    scheduler.enqueue(in_sequence(2, 8, "S"), 0)
    scheduler.poll(0)
    scheduler.enqueue(in_sequence(3, 9, "S"), 0)
    scheduler.completed(ONE, 1, [Outcome.DONE])
    scheduler.poll(0)
    assert [*scheduler.poll(IDLE)] == [Forget(ONE, 0), Forget(ONE, 1), Execute(ONE, (3,), (0,))]


def test_the_states_of_an_instance_that_has_ended_are_gone_with_it() -> None:
    scheduler = begun()
    scheduler.remove_slot(ONE, (), 0)
    scheduler.add_slot(ONE)
    assert [*scheduler.poll(IDLE)] == []


def test_seats_without_states_are_not_mentioned() -> None:
    scheduler = SequenceScheduler(replace(STATES, keeps_state=False), 1)
    scheduler.enqueue(in_sequence(1, 7, "S"), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.DONE])
    assert [*scheduler.poll(0), *scheduler.poll(IDLE)] == []


def test_a_request_of_an_iterative_model_leaves_no_state() -> None:
    scheduler = SequenceScheduler(replace(oldest(2, iterative=True), keeps_state=True), 1)
    scheduler.enqueue(in_sequence(1, 1, "S"), 0)
    for outcome, then in ((Outcome.AGAIN, Execute(ONE, (1,), (0,))), (Outcome.DONE, Forget(ONE, 0))):
        scheduler.poll(0)
        scheduler.completed(ONE, 1, [outcome])
        assert [*scheduler.poll(0)] == [then]
