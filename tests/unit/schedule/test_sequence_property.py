"""Sequence schedulers under random events: a slow, obvious model must agree, and invariants must hold."""

from collections import defaultdict
from copy import copy

import pytest
from hypothesis import given, settings

from halimede.core.schedule.actions import Action, Execute, Fail, Slot, Warn
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import InferenceError
from support.examples import drawn, examples
from support.sequence_requests import direct, in_sequence, oldest
from support.slow_sequences import SlowSequences

IDLE = 6
KINDS: dict[str, SequencePolicy] = {
    "direct": direct(idle_ns=IDLE),
    "direct with a delay": direct(3, delay_ns=4, utilization=0.6, idle_ns=IDLE),
    "oldest": oldest(3, 2, idle_ns=IDLE),
    "oldest with a delay": oldest(4, 3, preferred=(2,), delay_ns=4, idle_ns=IDLE),
    "iterative": oldest(3, 2, idle_ns=IDLE, iterative=True),
    "iterative direct": SequencePolicy("m", 2, 2, idle_ns=IDLE, iterative=True),
}
SLOTS = tuple(Slot(instance) for instance in range(3))
EVENTS = (
    *("enqueue",) * 8,
    *("poll",) * 4,
    *("complete",) * 5,
    *("wait", "wait", "cancel", "cancel gone", "again", "again", "lose", "lose unread", "add", "add", "drain"),
)
FLAGS = ("S", "S", "", "", "", "E", "SE")
SCRIPTS = drawn(lambda draws: draws.script(EVENTS, 20, 60), 250)


class Play:
    def __init__(self, policy: SequencePolicy) -> None:
        self.policy = policy
        self.fast, self.slow = SequenceScheduler(policy), SlowSequences(policy)
        self.now = 0
        self.requests: dict[int, Pending] = {}
        self.outcome: dict[int, str] = {}
        """How each accepted request has left the scheduler for ever."""
        self.running: dict[Slot, Execute] = {}
        self.slots: set[Slot] = set()
        self.cancelled: set[int] = set()
        self.order: dict[int | str, list[int]] = defaultdict(list)
        """The keys of each correlation id in the order in which they were executed first."""
        self.sequence_slot_of: dict[int, tuple[Slot, int]] = {}
        self.holder: dict[tuple[Slot, int], int] = {}
        """The last request that had START at each sequence slot."""
        self.actions: list[Action] = []
        self.started: dict[int, int] = {}
        """By key: the request with START that its sequence began with, when it was executed."""

    def perform(self, event: str, pick: int) -> None:
        slot = SLOTS[pick % len(SLOTS)]
        match event:
            case "enqueue":
                self.enqueue(pick)
            case "poll":
                self.poll()
            case "complete" | "again" if slot in self.running:
                self.complete(slot, pick if event == "again" and self.policy.iterative else 0)
            case "wait":
                self.poll()
                wake_at = self.fast.wake_at()
                if wake_at is not None:
                    if wake_at > self.now:
                        assert self.fast.poll(wake_at - 1) == []
                    self.now = max(self.now, wake_at)
                    self.poll()
            case "cancel" | "cancel gone":
                self.cancel(pick % (len(self.requests) + 1))
            case "lose" | "lose unread" if slot in self.slots:
                self.lose(slot, is_unread=event == "lose unread")
            case "add" if slot not in self.slots:
                self.slots.add(slot)
                self.fast.add_slot(slot)
                self.slow.add_slot(slot)
            case "drain" if pick % 4 == 0:
                keys = self.fast.drain()
                assert keys == self.slow.drain()
                for key in keys:
                    self.leave(key, "drained")

    def enqueue(self, pick: int) -> None:
        key = len(self.requests) + 1
        flags = "SE" if self.policy.iterative else FLAGS[pick // 8 % len(FLAGS)]
        correlation: int | str = key if self.policy.iterative else (1, 2, 3, 4, "a", "b")[pick // 64 % 6]
        timeout_us = 1 if pick // 512 % 8 == 0 else 0
        pending = in_sequence(key, correlation, flags, shape=pick // 4096 % 4 == 0, timeout_us=timeout_us)
        self.requests[key] = pending
        # Each has its own record: an iterative request loses START when it runs again.
        results = []
        for scheduler in (self.fast, self.slow):
            try:
                scheduler.enqueue(copy(pending), self.now)
                results.append("")
            except InferenceError as error:
                results.append(error.message)
        assert results[0] == results[1]
        if results[0]:
            self.outcome[key] = "refused"

    def poll(self) -> None:
        actions = [*self.fast.poll(self.now)]
        self.actions += actions
        assert by_slot(actions) == by_slot(self.slow.poll(self.now))
        assert self.fast.poll(self.now) == [], "the second poll has nothing to do"
        assert (self.fast.queued, self.fast.wake_at()) == (self.slow.queued, self.slow.wake_at())
        for action in actions:
            match action:
                case Execute(slot, keys, sequence_slots):
                    self.execute(slot, keys, sequence_slots)
                    self.running[slot] = action
                case Fail(key):
                    self.leave(key, "failed")
                case Warn(text):
                    assert "has a conflict" in text
        self.now += 1

    def execute(self, slot: Slot, keys: tuple[int, ...], sequence_slots: tuple[int, ...]) -> None:
        assert slot not in self.running, "two batches at one instance"
        assert 0 < len(keys) <= self.policy.max_batch_size
        assert len({self.requests[key].compatible for key in keys}) == 1
        assert len(set(sequence_slots)) == len(sequence_slots) == len(keys)
        assert max(sequence_slots) < self.policy.sequence_slots
        for key, sequence_slot in zip(keys, sequence_slots, strict=True):
            assert key not in self.outcome, "executed after it left"
            held_slot, first = (slot, sequence_slot), key not in self.sequence_slot_of
            assert key not in {each for batch in self.running.values() for each in batch.requests}
            if self.requests[key].sequence_start and first:
                self.holder[held_slot] = key
            begin = self.holder[held_slot]
            assert self.requests[begin].correlation == self.requests[key].correlation, (
                "the sequence slot is another sequence's"
            )
            assert self.sequence_slot_of.get(key, held_slot) == held_slot, (
                "an iterative request keeps its sequence slot"
            )
            self.started[key] = begin
            if first:
                earlier = self.order[self.requests[key].correlation]
                assert all(each < key for each in earlier if self.started[each] == begin), "order in its sequence"
                earlier.append(key)
            self.sequence_slot_of[key] = held_slot

    def complete(self, slot: Slot, again: int) -> None:
        batch = self.running.pop(slot)
        outcomes = []
        for at, key in enumerate(batch.requests):
            if key in self.cancelled:
                outcomes.append(Outcome.GONE)
            elif again >> at & 1:
                outcomes.append(Outcome.AGAIN)
                continue
            else:
                outcomes.append(Outcome.DONE)
            self.leave(key, "executed")
        self.fast.completed(slot, 1, outcomes)
        self.slow.completed(slot, outcomes)

    def cancel(self, key: int) -> None:
        was_queued = self.fast.try_cancel(key)
        assert was_queued == self.slow.try_cancel(key)
        self.cancelled.add(key)
        if was_queued:
            self.leave(key, "cancelled")

    def lose(self, slot: Slot, *, is_unread: bool) -> None:
        self.slots.remove(slot)
        batch = self.running.pop(slot, None)
        keys = batch.requests if batch is not None else ()
        unread = [[self.requests[key] for key in keys if key not in self.cancelled]] if is_unread else []
        again = self.fast.remove_slot(slot, unread, self.now)
        assert again == self.slow.remove_slot(slot, unread, self.now)
        for key in keys:
            if key in again:
                self.sequence_slot_of.pop(key)
                self.order[self.requests[key].correlation].remove(key)
            else:
                self.leave(key, "lost")

    def leave(self, key: int, how: str) -> None:
        assert key not in self.outcome, f"{key} left as {self.outcome[key]} and as {how}"
        self.outcome[key] = how

    def wind_up(self) -> None:
        """Every slot runs until nothing is queued or executing; every idle sequence ends."""
        for slot in SLOTS:
            self.perform("add", SLOTS.index(slot))
        self.poll()
        for _ in range(500):
            for slot in [*self.running]:
                self.complete(slot, 0)
            self.poll()
            if (wake_at := self.fast.wake_at()) is not None:
                self.now = max(self.now, wake_at)
            elif not self.running and not self.fast.queued:
                break
        self.now += 500
        self.poll()
        assert self.outcome.keys() == self.requests.keys()
        assert (self.fast.queued, self.fast.wake_at()) == (0, None)
        assert "assigned=0 backlog=0" in repr(self.fast), "all sequence slots are free again"


def by_slot(actions: list[Action]) -> tuple[list[Action], list[Execute]]:
    """The batches of different slots have no order."""
    batches = [each for each in actions if isinstance(each, Execute)]
    return [each for each in actions if not isinstance(each, Execute)], sorted(batches, key=lambda each: each.slot)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(script=SCRIPTS)
def test_the_scheduler_agrees_with_a_slow_model(kind: str, script: list[tuple[str, int]]) -> None:
    play = Play(KINDS[kind])
    for instance in range(2):
        play.perform("add", instance)
    for event, pick in script:
        play.perform(event, pick)
    play.wind_up()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20), deadline=None)
@given(script=SCRIPTS)
def test_the_same_events_give_the_same_actions(kind: str, script: list[tuple[str, int]]) -> None:
    plays = [Play(KINDS[kind]), Play(KINDS[kind])]
    for play in plays:
        play.perform("add", 0)
        for event, pick in script:
            play.perform(event, pick)
    assert plays[0].actions == plays[1].actions
