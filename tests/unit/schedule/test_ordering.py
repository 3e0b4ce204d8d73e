from hypothesis import given
from hypothesis import strategies as st

from halimede.core.schedule.ordering import ResponseOrder


def order_of(*keys: int) -> ResponseOrder[str]:
    order = ResponseOrder[str]()
    for key in keys:
        order.enqueued(key)
    return order


def test_an_answer_that_is_next_in_order_is_sent_at_once():
    order = order_of(1, 2)

    assert order.completed(1, "one") == ["one"]
    assert order.completed(2, "two") == ["two"]
    assert len(order) == 0


def test_an_early_answer_waits_for_those_before_it():
    order = order_of(5, 3, 9)

    assert order.completed(9, "nine") == []
    assert order.completed(3, "three") == []
    assert order.completed(5, "five") == ["five", "three", "nine"]
    assert len(order) == 0


def test_a_failure_or_cancellation_is_an_answer_and_frees_the_place():
    order = order_of(1, 2, 3)

    assert order.completed(2, "cancelled") == []
    assert order.completed(1, "failed") == ["failed", "cancelled"]
    assert order.completed(3, "three") == ["three"]


def test_answers_of_the_first_stream_are_sent_at_once_and_others_held():
    order = order_of(1, 2, 3)

    assert order.completed(1, "1a", final=False) == ["1a"]
    assert order.completed(2, "2a", final=False) == []
    assert order.completed(2, "2b", final=False) == []
    assert order.completed(3, "3a") == []
    assert order.completed(1, "1b") == ["1b", "2a", "2b"]
    assert order.completed(2, "2c", final=False) == ["2c"]
    assert order.completed(2, "2d") == ["2d", "3a"]


def test_a_request_after_all_others_were_answered_does_not_wait():
    order = order_of(1)
    order.completed(1, "one")
    order.enqueued(1)

    assert order.completed(1, "again") == ["again"]


def test_a_withdrawn_request_is_answered_at_once_and_holds_nothing_back():
    order = ResponseOrder[str]()
    for key in (1, 2):
        order.enqueued(key)
    order.withdraw(2)
    assert order.completed(2, "two") == ["two"]
    order.enqueued(3)
    assert order.completed(3, "three") == []
    assert order.completed(1, "one") == ["one", "three"]


@given(st.permutations(range(8)), st.integers(0, 8))
def test_any_order_of_completion_gives_the_order_of_arrival(completions: list[int], first_burst: int):
    order = ResponseOrder[int]()
    released: list[int] = []
    for key in range(first_burst):
        order.enqueued(key)
    for key in [key for key in completions if key < first_burst]:
        released += order.completed(key, key)
    for key in range(first_burst, 8):
        order.enqueued(key)
    for key in [key for key in completions if key >= first_burst]:
        released += order.completed(key, key)
        assert released == list(range(len(released)))

    assert released == list(range(8))
    assert len(order) == 0
