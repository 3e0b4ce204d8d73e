"""Inferences that a process requests, while they are in flight: of a model's code, or of a front end's clients.

Frames of the process are not trusted. A number that is in use, or an acknowledgement of answers that were not sent,
ends the connection. An unknown number is not an error: the final answer and the process's frame may have crossed.
"""

from collections.abc import Callable, Iterator

from halimede.channel.frames import FrameError, unpack
from halimede.channel.server_end.channel import Channel
from halimede.core.types import InferenceResponse
from halimede.inference_frames.kinds import CALL, TAKEN, InferenceFrame


class Inference:
    """One inference. `ticket` is 0 until it has begun; `batch` is the one whose code requested it, 0 for none."""

    __slots__ = ("batch", "number", "owner", "ticket", "untaken")

    def __init__(self, number: int, batch: int, owner: "Inferences") -> None:
        self.number = number
        self.batch = batch
        self.ticket = 0
        self.untaken = 0
        self.owner: Inferences | None = owner
        """None after the final answer or the process's end: the answering side must not keep the memory alive."""

    def answer(self, response: InferenceResponse) -> None:
        """Send an answer to the process. No effect after the final one, and after the end of the process."""
        owner = self.owner
        if owner is None:
            return
        if response.final:
            self.owner = None
        else:
            self.untaken += 1
        owner.answer(self, response)


class Inferences:
    """The inferences of one process, by its numbers. All methods are called on the event loop's thread."""

    def __init__(
        self,
        channel: Channel,
        cancel: Callable[[int], None],
        acknowledge: Callable[[int, int], None],
        send: Callable[[Inference, InferenceResponse], None],
    ) -> None:
        """`cancel` takes a ticket; `acknowledge` a ticket, and the number of answers that the process has taken."""
        self._cancel = cancel
        self._acknowledge = acknowledge
        self._send = send
        self._in_flight: dict[int, Inference] = {}
        channel.handle(InferenceFrame.CANCEL_CALL, self._on_cancel)
        channel.handle(InferenceFrame.TAKEN, self._on_taken)

    def __len__(self) -> int:
        return len(self._in_flight)

    def __iter__(self) -> Iterator[Inference]:
        return iter(list(self._in_flight.values()))

    def get(self, number: int) -> Inference | None:
        """The inference of this number, if it is in flight."""
        return self._in_flight.get(number)

    def add(self, number: int, batch: int = 0) -> Inference:
        """A new inference. FrameError if the number is in use."""
        if number in self._in_flight:
            raise FrameError(f"inference {number} twice")
        inference = self._in_flight[number] = Inference(number, batch, self)
        return inference

    def close(self) -> None:
        """Cancel all: the process has ended."""
        left, cancel = list(self._in_flight.values()), self._cancel
        self._in_flight.clear()
        # A reference cycle would keep the memory of the process mapped until the collector runs.
        self._cancel = self._acknowledge = self._send = _ignore
        for inference in left:
            inference.owner = None
            cancel(inference.ticket)

    def answer(self, inference: Inference, response: InferenceResponse) -> None:
        """Send an answer of an inference."""
        if response.final:
            self._in_flight.pop(inference.number, None)
        self._send(inference, response)

    def _on_cancel(self, body: memoryview) -> None:
        (number,) = unpack(CALL, body, InferenceFrame.CANCEL_CALL)
        inference = self._in_flight.get(number)
        if inference is not None:
            self._cancel(inference.ticket)

    def _on_taken(self, body: memoryview) -> None:
        number, responses = unpack(TAKEN, body, InferenceFrame.TAKEN)
        inference = self._in_flight.get(number)
        if inference is None:
            return
        if responses > inference.untaken:
            raise FrameError(f"{responses} answers of inference {number} taken, where {inference.untaken} were sent")
        inference.untaken -= responses
        self._acknowledge(inference.ticket, responses)


def _ignore(*_: object) -> None:
    """The process has ended."""
