"""Inferences that the model's code requests, while they are in flight.

See `inference_frames.inferences` for what is checked; too many inferences end the connection as well. Memory is bounded
because the answering models wait for acknowledgements.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from halimede.channel.frames import FrameError, unpack
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.memory import Memory
from halimede.channel.server_end.tasks import Tasks
from halimede.core.types import InferenceResponse
from halimede.inference_frames.answers import AnswerSender
from halimede.inference_frames.calls import Infer, decode_infer
from halimede.inference_frames.inferences import Inference, Inferences
from halimede.inference_frames.kinds import CALL, InferenceFrame
from halimede.workers.connection.batches import SentBatches
from halimede.workers.frames.kinds import MAX_CALLS
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
        self._in_flight = Inferences(channel, owner.on_cancel_call, owner.on_taken, self._answer)
        self._answers = AnswerSender(channel, memory, tasks, f"the process of model '{model}'")
        channel.handle(InferenceFrame.INFER, self._on_infer)
        channel.handle(InferenceFrame.ASK_CANCEL_CALL, self._on_ask_cancel)

    def __len__(self) -> int:
        return len(self._in_flight)

    def close(self) -> None:
        """Cancel all calls: the worker has ended."""
        self._answers.close()
        self._in_flight.close()

    def cancel_of(self, batch: int) -> None:
        """Cancel the inferences that this batch has requested: its results are no longer needed."""
        for call in self._in_flight:
            if call.batch == batch:
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
        call = self._in_flight.add(infer.number, infer.batch)
        if len(self._in_flight) > MAX_CALLS:
            raise FrameError(f"more than {MAX_CALLS} inferences at a time")
        call.ticket = self._owner.on_infer(infer, None if batch is None else batch.items, call.answer)

    def _on_ask_cancel(self, body: memoryview) -> None:
        (number,) = unpack(CALL, body, InferenceFrame.ASK_CANCEL_CALL)
        call = self._in_flight.get(number)
        if call is not None:
            self._owner.on_cancel_call(call.ticket, reads_on=True)

    def _answer(self, call: Inference, response: InferenceResponse) -> None:
        self._answers.send(call.number, response)
        self._owner.on_answered()
