"""Whose turn it is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.fairness import FRESH_IN_A_ROW, REMEMBERED_KEYS, FairQueue, Rotation


def filled(*items: str) -> FairQueue[str]:
    """`"a1"` is an item of the connection 1 of the address a."""
    queue: FairQueue[str] = FairQueue()
    for item in items:
        queue.push(item[0], item[1:], item)
    return queue


def popped(queue: FairQueue[str], count: int) -> list[str]:
    return [queue.pop() for _ in range(count)]


def test_addresses_take_turns_and_so_do_their_connections() -> None:
    queue = filled("a1", "a2", "a3", "b1", "b2", "c1")
    assert popped(queue, 6) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(queue) == 0


def test_an_address_that_has_had_no_turn_is_next_but_one_at_most() -> None:
    """However much the others ask for."""
    queue = filled(*(f"{address}{number}" for address in "abcdefgh" for number in range(50)))
    popped(queue, 20)
    queue.push("x", "1", "x1")
    assert "x1" in popped(queue, 2)
    # The others go on in their order.
    rest = Counter(item[0] for item in popped(queue, 80))
    assert max(rest.values()) - min(rest.values()) <= 1


def test_a_connection_that_has_had_no_turn_is_next_but_one_of_its_address() -> None:
    queue = filled(*(f"a{number}" for number in range(100)))
    for _ in range(150):
        item = queue.pop()
        queue.push("a", item[1:], item)
    queue.push("a", "probe", "aprobe")
    assert "aprobe" in popped(queue, 2)


def test_those_that_have_had_turns_are_not_starved_by_new_ones() -> None:
    rotation: Rotation[int] = Rotation()
    rotation.add(-1)
    assert rotation.take() == -1
    rotation.add(-1)
    taken = []
    for number in range(10):
        rotation.add(number)
        taken.append(rotation.take())
    assert -1 in taken[: FRESH_IN_A_ROW + 1]


def test_few_keys_are_remembered() -> None:
    rotation: Rotation[int] = Rotation()
    for number in range(REMEMBERED_KEYS + 1):
        rotation.add(number)
        rotation.take()
    # The first one is forgotten: it counts as new, and the second one does not.
    rotation.add(1)
    rotation.add(2)
    rotation.add(0)
    assert 0 in [rotation.take(), rotation.take()]
    assert len(rotation) == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans())))
def test_each_item_is_popped_once(script: list[tuple[int, int, bool]]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    waiting: set[tuple[int, int]] = set()
    for address, connection, pops in script:
        if (address, connection) not in waiting:
            waiting.add((address, connection))
            queue.push(address, connection, (address, connection))
        if pops:
            waiting.remove(queue.pop())
        assert len(queue) == len(waiting)
    assert {queue.pop() for _ in range(len(queue))} == waiting


def test_a_connection_waits_once_and_a_second_time_upsets_no_other() -> None:
    queue = filled("a1", "b1")
    with pytest.raises(ValueError, match="'1' waits already"):
        queue.push("a", "1", "again")
    assert popped(queue, 2) == ["a1", "b1"]
    assert len(queue) == 0
