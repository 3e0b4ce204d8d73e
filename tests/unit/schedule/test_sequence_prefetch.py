"""The next batch of a busy instance is prefetched, of other sequences than those that it runs."""

from halimede.core.schedule.actions import Fail, Slot
from halimede.core.schedule.scheduler import Outcome
from halimede.core.schedule.sequences.admission import CANCELLED, lost_state
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types.statistics import FailureReason
from support.prefetching import Instances, sequences
from support.sequence_requests import direct, in_sequence, oldest

A, B = Slot(0), Slot(1)


def four_begin(played: Instances) -> None:
    """1 and 2 run, 3 and 4 are prefetched; each is the first request of its sequence."""
    played.arrive(*[in_sequence(key, key, "S") for key in (1, 2, 3, 4)])
    assert played.batches == {A: [(1, 2), (3, 4)]}


def assigned(played: Instances) -> int:
    count = played.scheduler.sequences()
    assert count is not None
    return count.open


def test_a_full_batch_of_other_sequences_waits_at_the_busy_instance():
    played = sequences(oldest(6, 2))
    four_begin(played)
    assert played.scheduler.queued == 2, "the requests of a batch that has not begun are queued"
    played.end(A)
    assert (played.begun, played.scheduler.queued) == ([(1, 2), (3, 4)], 0)
    played.end(A)
    played.arrive(in_sequence(5, 1), in_sequence(6, 2, "E"))
    assert played.batches == {A: [(5, 6)]}


def test_a_batch_of_sequences_that_lies_ready_becomes_a_larger_preferred_size():
    played = sequences(oldest(8, 4, preferred=(2, 4)))
    played.arrive(*[in_sequence(key, key, "S") for key in range(1, 7)])
    assert played.batches == {A: [(1, 2, 3, 4), (5, 6)]}
    played.arrive(in_sequence(7, 7, "S"))
    played.arrive(in_sequence(8, 8, "S"))
    assert played.batches == {A: [(1, 2, 3, 4), (5, 6, 7, 8)]}


def test_the_next_request_of_a_sequence_waits_for_the_one_before():
    played = sequences(oldest(6, 1))
    played.arrive(in_sequence(1, "a", "S"), in_sequence(2, "a"), in_sequence(3, "b", "S"), in_sequence(4, "b"))
    assert played.batches == {A: [(1,), (3,)]}
    played.end(A, report=False)
    assert played.batches == {A: [(3,)]}, "the end of 1 is not known"
    played.report(A)
    assert played.batches == {A: [(3,), (2,)]}
    for _ in range(3):
        played.end(A)
    assert played.begun == [(1,), (3,), (2,), (4,)]


def test_a_batch_of_sequences_that_can_grow_is_not_prefetched():
    played = sequences(oldest(6, 3))
    played.arrive(in_sequence(1, 1, "S"))
    played.arrive(in_sequence(2, 2, "S"), in_sequence(3, 3, "S"))
    assert played.batches == {A: [(1,)]}
    played.arrive(in_sequence(4, 4, "S"))
    assert played.batches == {A: [(1,), (2, 3, 4)]}


def test_nothing_is_prefetched_for_the_direct_strategy():
    """Its batches grow until they begin."""
    played = sequences(direct(4))
    played.arrive(in_sequence(1, 1, "S"))
    played.arrive(*[in_sequence(key, key, "S") for key in (2, 3, 4)])
    assert played.batches == {A: [(1,)]}


def test_no_sequences_are_prefetched_that_cannot_be_taken_back():
    played = sequences(oldest(6, 2), prefetches=False)
    played.arrive(*[in_sequence(key, key, "S") for key in (1, 2, 3, 4)])
    assert played.batches == {A: [(1, 2)]}


def test_each_instance_prefetches_its_own_sequences():
    played = sequences(oldest(6, 1), 2)
    played.arrive(*[in_sequence(key, key, "S") for key in (1, 2, 3, 4)])
    assert played.batches == {A: [(1,), (3,)], B: [(2,), (4,)]}
    played.end(B)
    assert played.batches == {A: [(1,), (3,)], B: [(4,)]}, "3 has its state at the other instance"


def test_a_cancelled_request_ends_a_sequence_whose_batch_has_not_begun():
    played = sequences(oldest(6, 2))
    four_begin(played)
    played.arrive(in_sequence(5, 3))
    assert played.cancel(3)
    assert played.failed == [Fail(5, CANCELLED, FailureReason.CANCELED)]
    assert (played.batches, assigned(played)) == ({A: [(1, 2)]}, 3)
    played.end(A)
    assert played.begun == [(1, 2), (4,)]


def test_a_sequence_that_has_begun_is_cancelled_with_its_queue():
    played = sequences(oldest(6, 2))
    four_begin(played)
    played.arrive(in_sequence(5, 3))
    played.end(A, report=False)
    assert not played.cancel(3), "it runs, although the scheduler has not been told"
    assert played.failed == [Fail(5, CANCELLED, FailureReason.CANCELED)]
    assert (assigned(played), played.scheduler.queued) == (4, 1), "its request keeps the sequence slot"
    played.report(A)
    assert played.batches == {A: [(3, 4)]}
    played.batches[A].pop()
    played.scheduler.completed(A, 1, [Outcome.GONE, Outcome.DONE])
    assert (assigned(played), played.scheduler.queued) == (3, 0)
    played.arrive(in_sequence(6, 4))
    assert played.begun[-1] == (6,)


def test_a_later_request_that_is_cancelled_ends_a_sequence_that_has_begun():
    played = sequences(oldest(6, 2))
    four_begin(played)
    played.arrive(in_sequence(5, 3), in_sequence(6, 3))
    played.end(A, report=False)
    assert played.cancel(5)
    assert played.failed == [Fail(6, CANCELLED, FailureReason.CANCELED)]
    played.report(A)
    played.end(A)
    assert (played.begun, assigned(played)) == ([(1, 2), (3, 4)], 3)


def test_an_instance_gives_back_one_batch_of_sequences_for_each_that_it_runs():
    played = sequences(oldest(6, 1))
    played.arrive(*[in_sequence(key, key, "S") for key in range(1, 6)])
    for key in (2, 3):
        assert played.cancel(key)
    played.arrive(in_sequence(6, 6, "S"))
    assert (played.taken_back, played.batches) == (1, {A: [(1,)]})
    played.end(A)
    assert played.batches == {A: [(4,), (5,)]}
    played.end(A)
    assert played.batches == {A: [(5,), (6,)]}


def test_sequences_begin_again_if_their_instance_had_not_begun_them():
    played = sequences(oldest(6, 2))
    four_begin(played)
    assert played.die(A, unread=(3, 4)) == [3, 4]
    played.start(A)
    assert (played.batches, played.failed) == ({A: [(3, 4)]}, [])


def test_nothing_is_prefetched_for_an_instance_that_has_ended():
    scheduler = SequenceScheduler(oldest(6, 1), 1, lambda _slot: False)
    scheduler.enqueue(in_sequence(1, 1, "S"), 0)
    assert len(scheduler.poll(0)) == 1
    scheduler.enqueue(in_sequence(2, 2, "S"), 0)
    assert scheduler.remove_slot(A, [], 0) == []
    assert (scheduler.poll(0), scheduler.queued) == ([], 1)


def test_sequences_with_state_are_lost_with_their_instance():
    played = sequences(oldest(6, 2))
    four_begin(played)
    played.end(A)
    played.end(A)
    played.arrive(*[in_sequence(4 + key, key) for key in (1, 2, 3, 4)], in_sequence(9, 3))
    assert played.batches == {A: [(5, 6), (7, 8)]}
    assert played.die(A, unread=(7, 8)) == []
    assert played.failed == [Fail(9, lost_state(3, oldest()), FailureReason.BACKEND)], "the pump fails the others"
    played.start(A)
    assert (played.batches, played.scheduler.queued, assigned(played)) == ({}, 0, 0)


def test_sequences_that_had_begun_are_lost_with_their_instance():
    played = sequences(oldest(6, 2))
    four_begin(played)
    played.end(A, report=False)
    assert played.die(A) == []
    assert (played.failed, played.scheduler.queued, assigned(played)) == ([], 0, 0), "the pump fails all four"


def test_an_emptied_queue_of_sequences_has_no_request_that_has_begun():
    played = sequences(oldest(6, 2), 2)
    played.arrive(*[in_sequence(key, key, "S") for key in range(1, 9)])
    assert played.batches == {A: [(1, 3), (5, 7)], B: [(2, 4), (6, 8)]}
    played.end(A, report=False)
    assert played.scheduler.drain() == [6, 8], "5 and 7 have begun"
    played.report(A)
    played.end(A)
    played.end(B)
    assert (played.scheduler.queued, assigned(played)) == (0, 6)
    played.arrive(in_sequence(9, 5), in_sequence(10, 7))
    assert played.batches == {A: [(9, 10)]}, "the sequences whose last request has run go on"
