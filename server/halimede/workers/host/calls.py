"""Inferences that the model's code requests from the server: the worker's end.

| state of a call | its answers |
|---|---|
| not sent, because MAX_CALLS calls are in flight | none: the call is sent when its first answer is requested |
| in flight | kept until the model's code receives them; any thread may read them from the channel |
| ended | the rest can still be received |

Each call in flight has one record in a table, and one handle in the model's code. If the handle is collected before the
final answer has arrived, the call is cancelled. The child of a fork sends nothing: the calls belong to its parent.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import asyncio
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from enum import IntEnum

from halimede.channel.frames import encode_frame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.reader import ServerGoneError
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse, invalid, unsupported
from halimede.inference_frames.calls import decode_call_answer, encode_infer
from halimede.inference_frames.kinds import CALL, TAKEN, InferenceFrame
from halimede.inference_frames.tensors import Locate, Store
from halimede.workers.frames.kinds import MAX_CALLS

batch_of_task: ContextVar[int] = ContextVar("batch_of_task", default=0)
"""The batch that this task, or the main thread, executes; 0 on the threads that a model starts."""

TAKEN_TOGETHER = 8
"""Maximum answers that one acknowledgement covers, while more of them wait to be received."""

_forks = 0
"""The number of forks between the process that loaded this module and this one."""


def _note_fork() -> None:
    global _forks  # noqa: PLW0603  the state of the process
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)

_Waiter = tuple["asyncio.Future[None]", asyncio.AbstractEventLoop, int]


class _Record:
    """One call. Before it is sent, `number` is 0 and `request` is the request to send, then None."""

    __slots__ = (
        "answers",
        "batch",
        "cancellation",
        "has_ended",
        "is_dropped",
        "number",
        "request",
        "unacknowledged",
        "waiters",
    )

    def __init__(self, request: InferenceRequest, batch: int) -> None:
        self.number = 0
        self.request: InferenceRequest | None = request
        self.batch = batch
        # A list, because a deque takes half a KiB, and there are few answers at a time.
        self.answers: list[InferenceResponse] = []
        self.has_ended = False
        """The final answer has arrived."""
        self.cancellation: IntEnum | None = None
        self.is_dropped = False
        """The handle was collected: answers are dropped."""
        self.unacknowledged = 0
        """The number of answers that were received and not acknowledged."""
        self.waiters: list[_Waiter] = []

    def has_answer(self) -> bool:
        return bool(self.answers) or self.has_ended


class Calls:
    """All calls of this process. Thread-safe."""

    def __init__(self, channel: Channel, store: Store, locate: Locate, take_wanted: Callable[[], int]) -> None:
        """`store` and `locate`: see `inference_frames.tensors`; a located block counts as retained. `take_wanted`
        returns the bytes that did not fit into the arena, to be reported now."""
        self._channel = channel
        self._store = store
        self._locate = locate
        self._take_wanted = take_wanted
        self._in_flight: dict[int, _Record] = {}
        self._last = 0
        self._lock = threading.Lock()
        self._waiting_for_room: list[_Waiter] = []
        self._forks = _forks
        self._is_gone = False
        channel.handle(InferenceFrame.CALL_ANSWER, self._on_answer)
        channel.on_gone = self._on_gone

    def __repr__(self) -> str:
        return f"<Calls {len(self._in_flight)} in flight>"

    def infer(self, request: InferenceRequest) -> "InferenceCall":
        """See `hosting.Host.infer`."""
        if self._forks != _forks:
            self._check_process()
        record = _Record(request, batch_of_task.get())
        self._try_send(record)
        return InferenceCall(self, record)

    def _check_process(self) -> None:
        if self._forks != _forks:
            raise unsupported("only the process that hosts a model can call other models, not one that it has forked")

    def _try_send(self, record: _Record) -> bool:
        """Send the call unless it is sent. False while MAX_CALLS calls are in flight. InferenceError if it cannot be
        sent at all."""
        with self._lock:
            request = record.request
            if request is None:
                return True
            if len(self._in_flight) >= MAX_CALLS:
                return False
            record.request = None
            number = self._last = self._last % 0xFFFFFFFF + 1
            while number in self._in_flight:
                number = self._last = self._last % 0xFFFFFFFF + 1
            self._in_flight[number] = record
        try:
            frame = encode_infer(number, record.batch, request, self._store, self._take_wanted)
        except BaseException as error:
            del self._in_flight[number]
            self._wake_for_room()
            if not isinstance(error, (ValueError, TypeError, OverflowError, struct.error)):
                raise
            raise invalid(f"a request for model '{request.model_name:.100}' cannot be sent: {error}") from error
        record.number = number
        self._channel.send(frame)
        self._send_cancellation(record)
        return True

    def _send_delayed(self, record: _Record) -> bool:
        """Send a call that could not be sent at first. If that fails, the call ends with the error."""
        try:
            return self._try_send(record)
        except InferenceError as error:
            self._end(record, error)
            return True

    def wait(self, record: _Record) -> None:
        """Block until the call has an answer or has ended, or until a delayed call may be sent."""
        if self._forks != _forks:
            self._check_process()
        if record.request is not None and not self._send_delayed(record):
            self._channel.wait_for(self._has_room)
            return
        self._channel.wait_for(record.has_answer)

    async def wait_async(self, record: _Record) -> None:
        """The same, without blocking the running loop."""
        self._check_process()
        if record.request is None or self._send_delayed(record):
            await self._wait_on_loop(record.waiters, record.has_answer)
            return
        try:
            await self._wait_on_loop(self._waiting_for_room, self._has_room)
        finally:
            # Each call that ends wakes one waiter. This one may be cancelled, so another one has to be woken.
            if self._has_room():
                self._wake_for_room()

    def _has_room(self) -> bool:
        return len(self._in_flight) < MAX_CALLS

    async def _wait_on_loop(self, waiters: list[_Waiter], has_come: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future(), loop, threading.get_ident()
        waiters.append(waiter)
        try:
            # It may have arrived before the waiter was added.
            if not has_come() and not self._is_gone:
                with self._channel.reading_on(loop):
                    await waiter[0]
        finally:
            with suppress(ValueError):
                waiters.remove(waiter)
        if self._is_gone:
            raise ServerGoneError

    def take(self, record: _Record) -> InferenceResponse | None:
        """The next answer that has arrived, None if there is none yet."""
        if not record.answers:
            return None
        try:
            response = record.answers.pop(0)
        except IndexError:
            return None  # another thread was faster
        if not response.final:
            with self._lock:
                record.unacknowledged += 1
                acknowledges = not record.has_ended and (record.unacknowledged >= TAKEN_TOGETHER or not record.answers)
                count = record.unacknowledged
                if acknowledges:
                    record.unacknowledged = 0
            if acknowledges:
                self._channel.send(encode_frame(InferenceFrame.TAKEN, TAKEN.pack(record.number, count)))
        return response

    def cancel(self, record: _Record, *, reads_on: bool) -> None:
        """See `hosting.Call.cancel`."""
        with self._lock:
            request, record.request = record.request, None
        if request is not None:
            self._end(record, InferenceError(ErrorCode.CANCELLED, "request was cancelled"))
            return
        record.cancellation = InferenceFrame.ASK_CANCEL_CALL if reads_on else InferenceFrame.CANCEL_CALL
        self._send_cancellation(record)

    def _send_cancellation(self, record: _Record) -> None:
        if record.cancellation is not None and record.number and not record.has_ended:
            self._channel.send(encode_frame(record.cancellation, CALL.pack(record.number)))

    def _end(self, record: _Record, error: InferenceError) -> None:
        """End a call that was not sent with an error."""
        record.answers.append(InferenceResponse("", "", error=error))
        record.has_ended = True
        while record.waiters:
            _wake(record.waiters)

    def drop(self, record: _Record) -> None:
        """Cancel a call whose handle was collected. Takes no lock: finalizers may interrupt any code."""
        record.is_dropped = True
        record.answers.clear()
        if record.number and not record.has_ended:
            self._channel.send_later(encode_frame(InferenceFrame.CANCEL_CALL, CALL.pack(record.number)))

    def _on_answer(self, body: memoryview) -> None:
        # Decoded even if the call was dropped: the blocks are given back when their views are freed.
        number, response = decode_call_answer(body, self._locate)
        record = self._in_flight.get(number)
        if record is None:
            return
        if not record.is_dropped:
            record.answers.append(response)
        if response.final:
            record.has_ended = True
            self._in_flight.pop(number, None)
            if self._waiting_for_room:
                self._wake_for_room()
        while record.waiters:
            _wake(record.waiters)

    def _wake_for_room(self) -> None:
        if self._waiting_for_room:
            _wake(self._waiting_for_room)

    def _on_gone(self) -> None:
        self._is_gone = True
        for waiters in (self._waiting_for_room, *(record.waiters for record in list(self._in_flight.values()))):
            while waiters:
                _wake(waiters)


def _wake(waiters: list[_Waiter]) -> None:
    """Wake the first of these waiters."""
    try:
        future, loop, thread = waiters.pop(0)
    except IndexError:
        return  # another thread was faster
    if thread == threading.get_ident():
        _settle(future)
        return
    with suppress(RuntimeError):  # the waiter's loop has ended
        loop.call_soon_threadsafe(_settle, future)


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class InferenceCall:
    """Implements `hosting.Call`."""

    __slots__ = ("__weakref__", "_calls", "_record")

    def __init__(self, calls: Calls, record: _Record) -> None:
        self._calls = calls
        self._record = record

    def __repr__(self) -> str:
        return f"<InferenceCall {self._record.number or 'not sent'}>"

    def __del__(self) -> None:
        if not self._record.has_ended:
            self._calls.drop(self._record)

    def receive(self) -> InferenceResponse | None:
        """See `hosting.Call`."""
        calls, record = self._calls, self._record
        while not record.answers or (response := calls.take(record)) is None:
            # In this order: the final answer is added before `has_ended` is set.
            if record.has_ended and not record.answers:
                return None
            calls.wait(record)
        return response

    async def receive_async(self) -> InferenceResponse | None:
        """See `hosting.Call`."""
        calls, record = self._calls, self._record
        while (response := calls.take(record)) is None:
            if record.has_ended and not record.answers:
                return None
            await calls.wait_async(record)
        return response

    def cancel(self, *, reads_on: bool = False) -> None:
        """See `hosting.Call`."""
        self._calls.cancel(self._record, reads_on=reads_on)
