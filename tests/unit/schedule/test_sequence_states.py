"""The states of sequence slots are dropped, and ids are given back, when sequences end, in whatever way."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from halimede.core.schedule.actions import Action, Execute, Fail, Forget, Slot
from halimede.core.schedule.scheduler import Outcome
from halimede.core.schedule.sequences.ids import SequenceIds
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason
from halimede.workers.states import HeldStates
from support.refusals import error_of
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


def last(scheduler: SequenceScheduler, name: int | str = 7) -> list[Action]:
    scheduler.enqueue(in_sequence(3, name, "E"), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.DONE])
    return [*scheduler.poll(0)]


def idle(scheduler: SequenceScheduler, _: int | str = 7) -> list[Action]:
    return [*scheduler.poll(IDLE)]


def cancelled(scheduler: SequenceScheduler, name: int | str = 7) -> list[Action]:
    scheduler.enqueue(in_sequence(3, name), 0)
    assert scheduler.try_cancel(3)
    return [*scheduler.poll(0)]


def gone(scheduler: SequenceScheduler, name: int | str = 7) -> list[Action]:
    scheduler.enqueue(in_sequence(3, name), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.GONE])
    return [*scheduler.poll(0)]


def ended(scheduler: SequenceScheduler, name: int | str = 7) -> list[Action]:
    scheduler.enqueue(in_sequence(3, name), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.ENDED])
    return [*scheduler.poll(0)]


def unloaded(scheduler: SequenceScheduler, _: int | str = 7) -> list[Action]:
    scheduler.expect_no_more()
    return [*scheduler.poll(0)]


@pytest.mark.parametrize("ends", [last, idle, cancelled, gone, ended, unloaded], ids=lambda ends: ends.__name__)
def test_the_end_of_a_sequence_drops_its_state(ends: Callable[..., list[Action]]) -> None:
    scheduler = begun()
    assert ends(scheduler) == [Forget(ONE, 0)]
    assert [*scheduler.poll(IDLE)] == []


def test_a_request_that_ends_its_sequence_fails_those_behind_it() -> None:
    scheduler = begun()
    for key in (2, 3):
        scheduler.enqueue(in_sequence(key, 7), 0)
    scheduler.poll(0)
    scheduler.completed(ONE, 1, [Outcome.ENDED])
    text = (
        "sequence 7 for model 'm' has ended: an earlier request's new state would exceed the memory that the server has "
        "for the states of sequences; begin the sequence again with the START flag"
    )
    fail = Fail(3, InferenceError(ErrorCode.UNAVAILABLE, text), FailureReason.REJECTED)
    assert [*scheduler.poll(0)] == [fail, Forget(ONE, 0)]
    with pytest.raises(InferenceError, match="must specify the START flag"):
        scheduler.enqueue(in_sequence(4, 7), 0)


def test_a_state_is_dropped_before_another_sequence_runs_on_its_slot() -> None:
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


def test_slots_without_states_are_not_mentioned() -> None:
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


def counted(limit_bytes: int, instances: int = 1, sequence_slots: int = 2) -> tuple[SequenceScheduler, HeldStates]:
    held = HeldStates(limit_bytes)
    return SequenceScheduler(oldest(sequence_slots, idle_ns=IDLE), instances, ids=SequenceIds(held, max_bytes=10)), held


def test_an_id_that_is_too_long_is_refused() -> None:
    scheduler, held = counted(100)
    scheduler.enqueue(in_sequence(1, "0123456789", "S"), 0)
    scheduler.enqueue(in_sequence(2, 1 << 63, "S"), 0)
    assert held.account.held_bytes == 10
    error = error_of(scheduler.enqueue, in_sequence(3, "012345678\N{EURO SIGN}", "S"), 0)
    assert (error.code, error.message) == (
        ErrorCode.INVALID_ARG,
        "the sequence_id of an inference request to model 'm' has 12 bytes, at most 10 are accepted. Use "
        "--max-sequence-id-size to increase the limit.",
    )
    assert scheduler.queued == 2


def test_ids_that_exceed_the_bound_together_are_refused() -> None:
    scheduler, held = counted(19)
    scheduler.enqueue(in_sequence(1, "a" * 10, "S"), 0)
    error = error_of(scheduler.enqueue, in_sequence(2, "b" * 10, "S"), 0)
    assert (error.code, error.message) == (
        ErrorCode.UNAVAILABLE,
        "inference request to model 'm': the server has no memory left for another sequence",
    )
    scheduler.enqueue(in_sequence(3, "a" * 10), 0)
    assert (scheduler.queued, held.account.held_bytes) == (2, 10)


@pytest.mark.parametrize("ends", [last, idle, cancelled, gone, ended, unloaded], ids=lambda ends: ends.__name__)
def test_the_end_of_a_sequence_frees_its_id(ends: Callable[..., list[Action]]) -> None:
    scheduler, held = counted(100)
    for key in (1, 2):
        scheduler.enqueue(in_sequence(key, "seven", "S"), 0)
        scheduler.poll(0)
        scheduler.completed(ONE, 1, [Outcome.DONE])
        scheduler.poll(0)
    assert held.account.held_bytes == 5
    ends(scheduler, "seven")
    assert held.account.held_bytes == 0


def test_sequences_in_the_backlog_and_lost_ones_keep_their_ids() -> None:
    scheduler, held = counted(100, sequence_slots=1)
    for key, name in ((1, "seven"), (2, "eight"), (3, "nine")):
        scheduler.enqueue(in_sequence(key, name, "S"), 0)
    scheduler.poll(0)
    assert scheduler.try_cancel(3)
    assert held.account.held_bytes == 10
    scheduler.remove_slot(ONE, (), 0)
    scheduler.poll(0)
    assert held.account.held_bytes == 10, "a lost sequence is remembered"
    with pytest.raises(InferenceError, match="has lost its state"):
        scheduler.enqueue(in_sequence(4, "seven"), 0)
    scheduler.enqueue(in_sequence(5, "seven", "S"), 0)
    assert held.account.held_bytes == 10, "a new sequence takes the place of the lost one"
    scheduler.drain()
    scheduler.poll(IDLE)
    assert held.account.held_bytes == 0
    scheduler.add_slot(ONE)
    scheduler.enqueue(in_sequence(6, "seven", "S"), IDLE)
    scheduler.poll(IDLE)
    scheduler.remove_slot(ONE, (), IDLE)
    assert held.account.held_bytes == 5
    scheduler.poll(2 * IDLE)
    assert held.account.held_bytes == 0
