"""Which group's item is next."""

from halimede_operator.core.process.shares import EXPENSIVE_S, MOST_EXPENSIVE, MOST_OF_NEW, Shares


def run(shares: Shares[str, str], costs_s: dict[str, float], times: int) -> str:
    """Take and finish items one after the other; the groups that were served, in order."""
    served = ""
    for _ in range(times):
        taken = shares.take()
        assert taken is not None
        served += taken[0]
        shares.finish(taken[0], costs_s[taken[0]])
    return served


def filled(**counts: int) -> Shares[str, str]:
    shares: Shares[str, str] = Shares(most=12)
    for group, count in counts.items():
        for number in range(count):
            shares.add(group, f"{group}{number}")
    return shares


def test_groups_with_equal_work_alternate():
    assert run(filled(a=10, b=3), {"a": 0.01, "b": 0.01}, 8) == "abababaa"


def test_a_group_with_expensive_items_gets_fewer_turns():
    served = run(filled(a=10, b=20), {"a": 0.1, "b": 0.01}, 20)
    assert 1 <= served.count("a") <= 3


def test_a_pause_earns_no_credit():
    shares = filled(a=100)
    run(shares, {"a": 0.01}, 50)
    for number in range(50):
        shares.add("b", f"b{number}")
    assert 4 <= run(shares, {"a": 0.01, "b": 0.01}, 10).count("b") <= 6


def test_a_pause_cancels_no_debt():
    shares = filled(a=1, b=40)
    run(shares, {"a": 1.0, "b": 0.01}, 20)
    shares.add("a", "again")
    assert run(shares, {"a": 1.0, "b": 0.01}, 15) == "b" * 15


def test_an_expensive_group_has_few_workers():
    shares = filled(a=30)
    run(shares, {"a": 2 * EXPENSIVE_S}, 10)
    assert [shares.take() is not None for _ in range(MOST_EXPENSIVE + 1)] == [True] * MOST_EXPENSIVE + [False]
    assert not shares.can_take
    shares.add("b", "b0")
    assert shares.take() == ("b", "b0")


def test_a_new_group_has_few_workers_until_its_first_item_has_ended():
    shares = filled(a=30)
    assert [shares.take() is not None for _ in range(MOST_OF_NEW + 1)] == [True] * MOST_OF_NEW + [False]
    shares.finish("a", 0.001)
    assert [shares.take() is not None for _ in range(12)] == [True] * 11 + [False]


def test_groups_without_work_are_forgotten():
    shares: Shares[str, str] = Shares(most=12)
    for number in range(5000):
        shares.add(str(number), "item")
        run(shares, {str(number): 0.001}, 1)
    assert len(shares) < 2000
