"""The work queue, driven by scripts of calls and times."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.process.workqueue import (
    RESYNC_JITTER,
    RESYNC_S,
    SPACING_S,
    WAIT_AFTER_CHANGE_S,
    Failure,
    WorkQueue,
)


def namespace(key: str) -> str:
    return key.partition("/")[0] if "/" in key else ""


def test_a_key_is_queued_once_however_often_it_is_added():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    for _ in range(3):
        queue.add("a", 0.0)
    assert [queue.take(0.0), queue.take(0.0)] == ["a", None]


def test_keys_are_taken_in_the_order_in_which_they_are_due():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.add("b", 1.0)
    queue.add("a", 2.0)
    assert [queue.take(2.0), queue.take(2.0), queue.take(2.0)] == ["a", "b", None]


def test_a_key_added_during_work_is_queued_again_after_it():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    assert queue.take(0.0) == "a"
    queue.add("a", 1.0)
    assert (queue.take(1.0), queue.wake_at()) == (None, None)
    queue.done("a", 2.0)
    assert queue.take(2.0) == "a"


def test_two_runs_of_a_key_keep_the_minimum_spacing():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.done("a", 0.01)
    queue.add("a", 0.02)
    assert (queue.take(0.02), queue.wake_at()) == (None, SPACING_S)
    assert queue.take(SPACING_S) == "a"


def test_a_failing_key_waits_longer_each_time_until_it_succeeds():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    now, waits = 0.0, []
    for _ in range(12):
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now, Failure.TRANSIENT))
        assert queue.wake_at() == now + waits[-1]
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    queue.take(now)
    queue.done("a", now)
    queue.add("a", now + 100)
    queue.take(now + 100)
    assert queue.failed("a", now + 100, Failure.TRANSIENT) == 1


@pytest.mark.parametrize(
    ("failure", "waits"),
    [(Failure.PERMANENT, [5, 10, 20, 30, 30]), (Failure.CONFLICT, [0.05, 0.1, 0.2, 0.4, 0.8])],
)
def test_waits_depend_on_the_kind_of_failure(failure: Failure, waits: list[float]):
    assert [failure.wait_s(n) for n in (1, 2, 3, 4, 5)] == waits
    assert failure.wait_s(10_000) == max(*failure.value)


def test_a_change_shortens_the_wait_after_a_failure_but_not_to_zero():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    for now in (0.0, 5.0, 15.0):
        queue.failed("a", now, Failure.PERMANENT)
        queue.take(queue.wake_at() or 0.0)
    queue.failed("a", 35.0, Failure.PERMANENT)
    queue.add("a", 36.0)
    assert queue.wake_at() == 35.0 + WAIT_AFTER_CHANGE_S


def test_a_change_during_failing_work_shortens_the_wait_too():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.5)
    assert queue.failed("a", 1.0, Failure.PERMANENT) == WAIT_AFTER_CHANGE_S - 1.0


def test_failing_work_that_took_longer_than_its_wait_is_due_now():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.5)
    assert queue.failed("a", 60.0, Failure.TRANSIENT) == 0.0


def test_a_change_does_not_shorten_the_servers_retry_after():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.1)
    assert queue.failed("a", 0.2, Failure.TRANSIENT, not_before=30.0) == pytest.approx(29.8)
    queue.add("a", 1.0)
    queue.retry(2.0)
    assert queue.wake_at() == 30.0


def test_retry_makes_only_failed_keys_due_at_once():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    for key in "ab":
        queue.add(key, 0.0)
        queue.take(0.0)
    queue.failed("a", 0.0, Failure.PERMANENT)
    queue.done("b", 0.0)
    queue.retry(10.0)
    assert [queue.take(10.0), queue.take(10.0)] == ["a", None]


def test_every_key_has_its_own_resync_time():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    keys = [f"key {n}" for n in range(100)]
    for key in keys:
        queue.add(key, 0.0)
        queue.take(0.0)
        queue.done(key, 0.0)
    dues = []
    for _ in keys:
        due = queue.wake_at()
        assert due is not None
        dues.append(due)
        queue.take(due)
    assert all(RESYNC_S * (1 - RESYNC_JITTER) <= due <= RESYNC_S for due in dues)
    assert max(dues) - min(dues) > RESYNC_S * RESYNC_JITTER / 2


def test_a_key_can_be_due_again_before_its_resync():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.done("a", 0.0, again_in=60.0)
    assert queue.wake_at() == 60.0


def test_forget_removes_a_key_unless_it_was_added_meanwhile():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    for key in "ab":
        queue.add(key, 0.0)
        queue.take(0.0)
    queue.add("b", 0.0)
    queue.forget("a")
    queue.forget("b")
    assert (queue.take(1.0), queue.wake_at()) == ("b", None)


def test_a_failing_key_delays_no_other_key():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("bad", 0.0)
    queue.take(0.0)
    queue.failed("bad", 0.0, Failure.TRANSIENT)
    queue.add("good", 0.5)
    assert [queue.take(0.5), queue.take(0.5)] == ["good", None]


def test_a_namespace_with_one_key_does_not_wait_for_one_with_many():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    for number in range(300):
        queue.add(f"flood/{number}", 0.0)
    assert queue.take(0.0) == "flood/0"
    queue.add("calm/edit", 1.0)
    assert queue.take(1.0) == "calm/edit"


def test_one_namespace_leaves_workers_for_others():
    queue: WorkQueue[str] = WorkQueue(namespace, 2)
    for number in range(4):
        queue.add(f"flood/{number}", 0.0)
    assert [queue.take(0.0) for _ in range(3)] == ["flood/0", "flood/1", None]
    assert queue.wake_at() is None
    queue.add("calm/edit", 1.0)
    assert queue.take(1.0) == "calm/edit"
    queue.done("flood/1", 2.0)
    assert queue.take(2.0) == "flood/2"


def test_a_key_that_takes_long_runs_a_tenth_of_the_time():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    queue.add("a", 0.0)
    queue.take(0.0)
    queue.add("a", 0.3)
    queue.done("a", 0.5, cost_s=0.5)
    assert queue.wake_at() == 5.0
    queue.add("a", 1.0)
    assert queue.wake_at() == 5.0


def test_depth_counts_the_keys_that_are_due():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    for key in "abc":
        queue.add(key, 0.0)
    queue.take(0.0)
    queue.take(0.0)
    queue.done("a", 0.0)
    assert (queue.depth(0.0), queue.depth(RESYNC_S)) == (1, 2)


def test_the_oldest_wait_is_that_of_the_key_that_is_due_longest():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    assert queue.oldest_wait_s(1.0) == 0.0
    queue.add("a", 1.0)
    queue.add("b", 3.0)
    assert queue.oldest_wait_s(5.0) == 4.0
    queue.take(5.0)
    assert queue.oldest_wait_s(5.0) == 2.0
    queue.take(5.0)
    assert queue.oldest_wait_s(5.0) == 0.0
    queue.failed("a", 5.0, Failure.TRANSIENT)
    assert (queue.oldest_wait_s(5.5), queue.oldest_wait_s(8.0)) == (0.0, 2.0)


def test_a_busy_key_costs_no_memory():
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    tracemalloc.start()
    for n in range(20_000):
        queue.add("a", float(n))
        queue.take(float(n))
        queue.done("a", float(n))
    used_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used_bytes < 500_000


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "take", "done", "failed", "forget", "retry"]),
        st.sampled_from("abc"),
        st.floats(0, 50),
        st.sampled_from(Failure),
        st.none() | st.floats(0, 100),
    ),
    max_size=80,
)


@given(STEPS)
def test_no_change_is_lost_and_no_key_is_in_work_twice(
    steps: list[tuple[str, str, float, Failure, float | None]],
):
    queue: WorkQueue[str] = WorkQueue(namespace, 12)
    now = 0.0
    in_work: set[str] = set()
    owed: set[str] = set()  # told of since they were last taken
    for what, key, later, failure, floor in steps:
        now += later
        if what == "add":
            queue.add(key, now)
            owed.add(key)
        elif what == "retry":
            queue.retry(now)
        elif what == "take":
            taken = queue.take(now)
            if taken is not None:
                assert taken not in in_work
                in_work.add(taken)
                owed.discard(taken)
        elif key in in_work:
            in_work.discard(key)
            if what == "done":
                queue.done(key, now)
            elif what == "failed":
                queue.failed(key, now, failure, now + floor if floor is not None else None)
                owed.add(key)
            else:
                queue.forget(key)
    for key in in_work:
        queue.forget(key)
    taken_at_last = set()
    while (due := queue.wake_at()) is not None and due <= now + 600:
        taken = queue.take(max(now, due))
        assert taken is not None
        taken_at_last.add(taken)
        queue.forget(taken)
    assert owed <= taken_at_last
