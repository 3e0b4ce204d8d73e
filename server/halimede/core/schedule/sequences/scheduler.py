"""The scheduler of sequence models, for both strategies, and for iterative sequences.

- A request with START begins a sequence, which gets a sequence slot, or waits in the backlog for one. It keeps the
  sequence slot, and so its instance, until it ends.
- The requests of a sequence run in the order of their arrival, one at a time.
- END is the last request: its correlation id is free as soon as the request is queued, its sequence slot when it has
  run.
- START on the id of a live sequence is accepted with a warning: the new sequence continues on the same sequence slot,
  after the requests that are queued there.
- A sequence that has a sequence slot ends when none of its requests was queued or executing for the idle time. The time
  begins with the poll after its last execution. It is zero once no more requests are expected. Once few are expected,
  it is a second at most while others wait for a sequence slot.
- When a sequence leaves its sequence slot, the instance is told to drop the state (`Forget`), before the first
  execution of the next one there.
- If a request is cancelled, the sequence ends, because the model's state lacks the request: all its queued requests are
  cancelled, too.
- If the new state of a request cannot be kept, its sequence ends, and its queued requests fail.
- A slot that is removed loses the state of its sequences. A sequence whose next request has START needs no state: it
  returns to the front of the backlog. All others are lost: their queued requests fail, and until the idle time is over
  a request without START gets an error that explains it.
- A request of an iterative model is a sequence of its own. Its model may request another execution; the request is then
  queued again at once, on the same sequence slot, and may share the next batch with new requests. Its age begins again.

A slot runs one batch at a time. With the oldest strategy its next one is prefetched (`core.schedule.prefetch`): the
requests of the two are of different sequences, so neither needs the other's outcomes.

A poll looks only at the instances with a request that may run, never at all sequences.
"""

from collections.abc import Collection, Sequence

from halimede.core.schedule.actions import Action, Execute, Fail, Forget, Slot, Warn
from halimede.core.schedule.prefetch import TakeBack
from halimede.core.schedule.scheduler import Outcome, Pending
from halimede.core.schedule.sequences.admission import (
    CANCELLED,
    EXPIRED,
    check_request,
    conflict,
    ended,
    lost_state,
    missing_start,
    queue_full,
)
from halimede.core.schedule.sequences.backlog import Backlog
from halimede.core.schedule.sequences.idle import IdleSequences
from halimede.core.schedule.sequences.ids import SequenceIds
from halimede.core.schedule.sequences.live import LiveSequence, QueuedRequest
from halimede.core.schedule.sequences.policy import DirectPolicy, SequencePolicy
from halimede.core.schedule.sequences.sequence_slots import SequenceSlots
from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason, SequenceCount


class SequenceScheduler:
    """A `Scheduler`. It starts with one slot of each of the instances 0 to `instances` - 1."""

    # Requests have deadlines, but an `enqueue` that adds one asks for a poll.
    may_expire = False
    follows_outcomes = True

    def __init__(
        self,
        policy: SequencePolicy,
        instances: int = 0,
        take_back: TakeBack | None = None,
        ids: SequenceIds | None = None,
    ) -> None:
        """Without `take_back` no batch is prefetched; without `ids`, the ids are not counted."""
        self.max_batch_size = policy.max_batch_size
        self.is_iterative = policy.iterative
        self.has_null_rows = isinstance(policy.strategy, DirectPolicy)
        self._policy = policy
        self._ids = ids
        self._hold = policy.hold
        # A request of an iterative model is open in its worker when it runs again, which cannot be taken back.
        self._slots = SequenceSlots(policy, None if policy.iterative else take_back)
        for instance in range(instances):
            self._slots.add(Slot(instance))
        self._open: dict[int | str, LiveSequence] = {}
        """The sequences that take more requests, by correlation id. The others still run their last ones."""
        self._queued: dict[int, QueuedRequest] = {}
        """By key, in the order in which they were queued."""
        self._running: dict[int, QueuedRequest] = {}
        self._size_bytes = 0
        self._backlog = Backlog()
        self._idle = IdleSequences(policy.idle_ns)
        self._executed: list[LiveSequence] = []
        """Sequences with an execution that has ended since the last poll."""
        self._due: list[Action] = []
        """Actions for the next poll."""
        self._forgotten: list[Action] = []
        """Sequence slots whose states are to be dropped before the next execution."""

    def __repr__(self) -> str:
        slots = self._slots.by_slot.values()
        running = sum(bool(each.batch) for each in slots)
        return (
            f"<SequenceScheduler queue={self.queued} running={running}/{len(slots)} assigned={self._slots.assigned} "
            f"backlog={len(self._backlog)}>"
        )

    def enqueue(self, pending: Pending, now_ns: int) -> int | None:
        """See `Scheduler`. Raises INVALID_ARG for a request that fits no sequence."""
        check_request(pending, self._policy)
        live = None if self.is_iterative else self._live(pending)
        count, size_bytes = len(self._queued), self._size_bytes + pending.size_bytes
        if count >= self._policy.max_queue_size or (count and size_bytes > self._policy.max_queue_bytes):
            raise queue_full()
        if live is None:
            sequence = self._begin(pending)
        else:
            sequence = live
            self._idle.discard(sequence)
            if pending.sequence_start:
                self._due.append(Warn(conflict(pending.correlation, self._policy)))
        if not (pending.sequence_end or self.is_iterative):
            self._open[pending.correlation] = sequence
        elif live is not None:
            del self._open[pending.correlation]

        queued = self._queued[pending.key] = QueuedRequest(pending, now_ns, sequence)
        self._size_bytes = size_bytes
        sequence.queue.append(queued)
        slot = sequence.slot
        if slot is None:
            if pending.timeout_us:
                self._backlog.expire_at(sequence, now_ns + pending.timeout_us * 1000)
                return 1
            if self._idle.expects_few:
                return 1
        elif sequence.running is None:
            self._slots.make_eligible(sequence, now_ns)
        acts = self._due or self._hold is not None or slot in self._slots.ready
        return 1 if acts else None

    def try_start(self, batch_size: int, timeout_us: int = 0) -> Slot | None:  # noqa: ARG002
        """None: a request has a sequence, which only `enqueue` gets."""
        return None

    def poll(self, now_ns: int) -> Sequence[Action]:
        actions, self._due = self._due, []
        for sequence in self._backlog.due(now_ns):
            actions += self._fail(sequence, EXPIRED, FailureReason.EXPIRED)
        if self._executed:
            self._follow_up(now_ns)
        for sequence in self._idle.pop_due(now_ns, others_wait=bool(self._backlog)):
            self._close(sequence)
        if self._forgotten:
            actions += self._forgotten
            self._forgotten = []
        while self._backlog and self._slots.has_room:
            sequence = self._backlog.pop_first()
            self._slots.assign(sequence)
            self._slots.make_eligible(sequence, now_ns)
        if self._is_held():
            return actions
        for entry in [*self._slots.ready.values()]:
            if not entry.batch:
                entry.batch = entry.batcher.take(now_ns)
                if not entry.batch:
                    continue
                actions.append(_execute(entry.slot, entry.batch))
                self._run(entry.batch)
            if entry.batcher.can_prefetch():
                actions.append(_execute(entry.slot, entry.batcher.prefetch()))
            del self._slots.ready[entry.slot]
        return actions

    def wake_at(self) -> int | None:
        """See `Scheduler`. Returns 0, which is in the past, when `poll` has an action now."""
        times = [self._backlog.next_deadline(), self._idle.next_end(others_wait=bool(self._backlog))]
        if self._hold is None:
            times += [entry.batcher.ready_at() for entry in self._slots.ready.values() if not entry.batch]
        return min((at for at in times if at is not None), default=None)

    def try_cancel(self, key: int) -> bool:
        """See `Scheduler`. The next poll fails the queued requests of the same sequence, also if this one executes."""
        request = self._queued.get(key) or self._running.get(key)
        if request is None:
            return False
        fails = self._fail(request.sequence, CANCELLED, FailureReason.CANCELED)
        self._due += [fail for fail in fails if fail.request != key]
        return key not in self._running

    def awaited_slot(self, key: int) -> Slot | None:
        """See `Scheduler`. A sequence that has a sequence slot is executed at its instance only."""
        request = self._queued.get(key)
        return None if request is None else request.sequence.slot

    def completed(self, slot: Slot, took_ns: int, outcomes: Sequence[Outcome] = ()) -> int | None:  # noqa: ARG002
        """See `Scheduler`. Ignored for a slot that was removed meanwhile."""
        entry = self._slots.by_slot.get(slot)
        if entry is None or not entry.batch:
            return None
        batch = self._slots.end(entry)
        self._run(entry.batch)
        for sequence, outcome in zip(batch, outcomes or [Outcome.DONE] * len(batch), strict=True):
            request, sequence.running = sequence.running, None
            if request is not None:
                del self._running[request.pending.key]
                self._end_of(request, sequence, outcome)
        return 1

    def add_slot(self, slot: Slot) -> None:
        self._slots.add(slot)

    def remove_slot(self, slot: Slot, unread: Sequence[Sequence[Pending]], now_ns: int) -> Collection[int]:
        entry = self._slots.remove(slot)
        if entry is None:
            return ()
        self._run(entry.batcher.end())
        not_begun = {pending.key for batch in unread for pending in batch}
        again: list[int] = []
        returned: list[LiveSequence] = []
        for sequence in entry.assigned.values():
            sequence.slot, sequence.is_eligible = None, False
            request, sequence.running = sequence.running, None
            if request is not None:
                del self._running[request.pending.key]
                # The requests of a cancelled sequence are not delivered again.
                if request.pending.key in not_begun and request.pending.sequence_start and not sequence.is_closed:
                    again.append(request.pending.key)
                    self._queue_again(request, sequence)
            if sequence.queue and sequence.queue[0].pending.sequence_start:
                returned.append(sequence)
            else:
                self._lose(sequence, now_ns)
        returned.sort(key=_age)
        self._backlog.put_back(returned)
        return again

    def expect_few(self, now_ns: int) -> None:
        """See `Scheduler`. While others wait for a sequence slot, the idle time is shorter."""
        self._idle.expect_few(now_ns)
        self._slots.end_delays()

    def expect_no_more(self) -> None:
        """See `Scheduler`. Idle sequences cannot continue: they give their sequence slots to the backlog."""
        self._hold = None
        self._idle.expect_no_more()
        self._slots.end_delays()

    def drain(self) -> Sequence[int]:
        """See `Scheduler`. A sequence that loses a request has ended."""
        for entry in self._slots.by_slot.values():
            self._run(entry.batcher.preempt())
        keys = [*self._queued]
        for request in [*self._queued.values()]:
            if not request.sequence.is_closed:
                self._close(request.sequence)
        return keys

    @property
    def queued(self) -> int:
        return len(self._queued)

    def sequences(self) -> SequenceCount | None:
        if self.is_iterative:
            return None
        return SequenceCount(self._slots.assigned + len(self._backlog), self._slots.sequence_slots)

    def oldest_enqueued_at(self) -> int | None:
        return next((queued.enqueued_at for queued in self._queued.values()), None)

    def _live(self, pending: Pending) -> LiveSequence | None:
        """The live sequence that the request continues; None if it begins one, which START must say."""
        sequence = self._open.get(pending.correlation)
        if pending.sequence_start:
            return None if sequence is None or sequence.is_lost else sequence
        if sequence is None:
            raise missing_start(pending.correlation, self._policy)
        if sequence.is_lost:
            raise lost_state(pending.correlation, self._policy)
        return sequence

    def _begin(self, pending: Pending) -> LiveSequence:
        """A new sequence, which has a sequence slot unless others wait for one. INVALID_ARG or UNAVAILABLE for its
        id."""
        id_bytes = 0 if self._ids is None else self._ids.take(pending.correlation, self._policy.model)
        lost = None if self.is_iterative else self._open.pop(pending.correlation, None)
        if lost is not None:
            self._idle.discard(lost)
            self._free(lost)
        sequence = LiveSequence(pending.correlation, id_bytes=id_bytes)
        if self._slots.has_room and not self._backlog:
            self._slots.assign(sequence)
        else:
            self._backlog.append(sequence)
        return sequence

    def _run(self, batch: Sequence[LiveSequence]) -> None:
        """The first queued request of each sequence executes.

        That of a prefetched batch may be known to execute, because its sequence was closed meanwhile.
        """
        for sequence in batch:
            if sequence.is_eligible:
                request = sequence.running = sequence.queue.popleft()
                sequence.is_eligible = False
                self._running[request.pending.key] = request
                self._unqueue(request)

    def _end_of(self, request: QueuedRequest, sequence: LiveSequence, outcome: Outcome) -> None:
        """A request of a sequence was executed."""
        if sequence.is_closed:
            self._free(sequence)
        elif outcome is Outcome.GONE:
            self._due += self._fail(sequence, CANCELLED, FailureReason.CANCELED)
        elif outcome is Outcome.ENDED:
            self._due += self._fail(sequence, ended(sequence.correlation, self._policy), FailureReason.REJECTED)
        elif outcome is Outcome.AGAIN and self.is_iterative:
            request.pending.sequence_start = False
            self._queue_again(request, sequence)
            self._executed.append(sequence)
        elif request.pending.sequence_end or self.is_iterative:
            self._close(sequence)
        else:
            self._executed.append(sequence)

    def _follow_up(self, now_ns: int) -> None:
        """The next requests of sequences that have ended an execution may run. Those without one begin to be idle."""
        executed, self._executed = self._executed, []
        for sequence in executed:
            if sequence.is_closed or sequence.slot is None:
                continue
            if sequence.queue:
                if self.is_iterative:
                    # It waits again since its last execution has ended.
                    sequence.queue[0].enqueued_at = now_ns
                self._slots.make_eligible(sequence, now_ns)
            elif sequence.running is None:
                self._idle.add(sequence, now_ns)

    def _queue_again(self, request: QueuedRequest, sequence: LiveSequence) -> None:
        sequence.queue.appendleft(request)
        self._queued[request.pending.key] = request
        self._size_bytes += request.pending.size_bytes

    def _unqueue(self, request: QueuedRequest) -> None:
        del self._queued[request.pending.key]
        self._size_bytes -= request.pending.size_bytes

    def _fail(self, sequence: LiveSequence, error: InferenceError, reason: FailureReason) -> list[Fail]:
        """End a sequence. Its queued requests get an error."""
        return [Fail(request.pending.key, error, reason) for request in self._close(sequence)]

    def _close(self, sequence: LiveSequence) -> list[QueuedRequest]:
        """End a sequence: it gets no more requests. Returns its queued requests, which are no longer queued.

        Its sequence slot is free when none of its requests executes.
        """
        if self._open.get(sequence.correlation) is sequence:
            del self._open[sequence.correlation]
        self._idle.discard(sequence)
        if sequence in self._backlog:
            self._backlog.remove(sequence)
        elif sequence.is_eligible and not self._slots.try_make_ineligible(sequence):
            # Its first request has begun.
            self._run([sequence])
        requests = [*sequence.queue]
        sequence.queue.clear()
        for request in requests:
            self._unqueue(request)
        sequence.is_closed = True
        if sequence.running is None:
            self._free(sequence)
        return requests

    def _free(self, sequence: LiveSequence) -> None:
        """The sequence leaves its sequence slot, if it has one, and gives back its id."""
        if sequence.id_bytes and self._ids is not None:
            self._ids.held.give_back(sequence.id_bytes)
            sequence.id_bytes = 0
        if sequence.slot is not None:
            if self._policy.keeps_state:
                self._forgotten.append(Forget(sequence.slot, sequence.sequence_slot))
            self._slots.free(sequence.slot, sequence.sequence_slot)
            sequence.slot = None

    def _lose(self, sequence: LiveSequence, now_ns: int) -> None:
        """The sequence has lost its state."""
        is_open = self._open.get(sequence.correlation) is sequence
        # One that is remembered keeps its id.
        id_bytes, sequence.id_bytes = (sequence.id_bytes, 0) if is_open else (0, sequence.id_bytes)
        self._due += self._fail(sequence, lost_state(sequence.correlation, self._policy), FailureReason.BACKEND)
        if is_open:
            sequence.is_lost = True
            sequence.id_bytes = id_bytes
            self._open[sequence.correlation] = sequence
            self._idle.add(sequence, now_ns)

    def _is_held(self) -> bool:
        """Whether the hold for tests lasts. It ends once."""
        if self._hold is not None:
            backlogged = self._backlog.count_requests()
            if backlogged >= self._hold.backlogged and self.queued - backlogged >= self._hold.assigned:
                self._hold = None
        return self._hold is not None


def _execute(slot: Slot, batch: Sequence[LiveSequence]) -> Execute:
    keys = tuple([sequence.queue[0].pending.key for sequence in batch])
    return Execute(slot, keys, tuple([sequence.sequence_slot for sequence in batch]))


def _age(sequence: LiveSequence) -> tuple[int, int]:
    first = sequence.queue[0]
    return first.enqueued_at, first.pending.key
