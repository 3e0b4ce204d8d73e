"""Pings in both directions, and the age of a connection, as tables of times."""

from math import inf

import pytest

from halimede.core.wire.http2.keepalive import WITHOUT_CALLS_SECS, Due, Keepalive, KeepaliveRules

PINGING = KeepaliveRules(ping_after=10, answer_within=2)


def test_a_client_that_is_quiet_during_a_call_is_pinged_and_then_given_up() -> None:
    keepalive = Keepalive(PINGING, now=100)
    assert keepalive.wake_at(has_calls=True) == 110
    assert keepalive.due(109.9, has_calls=True) is None
    assert keepalive.due(110, has_calls=True) is Due.PING
    assert keepalive.due(110, has_calls=True) is None
    assert keepalive.wake_at(has_calls=True) == 112
    assert keepalive.due(112, has_calls=True) is Due.PING_TIMEOUT
    assert keepalive.due(1e9, has_calls=True) is None
    assert keepalive.wake_at(has_calls=True) == inf


def test_whatever_arrives_answers_a_ping_and_postpones_the_next() -> None:
    keepalive = Keepalive(PINGING, now=0)
    assert not keepalive.received(5)
    assert keepalive.wake_at(has_calls=True) == 15
    assert keepalive.due(15, has_calls=True) is Due.PING
    assert keepalive.received(16)
    assert not keepalive.received(16)
    assert keepalive.due(18, has_calls=True) is None
    assert keepalive.wake_at(has_calls=True) == 26


def test_it_is_known_whether_something_has_arrived_since() -> None:
    keepalive = Keepalive(PINGING, now=0)
    keepalive.received(5)
    assert keepalive.quiet_s(5) == 0
    assert keepalive.quiet_s(7) == 2


def test_a_client_without_calls_is_pinged_only_if_the_rules_say_so() -> None:
    assert Keepalive(PINGING, now=0).wake_at(has_calls=False) == inf
    assert Keepalive(PINGING, now=0).due(1e9, has_calls=False) is None
    always = KeepaliveRules(ping_after=10, answer_within=2, without_calls=True)
    assert Keepalive(always, now=0).wake_at(has_calls=False) == 10


def test_a_ping_that_waits_for_its_answer_does_so_without_calls_too() -> None:
    keepalive = Keepalive(PINGING, now=0)
    assert keepalive.due(10, has_calls=True) is Due.PING
    assert keepalive.wake_at(has_calls=False) == 12
    assert keepalive.due(12, has_calls=False) is Due.PING_TIMEOUT


STRIKES = KeepaliveRules(client_interval=300, max_strikes=2)
QUIET = WITHOUT_CALLS_SECS


@pytest.mark.parametrize(
    ("rules", "has_calls", "times", "excessive"),
    [
        (STRIKES, True, [0, 300, 600, 900], []),
        (STRIKES, True, [0, 299, 598, 897], [897]),
        # Each ping counts from the one before, early or not.
        (STRIKES, True, [0, 10, 20, 320, 330], [330]),
        (STRIKES, False, [0, QUIET, 2 * QUIET], []),
        (STRIKES, False, [0, 300, 600, 900], [900]),
        (KeepaliveRules(client_interval=300, without_calls=True), False, [0, 300, 600, 900], []),
        (KeepaliveRules(client_interval=300, max_strikes=0), True, [0, 1, 2, 3, 4, 5], []),
        (KeepaliveRules(client_interval=300, max_strikes=1), True, [0, 1, 2, 3], [2, 3]),
        (KeepaliveRules(client_interval=0), True, [0, 0, 0, 0, 0], []),
    ],
)
def test_too_many_early_pings_of_a_client_are_excessive(
    rules: KeepaliveRules, has_calls: bool, times: list[float], excessive: list[float]
) -> None:
    keepalive = Keepalive(rules, now=0)
    assert [now for now in times if keepalive.is_ping_excessive(now, has_calls=has_calls)] == excessive


def test_pings_after_each_answer_are_no_strikes() -> None:
    keepalive = Keepalive(STRIKES, now=0)
    for now in range(20):
        keepalive.sent_data()
        assert not keepalive.is_ping_excessive(now, has_calls=True)
    assert [keepalive.is_ping_excessive(20, has_calls=True) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("factor", "ends_at"), [(1.0, 60), (0.9, 54), (1.1, 66)])
def test_an_old_connection_gets_goaway_and_then_a_grace(factor: float, ends_at: float) -> None:
    keepalive = Keepalive(KeepaliveRules(max_age=60, age_grace=5), 0, factor)
    assert keepalive.wake_at(has_calls=False) == pytest.approx(ends_at)
    assert keepalive.due(ends_at - 0.1, has_calls=True) is None
    assert keepalive.due(ends_at + 0.1, has_calls=True) is Due.MAX_AGE
    assert keepalive.due(ends_at + 5, has_calls=True) is None
    assert keepalive.wake_at(has_calls=True) == pytest.approx(ends_at + 5.1)
    assert keepalive.due(ends_at + 5.2, has_calls=True) is Due.GRACE_OVER
    assert keepalive.due(1000, has_calls=True) is None


def test_without_a_grace_the_calls_of_an_old_connection_run_to_their_end() -> None:
    keepalive = Keepalive(KeepaliveRules(max_age=60, ping_after=inf), now=0)
    assert keepalive.due(60, has_calls=True) is Due.MAX_AGE
    assert keepalive.wake_at(has_calls=True) == inf


def test_all_that_is_due_at_once_is_told_one_after_the_other() -> None:
    keepalive = Keepalive(KeepaliveRules(ping_after=10, answer_within=2, max_age=60, age_grace=0), now=0)
    told = []
    while (due := keepalive.due(100, has_calls=True)) is not None:
        told.append(due)
    assert told == [Due.MAX_AGE, Due.GRACE_OVER, Due.PING]
