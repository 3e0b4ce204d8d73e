"""The gate before a step: which calls proceed, wait or expire."""

from halimede.core.ensemble.admission import Gate
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of


def test_calls_proceed_up_to_the_limit_and_then_in_order() -> None:
    gate = Gate(2)
    assert [gate.try_enter((ticket, 1), None) for ticket in range(4)] == [True, True, False, False]
    assert (gate.under_way, gate.waiting) == (2, 2)
    assert [gate.leave(), gate.leave(), gate.leave(), gate.leave()] == [(2, 1), (3, 1), None, None]
    assert (gate.under_way, gate.waiting) == (0, 0)


def test_call_above_the_limit_admits_no_other_call() -> None:
    gate = Gate(1)
    assert gate.try_enter((1, 1), None)
    gate.enter()
    assert not gate.try_enter((2, 1), None)
    assert gate.leave() is None
    assert gate.leave() == (2, 1)


def test_number_of_waiting_calls_is_bounded() -> None:
    gate = Gate(1, max_waiting=1)
    assert [gate.try_enter((ticket, 1), None) for ticket in range(2)] == [True, False]
    assert error_of(gate.try_enter, (3, 1), None) == InferenceError(ErrorCode.UNAVAILABLE, "Exceeds maximum queue size")


def test_removed_call_is_skipped() -> None:
    gate = Gate(1)
    for ticket in range(3):
        gate.try_enter((ticket, 1), None)
    assert gate.try_remove((1, 1))
    assert not gate.try_remove((1, 1))
    assert gate.leave() == (2, 1)


def test_calls_expire_at_their_deadlines() -> None:
    gate = Gate(1)
    gate.try_enter((0, 1), 5)  # does not wait, and so does not expire
    for ticket, deadline in ((1, 30), (2, None), (3, 10), (4, 10)):
        gate.try_enter((ticket, 1), deadline)
    assert gate.wake_at() == 10
    assert gate.expire(9) == []
    assert gate.expire(10) == [(3, 1), (4, 1)]
    assert gate.wake_at() == 30
    assert gate.leave() == (1, 1)
    assert gate.wake_at() is None
    assert gate.expire(100) == []
