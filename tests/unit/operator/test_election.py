"""Who holds the lease, by scripts of reads, writes and clocks."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.election import LEASE_S, RENEW_DEADLINE_S, RETRY_S, Election, Record, Step


def taken(me: str = "me", now: float = 0.0) -> Election:
    election = Election(me)
    election.saw(None, now)
    election.wrote(Record(me, "t0", 0), begun=now, now=now)
    return election


def test_the_first_one_makes_the_lease_and_acts():
    election = Election("me")
    election.saw(None, 5.0)
    assert (election.step(5.0), election.may_act(5.0)) == (Step.CREATE, False)
    assert election.next_record("t") == Record("me", "t", 0)
    election.wrote(Record("me", "t", 0), begun=5.0, now=5.5)
    assert (election.step(6.0), election.may_act(6.0)) == (Step.RENEW, True)


def test_the_second_one_waits_while_the_record_changes():
    election = Election("second")
    for now in range(0, 100, 10):
        election.saw(Record("first", f"t{now}", 0), float(now))
        assert election.step(now + 9.0) is Step.WAIT


def test_the_second_one_takes_it_when_the_record_stands_still_for_the_lease_as_it_sees_it():
    election = Election("second")
    election.saw(Record("first", "in the year 3000", 4), 100.0)
    election.saw(Record("first", "in the year 3000", 4), 110.0)
    assert election.step(100.0 + LEASE_S - 0.1) is Step.WAIT
    assert election.step(100.0 + LEASE_S) is Step.TAKE
    assert election.next_record("now") == Record("second", "now", 5)


def test_a_lease_that_was_given_back_is_taken_at_once():
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


def test_the_deadline_counts_from_when_the_write_was_begun():
    election = Election("me")
    election.saw(None, 0.0)
    election.wrote(Record("me", "t", 0), begun=0.0, now=9.0)
    assert not election.may_act(RENEW_DEADLINE_S)


def test_who_sees_somebody_else_in_its_lease_gives_up():
    election = taken()
    election.saw(Record("other", "t9", 1), 20.0)
    assert (election.step(20.0), election.may_act(1.0)) == (Step.GIVE_UP, False)


def test_who_never_held_it_does_not_act_even_with_its_name_in_it():
    election = Election("me")
    election.saw(Record("me", "t", 0), 0.0)
    assert (election.may_act(0.0), election.step(0.0)) == (False, Step.RENEW)


@dataclass
class World:
    """One Lease, and operators that each have a clock of their own and may stand still."""

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
def test_never_do_two_act_whatever_their_clocks_say_and_whoever_stands_still(
    skew: float, script: list[tuple[str, int]]
):
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
    assert a.may_act(now) or b.may_act(now + skew) or Step.GIVE_UP in (a.step(now), b.step(now + skew))
