"""The timeouts of queued calls. The deadlines of these tests are in milliseconds."""

from halimede.core.schedule.call_timeouts import SEARCH_PAUSE_NS, CallTimeouts

MS = 1_000_000


def deadlines(**at_ms: int) -> list[tuple[int, int]]:
    return [(int(ticket[1:]), at * MS) for ticket, at in at_ms.items()]


def test_the_first_call_sets_the_time_to_wake_at():
    timeouts = CallTimeouts()
    assert timeouts.wake_at is None

    assert timeouts.begin(300 * MS)
    assert timeouts.wake_at == 300 * MS


def test_only_a_call_with_an_earlier_deadline_moves_it():
    timeouts = CallTimeouts()
    timeouts.begin(300 * MS)

    assert not timeouts.begin(300 * MS)
    assert not timeouts.begin(400 * MS)
    assert timeouts.begin(200 * MS)
    assert timeouts.wake_at == 200 * MS


def test_calls_past_their_deadline_are_due():
    timeouts = CallTimeouts()
    timeouts.begin(1_000 * MS)

    assert timeouts.due(deadlines(t1=1_000, t2=1_001, t3=900, t4=2_000), now_ns=1_000 * MS) == [1, 3]


def test_the_next_check_is_at_the_earliest_remaining_deadline():
    timeouts = CallTimeouts()

    timeouts.due(deadlines(t1=1_000, t2=3_000, t3=2_000), now_ns=1_000 * MS)
    assert timeouts.wake_at == 2_000 * MS


def test_checks_keep_a_minimum_distance_for_any_number_of_deadlines():
    timeouts = CallTimeouts()

    timeouts.due(deadlines(t1=1_000, t2=1_001, t3=1_002), now_ns=1_000 * MS)
    assert timeouts.wake_at == 1_000 * MS + SEARCH_PAUSE_NS


def test_without_calls_nothing_wakes_until_the_next_one():
    timeouts = CallTimeouts()
    timeouts.begin(1_000 * MS)

    assert timeouts.due([], now_ns=1_000 * MS) == []
    assert timeouts.wake_at is None
    assert timeouts.begin(5_000 * MS)


def test_a_call_that_executes_past_its_deadline_causes_no_check():
    timeouts = CallTimeouts()

    assert timeouts.due(deadlines(t1=1_000), now_ns=9_000 * MS) == [1]
    assert timeouts.wake_at is None
