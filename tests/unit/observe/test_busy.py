from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from halimede.core.observe.busy import STEPS, BusyTime

S = 1_000_000_000


def test_an_execution_counts_while_it_runs():
    """A model that sleeps for 50 s must not look idle until its answer comes."""
    time = BusyTime(0)
    time.begin(10 * S)

    assert [(time.total_ns(at * S), time.ratio(at * S)) for at in (10, 20, 25, 60)] == [
        (0, 0),
        (10 * S, 10 / 15),
        (15 * S, 1),
        (50 * S, 1),
    ]
    time.end(60 * S)
    assert (time.total_ns(100 * S), time.ratio(100 * S)) == (50 * S, 0)


def test_the_ratio_of_a_model_that_sleeps_half_of_the_time():
    time = BusyTime(0)
    for start in range(0, 40 * S, S // 2):
        time.begin(start)
        time.end(start + S // 4)

    assert [time.ratio(at) for at in (40 * S, 40 * S + S // 2)] == [0.5, 7.5 / 15.5]


def test_soon_after_the_load_the_ratio_is_of_the_time_since_then():
    time = BusyTime(100 * S)
    assert time.ratio(100 * S) == 0
    time.begin(101 * S)
    assert time.ratio(102 * S) == 0.5


def test_batches_of_one_instance_that_overlap_count_once():
    time = BusyTime(0)
    time.begin(0)
    time.begin(1 * S)
    time.end(3 * S)
    time.end(4 * S)

    assert time.total_ns(9 * S) == 4 * S


@given(st.lists(st.tuples(st.integers(0, 4 * S), st.booleans()), max_size=60), st.integers(0, 40 * S))
def test_total_and_ratio_equal_those_of_all_intervals(steps: list[tuple[int, bool]], rest: int):
    time = BusyTime(0)
    now = 0
    began: int | None = None
    intervals: list[tuple[int, int]] = []
    for passed, scrape in steps:
        now += passed
        if scrape:
            time.ratio(now)
        if began is None:
            time.begin(now)
            began = now
        else:
            time.end(now)
            intervals.append((began, now))
            began = None
    now += rest
    if began is not None:
        intervals.append((began, now))

    since = max(0, now // S - STEPS) * S
    assert time.total_ns(now) == _overlap(intervals, 0, now)
    assert time.ratio(now) == (_overlap(intervals, since, now) / (now - since) if now > since else 0)


def _overlap(intervals: Iterable[tuple[int, int]], begin: int, end: int) -> int:
    return sum(max(0, min(end, last) - max(begin, first)) for first, last in intervals)
