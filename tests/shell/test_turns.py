"""How clients share the turns of a loop. Each turn begins a limited number of calls."""

import asyncio
from collections import Counter
from ipaddress import ip_network
from time import monotonic

import pytest

from halimede.frontends.turns import CALLS_PER_TURN, WORK_S, Turns, address_of

TRUSTED = [ip_network(each) for each in ("10.0.0.0/8", "192.0.2.7/32", "fd00::/8")]


async def calls_by_turn(turns: Turns) -> Counter[int]:
    """In which turns of the loop a hundred calls begin that are made in the first one."""
    turn = 0
    counts: Counter[int] = Counter()
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(tick)

    def count() -> None:
        turns.begins(monotonic())
        counts[turn] += 1

    loop.call_soon(tick)
    for number in range(100):
        if turns.admits(monotonic()) > 0:
            count()
        else:
            turns.wait(number % 3, number, count)
    while sum(counts.values()) < 100:
        await asyncio.sleep(0)
    return counts


def test_a_turn_takes_a_limited_number_of_calls() -> None:
    counts = asyncio.run(calls_by_turn(Turns()))
    assert [counts[turn] for turn in sorted(counts)] == [32, 32, 32, 4]
    assert CALLS_PER_TURN == 32


def test_a_turn_takes_a_limited_time() -> None:
    async def run() -> int:
        turns = Turns()
        for number in range(20):
            turns.begins(monotonic())
            if number == 10:
                # Calls that take long: as many as nine, and no more in this turn.
                until = monotonic() + WORK_S
                while monotonic() < until:
                    pass
            if turns.admits(monotonic()) <= 0:
                return number
        return -1

    assert asyncio.run(run()) == 10


def test_a_turn_that_fails_leaves_the_others_theirs(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[int]:
        turns, done = Turns(), []

        def fail() -> None:
            raise ValueError("a defect")

        turns.wait("a", 1, fail)
        turns.wait("a", 2, lambda: done.append(2))
        while not done:
            await asyncio.sleep(0)
        return done

    assert asyncio.run(run()) == [2]
    assert "a client's turn failed" in caplog.text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("192.0.2.1", 1), ("192.0.2.1", 2), True),
        (("192.0.2.1", 1), ("192.0.2.2", 1), False),
        (("::ffff:192.0.2.1", 1, 0, 0), ("192.0.2.1", 1), True),
        # A client has a whole network of IPv6.
        (("2001:db8:1:2::1", 1, 0, 0), ("2001:db8:1:2:ffff::2", 1, 0, 0), True),
        (("2001:db8:1:2::1", 1, 0, 0), ("2001:db8:1:3::1", 1, 0, 0), False),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 1, 0, 2), True),
        ("", "", True),
    ],
)
def test_peers_count_by_their_addresses(one: object, other: object, same: bool) -> None:
    assert (address_of(one) == address_of(other)) is same
    assert address_of(one) is not None


def test_a_peer_without_a_valid_address_has_none() -> None:
    assert address_of(("unknown",)) is None


@pytest.mark.parametrize(
    ("added", "address"),
    [
        ("203.0.113.5", "203.0.113.5"),
        # The client may write what it likes: the proxy appends.
        ("10.9.9.9, 198.51.100.1, 203.0.113.5", "203.0.113.5"),
        ("203.0.113.5, 10.1.2.3,192.0.2.7", "203.0.113.5"),
        ("2001:db8::1, fd00::7", "2001:db8::1"),
        ("203.0.113.5:40000", "203.0.113.5"),
        ("[2001:db8::1]:40000, 10.1.2.3:80", "2001:db8::1"),
    ],
)
def test_requests_of_a_proxy_count_by_the_address_that_it_adds(added: str, address: str) -> None:
    assert Turns(TRUSTED).forwarded_for(added) == address_of((address, 0))


@pytest.mark.parametrize("added", ["", "10.0.0.1", "nobody", "203.0.113.5, unknown"])
def test_a_proxy_that_adds_no_address_has_none(added: str) -> None:
    assert Turns(TRUSTED).forwarded_for(added) is None


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("10.3.2.1", 5), True),
        (("::ffff:10.3.2.1", 5, 0, 0), True),
        (("fd12::1", 5, 0, 0), True),
        (("11.3.2.1", 5), False),
        ("", False),
    ],
)
def test_trusted_proxies_are_known_by_their_networks(peer: object, expected: bool) -> None:
    assert Turns(TRUSTED).is_proxy(peer) is expected
    assert not Turns().is_proxy(peer)
