"""The requests of one process: in its running batches, or open after their batch until their final answer."""

import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from halimede.backends.hosting import Answer, WorkerSpec
from halimede.channel.frames import FrameError
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import InferenceError
from halimede.workers.connection.batches import SentBatch
from halimede.workers.frames.answers import Done, Response
from halimede.workers.frames.kinds import WINDOW_RESPONSES
from halimede.workers.supervision.limits import TimeLimits
from halimede.workers.supervision.spinner import Spinner
from halimede.workers.worker import (
    NO_PARAMETERS,
    BatchDone,
    BatchItem,
    BatchTimes,
    OnEvent,
    Outputs,
    Parameters,
    ResponseSent,
    Worker,
)

log = logging.getLogger(__name__)

Sent = dict[int, tuple[int, int, list[BatchItem]]]
"""Batches by number: when each was sent, in monotonic nanoseconds, 0 if its slot ran another one; its slot; its
requests."""


class _Opened(NamedTuple):
    """A request whose batch ended before its final answer."""

    batch: int
    first: int
    """The first request of that batch."""
    sent_ns: int


class Requests:
    """Implements `connection.batches.BatchOwner`: checks answers and reports them as events of the worker, on the
    loop."""

    def __init__(
        self,
        worker: Worker,
        spec: WorkerSpec,
        checker: ReplyChecker,
        has_rows: bool,
        reschedules: bool,
        sent: Sent,
        spinner: Spinner,
        limits: TimeLimits,
        on_event: OnEvent,
    ) -> None:
        """`has_rows`: each answer has as many rows as its request. `reschedules`: the model may request another
        execution."""
        self._worker = worker
        self._model = spec.model
        self._version = spec.version
        self._checker = checker
        self._has_rows = has_rows
        self._reschedules = reschedules
        self._sent = sent
        self._spinner = spinner
        self._limits = limits
        self._on_event = on_event
        self._items: dict[int, BatchItem] = {}
        """All requests, by key."""
        self._opened: dict[int, _Opened] = {}
        """Requests whose batches ended before their final answers, by key."""
        self._again: dict[int, int] = {}
        """By sequence slot, the key of the request that is executed again. The pump has it until it comes back. If
        another request comes to the sequence slot, the pump has ended it."""
        self._untaken: dict[int, int] = {}
        """Answers of a request that its client has not taken yet, by key."""

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: int) -> bool:
        return key in self._items

    def add(self, items: list[BatchItem]) -> None:
        """Add requests that are sent to the process now."""
        for item in items:
            if self._again and (key := self._again.pop(item.sequence_slot, None)) is not None:
                self._opened.pop(key, None)
                if key != item.key:
                    self._items.pop(key, None)
                    self._untaken.pop(key, None)
            self._items[item.key] = item

    def acknowledge(self, key: int, responses: int) -> None:
        """The client has received `responses` more answers."""
        self._untaken[key] = self._untaken.get(key, 0) - responses

    def awaited_of(self, batch: int) -> list[tuple[BatchItem, int]]:
        """The open requests of a batch that has ended, each with the first request of its batch; if it has none, all
        requests of the process. Cancelled open requests are left out, because no client waits for them."""
        opened = self._opened
        keys = [key for key, each in opened.items() if each.batch == batch] or list(self._items)
        firsts = {item.key: sent[2][0].key for sent in self._sent.values() for item in sent[2]}
        firsts |= {key: each.first for key, each in opened.items()}
        return [
            (self._items[key], firsts[key])
            for key in keys
            if key in firsts and not (key in opened and self._items[key].cancelled)
        ]

    def cancelled_batch(self, key: int) -> int | None:
        """The batch of this request if all of its requests are cancelled or answered, else None."""
        opened = self._opened.get(key)
        number = self._batch_of(key) if opened is None else opened.batch
        keys = [each for each, other in self._opened.items() if other.batch == number]
        if number in self._sent:
            keys += [item.key for item in self._sent[number][2]]
        is_unneeded = all(key not in self._items or self._items[key].cancelled for key in keys)
        return number if is_unneeded else None

    def _batch_of(self, key: int) -> int:
        """The number of the running batch that has this request, 0 if none has it."""
        return next((number for number, sent in self._sent.items() if any(item.key == key for item in sent[2])), 0)

    def on_done(self, batch: SentBatch, done: Done) -> None:
        """See `connection.batches.BatchOwner`."""
        if done.again and not self._reschedules:
            raise FrameError("DONE: another execution, which the model is not configured to request")
        sent_ns, _, _ = self._sent.pop(batch.number, _NEVER)
        if self._limits:
            self._limits.end(batch.number, [number for number, each in self._sent.items() if each[1] == batch.slot])
        items, untaken = self._items, self._untaken
        replies: list[Outputs | InferenceError | None] = []
        parameters: dict[int, Parameters] = {}
        for item, reply in zip(batch.items, done.replies, strict=True):
            key = item.key
            if reply is None:
                replies.append(None)
                if key in items:
                    self._opened[key] = _Opened(batch.number, batch.items[0].key, sent_ns)
                continue
            items.pop(key, None)
            if untaken:
                untaken.pop(key, None)
            if isinstance(reply, InferenceError):
                replies.append(reply)
                continue
            if reply.parameters:
                parameters[len(replies)] = reply.parameters
            replies.append(self._checked(item, reply))
        for at in done.again:
            item = batch.items[at]
            if item.key in items:
                self._again[item.sequence_slot] = item.key
        times = _times(sent_ns, *done.times)
        self._spinner.last_took_ns = times.end - times.start
        self._on_event(
            BatchDone(self._worker, batch.items, replies, times, done.failed, batch.slot, parameters, done.again)
        )

    def on_response(self, response: Response) -> None:
        """See `connection.batches.BatchOwner`."""
        key, reply = response.key, response.reply
        item = self._items.get(key)
        if item is None:
            return  # its client has disconnected, or it has had its final answer
        opened = self._opened.get(key)
        sent_ns = self._sent.get(self._batch_of(key), _NEVER)[0] if opened is None else opened.sent_ns
        times = _times(sent_ns, response.times[0], *response.times)
        if response.final:
            del self._items[key]
            self._untaken.pop(key, None)
            self._opened.pop(key, None)
        else:
            untaken = self._untaken[key] = self._untaken.get(key, 0) + 1
            if untaken > WINDOW_RESPONSES:
                raise FrameError(f"{untaken} answers of one request while its client has taken none of them")
        parameters = reply.parameters if isinstance(reply, Answer) else NO_PARAMETERS
        checked = self._checked(item, reply) if isinstance(reply, Answer) else reply
        self._on_event(ResponseSent(self._worker, key, checked, response.final, times, parameters))

    def take_back(self, batch: SentBatch) -> None:
        """The batch did not begin: the pump has its requests again."""
        del self._sent[batch.number]
        self.forget([item.key for item in batch.items])

    def forget(self, keys: Collection[int]) -> None:
        """Remove requests that the process has not read: the pump owns them again."""
        for key in keys:
            self._items.pop(key, None)

    def fail(self, batches: Sequence[SentBatch], failure: InferenceError) -> None:
        """Fail these batches and all open requests: the process has ended. The pump fails those that it has again."""
        for key in self._again.values():
            self._items.pop(key, None)
        self._again.clear()
        for batch in batches:
            times = _times(self._sent.get(batch.number, _NEVER)[0], 0, 0, time.monotonic_ns())
            for item in batch.items:
                self._items.pop(item.key, None)
            replies: list[Outputs | InferenceError | None] = [failure] * len(batch.items)
            self._on_event(BatchDone(self._worker, batch.items, replies, times, True, batch.slot))
        for key in list(self._items):
            del self._items[key]
            opened = self._opened.get(key)
            times = _times(0 if opened is None else opened.sent_ns, 0, 0, time.monotonic_ns())
            self._on_event(ResponseSent(self._worker, key, failure, True, times))
        # All at once, because the connection has dropped a batch whose DONE frame was invalid. The next process numbers
        # its batches from 1 again.
        self._sent.clear()
        self._untaken.clear()
        self._opened.clear()
        self._limits.clear()

    def _checked(self, item: BatchItem, reply: Answer) -> Outputs | InferenceError:
        checker = self._checker
        try:
            return checker.check(reply.outputs, item.request.form.outputs, item.rows if self._has_rows else None)
        except InferenceError as error:
            return error.with_traceback(None)
        finally:
            if checker.warnings:
                self._warn(checker.warnings)

    def _warn(self, warnings: list[str]) -> None:
        for text in warnings:
            log.warning(
                "model '%s': %s", self._model, text, extra={"model": self._model, "version": str(self._version)}
            )
        warnings.clear()


_NEVER: tuple[int, int, list[BatchItem]] = 0, 0, []
"""The entry for an unknown batch."""


def _times(sent_ns: int, received: int, begun: int, ended: int) -> BatchTimes:
    """The times of a batch. Times from the worker are not trusted, so they are clamped into ascending order.

    A batch that the process got while another one ran has no `sent_ns`: it begins when the process takes it up.
    """
    now = time.monotonic_ns()
    start = sent_ns or received
    if 0 < start <= begun <= ended <= now:
        return BatchTimes(start, begun, ended, now)
    start = sent_ns or now
    input_end = min(max(begun, start), now)
    output_start = min(max(ended, input_end), now)
    return BatchTimes(start, input_end, output_start, now)
