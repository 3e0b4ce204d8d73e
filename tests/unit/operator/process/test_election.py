"""Leader election, driven by scripts of reads, writes and clocks."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.process.election import (
    LEASE_S,
    MAX_LEASE_S,
    RENEW_DEADLINE_S,
    RETRY_S,
    Election,
    Record,
    Step,
)


def taken(me: str = "me", now: float = 0.0) -> Election:
    election = Election(me)
    election.saw(None, now)
    election.wrote(Record(me, "t0", 0), begun=now, now=now)
    return election


def test_the_times_are_those_of_client_go():
    assert (LEASE_S, RENEW_DEADLINE_S, RETRY_S) == (15, 10, 2)


def test_the_first_operator_creates_the_lease_and_acts():
    election = Election("me")
    election.saw(None, 5.0)
    assert (election.step(5.0), election.may_act(5.0)) == (Step.CREATE, False)
    assert election.next_record("t") == Record("me", "t", 0)
    election.wrote(Record("me", "t", 0), begun=5.0, now=5.5)
    assert (election.step(6.0), election.may_act(6.0)) == (Step.RENEW, True)


def test_a_second_operator_waits_while_the_record_changes():
    election = Election("second")
    for now in range(0, 100, 10):
        election.saw(Record("first", f"t{now}", 0), float(now))
        assert election.step(now + 9.0) is Step.WAIT


def test_a_second_operator_takes_a_lease_whose_record_did_not_change():
    election = Election("second")
    election.saw(Record("first", "in the year 3000", 4), 100.0)
    election.saw(Record("first", "in the year 3000", 4), 110.0)
    assert election.step(100.0 + LEASE_S - 0.1) is Step.WAIT
    assert election.step(100.0 + LEASE_S) is Step.TAKE
    assert election.next_record("now") == Record("second", "now", 5)


def test_a_duration_that_no_operator_writes_is_not_waited_for():
    election = Election("second")
    election.saw(Record("first", "t", 4, 2147483647.0), 100.0)
    assert election.step(100.0 + MAX_LEASE_S - 0.1) is Step.WAIT
    assert election.step(100.0 + MAX_LEASE_S) is Step.TAKE


def test_transitions_stay_at_the_number_that_the_api_server_accepts():
    election = Election("second")
    election.saw(Record("", "t", 2**31 - 1), 100.0)
    assert election.next_record("now") == Record("second", "now", 2**31 - 1)


def test_a_released_lease_is_taken_at_once():
    election = Election("second")
    election.saw(Record("", "t", 4, 1.0), 100.0)
    assert election.step(100.0) is Step.TAKE


def test_a_holder_that_cannot_renew_stops_acting_and_renews_later():
    election = taken()
    assert election.may_act(RENEW_DEADLINE_S - 0.1)
    assert not election.may_act(RENEW_DEADLINE_S)
    election.saw(Record("me", "t0", 0), 300.0)
    assert election.step(300.0) is Step.RENEW
    election.wrote(Record("me", "t1", 0), begun=300.0, now=301.0)
    assert election.may_act(301.0)


def test_the_renew_deadline_counts_from_the_start_of_the_write():
    election = Election("me")
    election.saw(None, 0.0)
    election.wrote(Record("me", "t", 0), begun=0.0, now=9.0)
    assert not election.may_act(RENEW_DEADLINE_S)


def test_a_holder_that_sees_another_holder_has_lost_the_lease():
    election = taken()
    election.saw(Record("other", "t9", 1), 20.0)
    assert (election.step(20.0), election.may_act(1.0)) == (Step.LOST, False)


def test_a_lease_with_our_name_that_we_did_not_write_is_not_enough():
    election = Election("me")
    election.saw(Record("me", "t", 0), 0.0)
    assert (election.may_act(0.0), election.step(0.0)) == (False, Step.RENEW)


@dataclass
class World:
    """One Lease and several operators. Each has its own clock and may be frozen."""

    lease: tuple[int, Record] | None = None
    seen: dict[str, int] = field(default_factory=dict)

    def turn(self, election: Election, local: float, reachable: bool) -> None:
        if not reachable:
            return
        if not election.may_act(local):
            self.seen[election.identity] = self.lease[0] if self.lease else 0
            election.saw(self.lease[1] if self.lease else None, local)
        if election.step(local) in (Step.CREATE, Step.TAKE, Step.RENEW):
            if self.seen.get(election.identity, 0) != (self.lease[0] if self.lease else 0):
                self.seen[election.identity] = self.lease[0] if self.lease else 0
                election.saw(self.lease[1] if self.lease else None, local)
                return
            version = (self.lease[0] if self.lease else 0) + 1
            record = election.next_record(f"v{version}")
            self.lease = (version, record)
            self.seen[election.identity] = version
            election.wrote(record, begun=local, now=local)


@given(
    st.floats(-1e6, 1e6),
    st.lists(
        st.tuples(st.sampled_from(["a up", "a cut", "a frozen", "b up", "b cut", "b frozen"]), st.integers(1, 30)),
        max_size=12,
    ),
)
def test_two_operators_never_act_at_the_same_time(skew: float, script: list[tuple[str, int]]):
    world = World()
    a, b = Election("a"), Election("b")
    how = {"a": "up", "b": "up"}
    now = 0.0
    for change, seconds in [*script, ("a up", 1), ("b up", 60)]:
        who, what = change.split()
        how[who] = what
        for _ in range(seconds):
            now += 1.0
            for election, clock in ((a, now), (b, now + skew)):
                if how[election.identity] != "frozen" and now % RETRY_S == 0:
                    world.turn(election, clock, reachable=how[election.identity] == "up")
            assert not (a.may_act(now) and b.may_act(now + skew))
    assert a.may_act(now) or b.may_act(now + skew) or Step.LOST in (a.step(now), b.step(now + skew))
