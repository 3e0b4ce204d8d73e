"""Random events against sequences of which batches are prefetched: nothing is lost, order and state are as without."""

from typing import Literal

from hypothesis import given, settings

from halimede.core.schedule.actions import Slot
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.types import InferenceError
from support.examples import Draws, drawn, examples
from support.prefetching import sequences
from support.sequence_requests import in_sequence, oldest

IDLE = 40

Kind = Literal["arrive", "end", "end later", "report", "cancel", "pass time", "die", "start", "drain"]
EVENTS: tuple[Kind, ...] = (
    *("arrive",) * 10,
    *("end",) * 4,
    *("end later", "report", "report", "cancel", "cancel", "pass time", "pass time", "die", "start", "start", "drain"),
)
Case = tuple[SequencePolicy, list[tuple[Kind, int]]]


def case_of(draws: Draws, *, prefers: bool = False) -> Case:
    most = 1 + draws.below(3)
    sizes = draws.pick(((), (1, most))) if prefers else ()
    policy = oldest(3 + draws.below(4), most, preferred=sizes, delay_ns=draws.pick((0, 0, 5)), idle_ns=IDLE)
    return policy, draws.script(EVENTS, 10, 30)


class Play:
    """Performs events, and knows of each request what has become of it."""

    def __init__(self, policy: SequencePolicy, *, prefetches: bool) -> None:
        self.policy = policy
        self.played = sequences(policy, 2, prefetches=prefetches)
        self.scheduler = self.played.scheduler
        self.slots = [Slot(0), Slot(1)]
        self.up = set(self.slots)
        self.keys = 0
        self.left: dict[int, str] = {}
        """Requests that were not executed, and why."""

    def perform(self, kind: Kind, pick: int) -> None:
        played = self.played
        slot = self.slots[pick % 2]
        waiting = played.batches.get(slot, [])
        match kind:
            case "arrive":
                self.arrive(pick)
            case "end" | "end later" if waiting and slot in self.up and slot not in played.unreported:
                played.end(slot, report=kind == "end")
            case "report" if slot in played.unreported:
                played.report(slot)
            case "cancel":
                self.cancel(max(1, self.keys - pick % 8))
            case "pass time":
                played.pass_time((1, 2, 7, 2 * IDLE)[pick // 2 % 4])
            case "die" if slot in self.up and slot not in played.unreported:
                self.die(slot, is_unread=bool(pick // 2 % 2))
            case "start" if slot not in self.up:
                self.up.add(slot)
                played.start(slot)
            case "drain" if pick % 8 == 0:
                for key in self.scheduler.drain():
                    self.leave(key, "drained")
                played.poll()
        self.check()

    def arrive(self, pick: int) -> None:
        flags = ("S", "S", "", "", "", "", "E", "SE")[pick // 8 % 8]
        request = in_sequence(self.keys + 1, (1, 2, 3, 4, 5, 6)[pick // 64 % 6], flags, shape=pick // 4096 % 5 == 0)
        self.keys += 1
        try:
            self.played.arrive(request)
        except InferenceError:
            self.leave(self.keys, "refused")

    def cancel(self, key: int) -> None:
        begun = {one for batch in self.played.begun for one in batch}
        if self.played.cancel(key):
            assert key not in begun, "it runs"
            self.leave(key, "cancelled")

    def die(self, slot: Slot, *, is_unread: bool) -> None:
        self.up.discard(slot)
        waiting = self.played.batches.get(slot, [])
        unread = waiting[1] if len(waiting) > 1 and is_unread else ()
        again = self.played.die(slot, unread)
        assert set(again) <= set(unread)
        for key in [one for batch in waiting for one in batch if one not in again]:
            self.left.setdefault(key, "lost")

    def leave(self, key: int, how: str) -> None:
        assert key not in self.left, f"{key} left as {self.left[key]} and as {how}"
        self.left[key] = how

    def check(self) -> None:
        played = self.played
        begun = [key for batch in played.begun for key in batch]
        assert len(begun) == len(set(begun)), "a request runs once"
        failed = [fail.request for fail in played.failed]
        assert len(failed) == len(set(failed)), "a request fails once"
        assert not set(failed) & ({*begun} | self.left.keys())
        assert not {*begun} & {key for key, how in self.left.items() if how != "lost"}
        assert max(map(len, played.begun), default=0) <= self.policy.max_batch_size
        if self.up - played.batches.keys() - played.unreported.keys():
            wake_at = self.scheduler.wake_at()
            assert wake_at is None or wake_at > played.now, "idle beside work that is due"

    def wind_up(self) -> None:
        """End everything: then each request has left, and each sequence slot is free."""
        played = self.played
        for slot in self.slots:
            if slot not in self.up:
                self.up.add(slot)
                played.start(slot)
        for _ in range(100):
            played.end_each(self.slots)
            played.pass_time(2 * IDLE)
            self.check()
        begun = {key for batch in played.begun for key in batch}
        failed = {fail.request for fail in played.failed}
        assert begun | failed | self.left.keys() == {*range(1, self.keys + 1)}
        assert (self.scheduler.queued, played.batches) == (0, {})
        assert "assigned=0 backlog=0" in repr(self.scheduler), "all sequence slots are free again"


@settings(max_examples=examples(400), deadline=None)
@given(drawn(lambda draws: case_of(draws, prefers=True), 140))
def test_each_request_of_a_sequence_leaves_once(case: Case):
    policy, script = case
    play = Play(policy, prefetches=True)
    for kind, pick in script:
        play.perform(kind, pick)
    play.wind_up()


@settings(max_examples=examples(400), deadline=None)
@given(drawn(case_of, 140))
def test_sequences_run_in_the_same_batches_as_without_prefetching(case: Case):
    """As long as the end of each batch is reported at once, and instances live.

    Without preferred sizes smaller than the largest batch: an instance that is idle for a moment makes such batches.
    """
    policy, script = case
    plays = [Play(policy, prefetches=prefetches) for prefetches in (True, False)]
    for kind, pick in script:
        if kind in {"arrive", "end", "cancel", "pass time", "drain"}:
            for play in plays:
                play.perform(kind, pick)
        prefetching, usual = plays
        assert prefetching.played.begun == usual.played.begun
        assert prefetching.played.failed == usual.played.failed
        assert prefetching.left == usual.left
