"""Deadlines that are removed early, added again, and expire in order."""

from halimede.core.deadlines import STALE_DEADLINES, Deadlines


def made(**deadlines: int) -> Deadlines[str]:
    result = Deadlines[str]()
    for key, deadline_ns in deadlines.items():
        result.add(key, deadline_ns)
    return result


def test_due_keys_are_removed_by_deadline_then_by_arrival() -> None:
    deadlines = made(late=30, first=10, second=10, early=5)
    assert deadlines.next() == 5
    assert deadlines.pop_due(4) == []
    assert deadlines.pop_due(10) == ["early", "first", "second"]
    assert (len(deadlines), deadlines.next()) == (1, 30)
    assert deadlines.pop_due(10) == []


def test_a_removed_key_does_not_expire() -> None:
    deadlines = made(a=10, b=20)
    deadlines.discard("a")
    deadlines.discard("unknown")
    assert deadlines.next() == 20
    assert deadlines.pop_due(20) == ["b"]
    assert (len(deadlines), deadlines.next()) == (0, None)


def test_a_key_that_is_added_again_has_its_new_deadline() -> None:
    deadlines = made(a=10)
    deadlines.discard("a")
    deadlines.add("a", 20)
    assert deadlines.pop_due(19) == []
    assert deadlines.pop_due(20) == ["a"]


def test_a_key_that_is_added_again_at_its_old_deadline_expires_once() -> None:
    deadlines = made(a=10)
    deadlines.discard("a")
    deadlines.add("a", 10)
    assert deadlines.pop_due(10) == ["a"]
    assert (len(deadlines), deadlines.next()) == (0, None)


def test_entries_of_removed_keys_are_bounded() -> None:
    deadlines = Deadlines[int]()
    deadlines.add(1, 10**12)
    for key in range(2, 10_000):
        deadlines.add(key, 10**12 + key)
        deadlines.discard(key)
    assert deadlines.entries <= STALE_DEADLINES + 4
    assert deadlines.next() == 10**12


def test_nothing_expires_after_clear() -> None:
    deadlines = made(a=10, b=20)
    deadlines.clear()
    assert (len(deadlines), deadlines.entries, deadlines.next(), deadlines.pop_due(100)) == (0, 0, None, [])
