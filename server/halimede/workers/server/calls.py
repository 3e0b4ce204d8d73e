"""Inferences that the model's code requests, while they are in flight.

Frames of the worker are not trusted. A number that is in use, too many inferences, or an acknowledgement of answers
that were not sent ends the connection. An unknown number is not an error: the final answer and the worker's frame may
have crossed. Memory is bounded because the answering models wait for acknowledgements.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from halimede.core.types import InferenceResponse
from halimede.workers.frames.calls import Infer, decode_infer
from halimede.workers.frames.kinds import CALL, MAX_CALLS, TAKEN, FrameError, FrameKind, unpack
from halimede.workers.server.answers import AnswerSender
from halimede.workers.server.batches import SentBatches
from halimede.workers.server.channel import Channel
from halimede.workers.server.memory import Memory
from halimede.workers.server.tasks import Tasks
from halimede.workers.worker import BatchItem

OnResponse = Callable[[InferenceResponse], None]


class CallOwner(Protocol):
    """Starts and cancels the inferences, by ticket."""

    def on_infer(self, infer: Infer, items: Sequence[BatchItem] | None, on_response: OnResponse) -> int:
        """Start an inference and return its ticket. `on_response` gets every answer, possibly before the return.

        `items` is the batch whose code requested it, None if that batch has ended or is not known.
        """

    def on_answered(self) -> None:
        """The model's code was sent an answer."""

    def on_cancel_call(self, ticket: int, *, reads_on: bool = False) -> None:
        """Cancel an inference: its caller no longer needs it, or `reads_on` what a decoupled model still sends."""

    def on_taken(self, ticket: int, responses: int) -> None:
        """The model's code has received `responses` more answers, none of them final."""


class _Call:
    __slots__ = ("batch", "calls", "number", "ticket", "untaken")

    def __init__(self, number: int, batch: int, calls: "Calls") -> None:
        self.number = number
        self.batch = batch
        self.ticket = 0
        self.untaken = 0
        self.calls: Calls | None = calls
        """None after the final answer or the worker's end: the answering side must not keep the memory alive."""

    def answer(self, response: InferenceResponse) -> None:
        """Send an answer to the model's code."""
        calls = self.calls
        if calls is None:
            return
        if response.final:
            self.calls = None
        else:
            self.untaken += 1
        calls.answer(self.number, response)


class Calls:
    """The calls of one worker, by the worker's numbers. All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        batches: SentBatches,
        tasks: Tasks,
        model: str,
        is_decoupled: bool,
        owner: CallOwner,
    ) -> None:
        self._memory = memory
        self._batches = batches
        self._is_decoupled = is_decoupled
        self._owner = owner
        self._in_flight: dict[int, _Call] = {}
        self._answers = AnswerSender(channel, memory, tasks, f"the process of model '{model}'")
        channel.handle(FrameKind.INFER, self._on_infer)
        channel.handle(FrameKind.CANCEL_CALL, self._on_cancel)
        channel.handle(FrameKind.ASK_CANCEL_CALL, self._on_ask_cancel)
        channel.handle(FrameKind.TAKEN, self._on_taken)

    def __len__(self) -> int:
        return len(self._in_flight)

    def close(self) -> None:
        """Cancel all calls: the worker has ended."""
        self._answers.close()
        left = list(self._in_flight.values())
        self._in_flight.clear()
        for call in left:
            call.calls = None
            self._owner.on_cancel_call(call.ticket)

    def cancel_of(self, batch: int) -> None:
        """Cancel the inferences that this batch has requested: its results are no longer needed."""
        for call in [each for each in self._in_flight.values() if each.batch == batch]:
            self._owner.on_cancel_call(call.ticket)

    def _on_infer(self, body: memoryview) -> None:
        infer = decode_infer(body, self._memory.locate)
        if infer.wanted_bytes:
            self._memory.grow_outbound(infer.wanted_bytes)
        batches = self._batches
        batch = batches.get(infer.batch)
        if batch is None and not infer.batch and len(batches) == 1 and not self._is_decoupled:
            # A thread of the model requests it, and the only running batch most likely waits for that thread.
            (batch,) = batches.running
            infer.batch = batch.number
        number, in_flight = infer.number, self._in_flight
        if number in in_flight:
            raise FrameError(f"inference {number} twice")
        if len(in_flight) >= MAX_CALLS:
            raise FrameError(f"more than {MAX_CALLS} inferences at a time")
        call = in_flight[number] = _Call(number, infer.batch, self)
        call.ticket = self._owner.on_infer(infer, None if batch is None else batch.items, call.answer)

    def _on_cancel(self, body: memoryview) -> None:
        (number,) = unpack(CALL, body, FrameKind.CANCEL_CALL)
        call = self._in_flight.get(number)
        if call is not None:
            self._owner.on_cancel_call(call.ticket)

    def _on_ask_cancel(self, body: memoryview) -> None:
        (number,) = unpack(CALL, body, FrameKind.ASK_CANCEL_CALL)
        call = self._in_flight.get(number)
        if call is not None:
            self._owner.on_cancel_call(call.ticket, reads_on=True)

    def _on_taken(self, body: memoryview) -> None:
        number, responses = unpack(TAKEN, body, FrameKind.TAKEN)
        call = self._in_flight.get(number)
        if call is None:
            return
        if responses > call.untaken:
            raise FrameError(f"{responses} answers of inference {number} taken, where {call.untaken} were sent")
        call.untaken -= responses
        self._owner.on_taken(call.ticket, responses)

    def answer(self, number: int, response: InferenceResponse) -> None:
        """Send an answer to the inference of this number."""
        if response.final:
            self._in_flight.pop(number, None)
        self._answers.send(number, response)
        self._owner.on_answered()
