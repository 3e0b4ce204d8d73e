"""The scheduler of sequences, rule by rule."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from halimede.core.schedule.actions import Action, Execute, Fail, Slot, Warn
from halimede.core.schedule.policy import StartHold
from halimede.core.schedule.scheduler import Outcome
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.sequences.plan import CorrelationControl
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.statistics import FailureReason, SequenceCount
from support.refusals import error_of
from support.sequence_requests import direct, in_sequence, oldest

ONE, TWO = Slot(0), Slot(1)
S = 1_000_000_000
CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")
NO_START = (
    "inference request for sequence 7 to model 'm' must specify the START flag on the first request of the sequence"
)
BOTH = pytest.mark.parametrize("policy", [direct(2), oldest(2)], ids=["direct", "oldest"])


def refusal(scheduler: SequenceScheduler, *arguments: object, **more: object) -> str:
    return error_of(scheduler.enqueue, in_sequence(*arguments, **more), 0).message


def run(scheduler: SequenceScheduler, now_ns: int = 0, slot: Slot = ONE) -> list[Action]:
    """Poll, and complete the batch of the slot."""
    actions = [*scheduler.poll(now_ns)]
    if any(isinstance(each, Execute) and each.slot == slot for each in actions):
        scheduler.completed(slot, 1)
    return actions


def begun(policy: SequencePolicy, *correlations: int | str, instances: int = 1) -> SequenceScheduler:
    """The first request of each sequence has run. Keys are negative."""
    scheduler = SequenceScheduler(policy, instances)
    for number, correlation in enumerate(correlations, start=1):
        scheduler.enqueue(in_sequence(-number, correlation, "S"), 0)
        run(scheduler)
    scheduler.poll(0)
    return scheduler


def test_requests_that_fit_no_sequence_are_refused() -> None:
    scheduler = begun(direct(), 1)
    assert refusal(scheduler, 1, 7) == NO_START
    for nameless in (0, ""):
        text = "inference request to model 'm' must specify a non-zero or non-empty correlation ID"
        assert refusal(scheduler, 2, nameless, "S") == text
    text = "inference request to model 'm' must specify batch-size 1 due to requirements of sequence batcher"
    assert refusal(scheduler, 3, 0, "S", rows=2) == text
    assert scheduler.queued == 0


@pytest.mark.parametrize(
    ("datatype", "good", "bad", "given"),
    [(DataType.INT32, 5, "5", "BYTES"), (DataType.UINT64, 5, "5", "BYTES"), (DataType.BYTES, "5", 5, "UINT64")],
)
def test_the_type_of_a_correlation_id_is_the_controls(
    datatype: DataType, good: int | str, bad: int | str, given: str
) -> None:
    scheduler = begun(replace(direct(), correlation=CorrelationControl("ID", datatype, (1, 1))), good)
    assert refusal(scheduler, 1, bad, "S") == (
        f"sequence batching control 'ID' data-type is '{given}', but model 'm' expects '{datatype.name}'"
    )


@BOTH
def test_end_frees_the_id_at_once_and_the_slot_when_it_has_run(policy: SequencePolicy) -> None:
    scheduler = begun(policy, 7, 8)
    scheduler.enqueue(in_sequence(1, 7, "E"), 0)
    assert refusal(scheduler, 2, 7) == NO_START
    scheduler.enqueue(in_sequence(3, 7, "S"), 0)
    assert run(scheduler) == [Execute(ONE, (1,), (0,))]
    assert run(scheduler) == [Execute(ONE, (3,), (0,))]


@BOTH
def test_a_request_may_be_a_whole_sequence(policy: SequencePolicy) -> None:
    scheduler = SequenceScheduler(policy, 1)
    for key in (1, 2):
        scheduler.enqueue(in_sequence(key, 7, "SE"), 0)
    assert run(scheduler) == [Execute(ONE, (1, 2), (0, 1))]
    assert "assigned=0" in repr(scheduler)


@BOTH
def test_a_start_on_a_live_id_runs_after_the_queued_requests(policy: SequencePolicy) -> None:
    scheduler = begun(policy, 7)
    for key, flags in ((1, ""), (2, "S"), (3, "")):
        scheduler.enqueue(in_sequence(key, 7, flags), 0)
    warn, first = run(scheduler)
    assert (cast("Warn", warn).text, first) == (
        "sequence 7 for model 'm' has a conflict. The previous sequence did not end before this sequence start. "
        "Previous sequence will be terminated early.",
        Execute(ONE, (1,), (0,)),
    )
    assert [run(scheduler) for _ in range(3)] == [[Execute(ONE, (2,), (0,))], [Execute(ONE, (3,), (0,))], []]


def test_sequences_are_spread_over_the_instances() -> None:
    scheduler = SequenceScheduler(direct(2), 2)
    for key in range(1, 6):
        scheduler.enqueue(in_sequence(key, key, "S"), 0)
    assert scheduler.poll(0) == [Execute(ONE, (1, 3), (0, 1)), Execute(TWO, (2, 4), (0, 1))]
    assert repr(scheduler) == "<SequenceScheduler queue=1 running=2/2 assigned=4 backlog=1>"


def test_an_idle_sequence_frees_its_slot_for_the_backlog() -> None:
    scheduler = begun(direct(1, idle_ns=10), 7)
    scheduler.enqueue(in_sequence(1, 8, "S"), 5)
    assert (scheduler.poll(5), scheduler.wake_at()) == ([], 10)
    assert scheduler.poll(10) == [Execute(ONE, (1,), (0,))]
    assert refusal(scheduler, 2, 7) == NO_START
    scheduler.completed(ONE, 1)
    assert (scheduler.poll(500), scheduler.wake_at()) == ([], 510), "it was busy until then"


def test_a_sequence_is_not_idle_while_its_request_executes() -> None:
    scheduler = begun(direct(1, idle_ns=10), 7)
    scheduler.enqueue(in_sequence(1, 7), 5)
    assert (scheduler.poll(5), scheduler.wake_at()) == ([Execute(ONE, (1,), (0,))], None)
    scheduler.poll(1000)
    scheduler.enqueue(in_sequence(2, 7), 1000)
    scheduler.completed(ONE, 1)
    assert scheduler.poll(1001) == [Execute(ONE, (2,), (0,))]


def test_a_sequence_in_the_backlog_is_never_idle() -> None:
    scheduler = begun(direct(1, idle_ns=10), 7)
    scheduler.enqueue(in_sequence(1, 7), 0)
    scheduler.poll(0)
    scheduler.enqueue(in_sequence(2, 8, "S"), 0)
    assert (scheduler.poll(1000), scheduler.wake_at()) == ([], None)


def test_a_timeout_counts_in_the_backlog_only_and_ends_the_sequence() -> None:
    scheduler = begun(direct(1), 7)
    for key, correlation, flags, timeout_us in ((1, 7, "", 1), (2, 8, "S", 0), (3, 8, "", 2), (4, 9, "S", 0)):
        scheduler.enqueue(in_sequence(key, correlation, flags, timeout_us=timeout_us), 0)
    scheduler.poll(0)
    assert scheduler.wake_at() == 2000
    error = InferenceError(ErrorCode.UNAVAILABLE, "timeout of the corresponding sequence has been expired")
    assert scheduler.poll(2000) == [Fail(key, error, FailureReason.EXPIRED) for key in (2, 3)]
    assert scheduler.queued == 1
    with pytest.raises(InferenceError, match="must specify the START flag"):
        scheduler.enqueue(in_sequence(5, 8), 2000)


def test_the_queue_of_all_sequences_is_bounded() -> None:
    scheduler = SequenceScheduler(replace(direct(1), max_queue_size=2, max_queue_bytes=6), 1)
    scheduler.enqueue(in_sequence(1, 1, "S"), 0)
    assert refusal(scheduler, 2, 2, "S") == "Exceeds maximum queue size"
    scheduler = SequenceScheduler(replace(direct(1), max_queue_size=2), 1)
    for key in (1, 2):
        scheduler.enqueue(in_sequence(key, 1, "S"), 0)
    assert refusal(scheduler, 3, 2, "S") == "Exceeds maximum queue size"
    run(scheduler)
    scheduler.enqueue(in_sequence(3, 2, "S"), 0)


@BOTH
@pytest.mark.parametrize("executes", [True, False])
def test_a_cancelled_request_ends_its_sequence(policy: SequencePolicy, executes: bool) -> None:
    scheduler = SequenceScheduler(policy, 1)
    for key, flags in ((1, "S"), (2, ""), (3, "")):
        scheduler.enqueue(in_sequence(key, 7, flags), 0)
    scheduler.poll(0)
    assert scheduler.try_cancel(1 if executes else 3) is not executes
    failed = (2, 3) if executes else (2,)
    assert scheduler.poll(0) == [Fail(key, CANCELLED, FailureReason.CANCELED) for key in failed]
    assert ("assigned=1" in repr(scheduler), scheduler.queued) == (True, 0)
    scheduler.completed(ONE, 1, [Outcome.GONE if executes else Outcome.DONE])
    assert "assigned=0" in repr(scheduler)
    assert refusal(scheduler, 4, 7) == NO_START


def test_a_direct_batch_waits_for_enough_slots_or_for_the_delay() -> None:
    scheduler = begun(direct(4, delay_ns=100, utilization=0.5), 1, 2, 3)
    scheduler.poll(1000)
    scheduler.completed(ONE, 1)
    for key, at in ((1, 1000), (2, 1050)):
        scheduler.enqueue(in_sequence(key, key), at)
        if key == 1:
            assert (scheduler.poll(at), scheduler.wake_at()) == ([], 1100)
    assert scheduler.poll(1050) == [Execute(ONE, (1, 2), (0, 1))]
    scheduler.completed(ONE, 1)
    scheduler.enqueue(in_sequence(3, 3), 2000)
    assert scheduler.poll(2099) == []
    assert scheduler.poll(2100) == [Execute(ONE, (3,), (2,))]


def test_the_oldest_strategy_batches_by_preferred_size_and_delay() -> None:
    scheduler = SequenceScheduler(oldest(8, 4, preferred=(2,), delay_ns=100), 1)
    for key in range(1, 4):
        scheduler.enqueue(in_sequence(key, key, "S"), 0)
    assert scheduler.poll(0) == [Execute(ONE, (1, 2), (0, 1))]
    scheduler.completed(ONE, 1)
    assert (scheduler.poll(50), scheduler.wake_at()) == ([], 100)
    assert scheduler.poll(100) == [Execute(ONE, (3,), (2,))]


@BOTH
def test_requests_of_different_shapes_share_no_batch(policy: SequencePolicy) -> None:
    scheduler = SequenceScheduler(policy, 1)
    for key, shape in ((1, "a"), (2, "b")):
        scheduler.enqueue(in_sequence(key, key, "S", shape=shape), 0)
    assert [run(scheduler) for _ in range(2)] == [[Execute(ONE, (1,), (0,))], [Execute(ONE, (2,), (1,))]]


@BOTH
def test_a_lost_sequence_explains_itself_once_it_is_continued(policy: SequencePolicy) -> None:
    scheduler = begun(replace(policy, idle_ns=10), 7, 8)
    scheduler.enqueue(in_sequence(1, 8), 0)
    assert list(scheduler.remove_slot(ONE, [], 5)) == []
    text = "sequence {} for model 'm' has lost its state: its instance has ended; begin the sequence again with the START flag"
    [fail] = scheduler.poll(5)
    assert fail == Fail(1, InferenceError(ErrorCode.INTERNAL, text.format(8)), FailureReason.BACKEND)
    assert (refusal(scheduler, 2, 7), scheduler.wake_at()) == (text.format(7), 15)
    scheduler.add_slot(TWO)
    scheduler.enqueue(in_sequence(3, 7, "S"), 6)
    assert scheduler.poll(6) == [Execute(TWO, (3,), (0,))]
    scheduler.poll(15)
    assert refusal(scheduler, 4, 8) == NO_START.replace("7", "8")


def test_a_sequence_that_restarts_next_needs_no_lost_state() -> None:
    scheduler = begun(direct(2), 7)
    for key, flags in ((1, ""), (2, "S"), (3, "")):
        scheduler.enqueue(in_sequence(key, 7, flags), 0)
    scheduler.poll(0)
    assert list(scheduler.remove_slot(ONE, [], 1)) == []
    scheduler.add_slot(TWO)
    assert scheduler.poll(1) == [Execute(TWO, (2,), (0,))]


def test_iterative_requests_join_the_batches_of_others() -> None:
    scheduler = SequenceScheduler(oldest(4, 4, iterative=True), 1)
    for key in (1, 2):
        scheduler.enqueue(in_sequence(key, key, "S"), 0)
    assert scheduler.poll(0) == [Execute(ONE, (1, 2), (0, 1))]
    scheduler.enqueue(in_sequence(3, 3, "S"), 0)
    scheduler.completed(ONE, 1, [Outcome.DONE, Outcome.AGAIN])
    assert scheduler.queued == 2
    assert scheduler.poll(0) == [Execute(ONE, (3, 2), (2, 1))]


def test_a_hold_keeps_requests_until_enough_are_queued_once() -> None:
    scheduler = SequenceScheduler(replace(direct(1), hold=StartHold(assigned=2, backlogged=1)), 1)
    for key, correlation, flags in ((1, 1, "S"), (2, 1, ""), (3, 2, "S")):
        assert (scheduler.poll(0), scheduler.wake_at()) == ([], None)
        scheduler.enqueue(in_sequence(key, correlation, flags), 0)
    assert [run(scheduler) for _ in range(2)] == [[Execute(ONE, (1,), (0,))], [Execute(ONE, (2,), (0,))]]


def test_a_hold_ends_if_no_more_requests_are_expected() -> None:
    scheduler = SequenceScheduler(replace(direct(1), hold=StartHold(assigned=2)), 1)
    scheduler.enqueue(in_sequence(1, 1, "S"), 0)
    assert scheduler.poll(0) == []
    scheduler.expect_no_more()
    assert scheduler.poll(0) == [Execute(ONE, (1,), (0,))]


@pytest.mark.parametrize("policy", [direct(1, idle_ns=1 << 80), oldest(1, idle_ns=1 << 80)], ids=["direct", "oldest"])
def test_the_backlog_gets_idle_slots_if_no_more_is_expected(policy: SequencePolicy) -> None:
    scheduler = begun(policy, 1)
    scheduler.enqueue(in_sequence(1, 2, "S"), 0)
    scheduler.enqueue(in_sequence(2, 2), 0)
    scheduler.enqueue(in_sequence(3, 3, "S"), 0)
    assert scheduler.poll(0) == []
    scheduler.expect_no_more()
    assert [run(scheduler) for _ in range(4)] == [[Execute(ONE, (key,), (0,))] for key in (1, 2, 3)] + [[]]
    assert scheduler.wake_at() is None


def test_the_backlog_waits_a_second_for_slots_if_few_are_expected() -> None:
    scheduler = begun(direct(1, idle_ns=60 * S), 1)
    scheduler.expect_few(2 * S)
    assert (scheduler.poll(50 * S), scheduler.wake_at()) == ([], 60 * S)
    # Nothing waits for the sequence slot, so the sequence has its idle time.
    scheduler.enqueue(in_sequence(1, 1), 50 * S)
    assert run(scheduler, 50 * S) == [Execute(ONE, (1,), (0,))]
    assert scheduler.poll(50 * S) == []
    assert scheduler.enqueue(in_sequence(2, 2, "SE"), 50 * S) == 1
    assert (scheduler.poll(51 * S - 1), scheduler.wake_at()) == ([], 51 * S)
    assert scheduler.poll(51 * S) == [Execute(ONE, (2,), (0,))]


def test_a_sequence_idle_for_long_keeps_its_slot_for_a_second_more() -> None:
    scheduler = begun(direct(1, idle_ns=60 * S), 1)
    scheduler.enqueue(in_sequence(1, 2, "S"), 0)
    scheduler.expect_few(20 * S)
    assert (scheduler.poll(21 * S - 1), scheduler.wake_at()) == ([], 21 * S)
    assert scheduler.poll(21 * S) == [Execute(ONE, (1,), (0,))]


DELAYED = [direct(4, delay_ns=1 << 80, utilization=1.0), oldest(4, delay_ns=1 << 80)]


@pytest.mark.parametrize("policy", DELAYED, ids=["direct", "oldest"])
@pytest.mark.parametrize(
    "end", [lambda each: each.expect_few(2), SequenceScheduler.expect_no_more], ids=["few", "none"]
)
def test_without_delays_a_partial_batch_of_sequences_runs_at_once(
    end: Callable[[SequenceScheduler], None], policy: SequencePolicy
) -> None:
    scheduler = SequenceScheduler(policy, 1)
    for key in (1, 2):
        scheduler.enqueue(in_sequence(key, key, "SE"), 0)
    assert scheduler.poll(0) == []
    end(scheduler)
    assert run(scheduler) == [Execute(ONE, (1, 2), (0, 1))]
    # The same in a slot that comes later.
    scheduler.remove_slot(ONE, [], 1)
    scheduler.add_slot(TWO)
    scheduler.enqueue(in_sequence(3, 3, "SE"), 1)
    assert scheduler.poll(1) == [Execute(TWO, (3,), (0,))]


def test_the_wait_of_an_iterative_request_begins_at_each_execution() -> None:
    scheduler = SequenceScheduler(replace(direct(2, delay_ns=50, utilization=1.0), iterative=True), 1)
    scheduler.enqueue(in_sequence(1, 1, "S"), 0)
    assert scheduler.poll(50) == [Execute(ONE, (1,), (0,))]
    scheduler.completed(ONE, 1, [Outcome.AGAIN])
    assert (scheduler.poll(100), scheduler.oldest_enqueued_at(), scheduler.wake_at()) == ([], 100, 150)
    assert scheduler.poll(150) == [Execute(ONE, (1,), (0,))]


@BOTH
def test_open_sequences_have_a_slot_or_wait_for_one(policy: SequencePolicy) -> None:
    scheduler = begun(policy, 1, 2, instances=2)
    assert scheduler.sequences() == SequenceCount(open=2, sequence_slots=4)
    for correlation in (3, 4, 5):
        scheduler.enqueue(in_sequence(correlation, correlation, "S"), 0)
    assert scheduler.sequences() == SequenceCount(open=5, sequence_slots=4)
    scheduler.remove_slot(TWO, [], 0)
    # The sequence that has begun there is lost; two others have not begun.
    assert scheduler.sequences() == SequenceCount(open=4, sequence_slots=2)


def test_requests_of_an_iterative_model_are_no_open_sequences() -> None:
    assert SequenceScheduler(replace(oldest(2), iterative=True), 1).sequences() is None
