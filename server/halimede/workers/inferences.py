"""The inferences that the code in one worker process asks of the server, while they are under way: the server's end.

What the worker says of them is not trusted: a number twice, more of them than may be, or answers taken that were not
sent, and it is given up. A number that is not known any more is no fault: its last answer and the worker's word may
have crossed. Memory is bounded by the models that answer, which wait for what they have sent to be taken.
"""

from collections.abc import Callable
from typing import Protocol

from halimede.core.types import InferenceResponse
from halimede.workers.frames import MAX_CALLS, FrameError, Infer

OnResponse = Callable[[InferenceResponse], None]
Send = Callable[[int, InferenceResponse], None]
"""An answer to the inference of this number."""


class Asker(Protocol):
    """Who has inferences made, by ticket."""

    def on_infer(self, infer: Infer, slot: int | None, on_response: OnResponse) -> int:
        """The model asks for an inference; returns its ticket. `on_response` gets every answer, perhaps before that.

        `slot` is where the batch runs that it is made from, None when that is over or not known.
        """

    def on_told(self) -> None:
        """The model's code was sent an answer."""

    def on_cancel_call(self, ticket: int) -> None:
        """Nobody waits for it any more."""

    def on_taken(self, ticket: int, responses: int) -> None:
        """So many more of its answers, none of them final, were taken."""

    def on_held_up(self, ticket: int, slot: int | None) -> None:
        """It turned out that the batch in `slot` waits for it, or, where that is None, all that the process does."""

    def on_let_go(self, ticket: int) -> None:
        """What it held up goes on."""


class _Inference:
    __slots__ = ("_all", "batch", "holds_up", "number", "ticket", "untaken")

    def __init__(self, number: int, batch: int, of: "Inferences") -> None:
        self.number = number
        self.batch = batch
        self.ticket = 0
        self.untaken = 0
        self.holds_up = False
        self._all = of

    def answer(self, response: InferenceResponse) -> None:
        """Send an answer on."""
        its = self._all
        if response.final:
            its.under_way.pop(self.number, None)
        else:
            self.untaken += 1
            if self.holds_up:
                self.holds_up = False
                its.asker.on_let_go(self.ticket)
        its.send(self.number, response)
        its.asker.on_told()


class Inferences:
    """By the numbers that the worker gave them. All methods are called on the event loop's thread."""

    def __init__(self, asker: Asker, send: Send) -> None:
        self.asker = asker
        self.send = send
        self.under_way: dict[int, _Inference] = {}

    def __len__(self) -> int:
        return len(self.under_way)

    def begin(self, infer: Infer, slot: int | None) -> None:
        """FrameError."""
        number = infer.number
        if number in self.under_way:
            raise FrameError(f"inference {number} twice")
        if len(self.under_way) >= MAX_CALLS:
            raise FrameError(f"more than {MAX_CALLS} inferences at a time")
        inference = self.under_way[number] = _Inference(number, infer.batch, self)
        inference.ticket = self.asker.on_infer(infer, slot, inference.answer)

    def cancel(self, number: int) -> None:
        inference = self.under_way.get(number)
        if inference is not None:
            self.asker.on_cancel_call(inference.ticket)

    def hold_up(self, number: int, slot: int | None) -> None:
        inference = self.under_way.get(number)
        if inference is not None:
            inference.holds_up = True
            self.asker.on_held_up(inference.ticket, slot)

    def take(self, number: int, responses: int) -> None:
        """FrameError."""
        inference = self.under_way.get(number)
        if inference is None:
            return
        if responses > inference.untaken:
            raise FrameError(f"{responses} answers of inference {number} taken, where {inference.untaken} were sent")
        inference.untaken -= responses
        self.asker.on_taken(inference.ticket, responses)

    def cancel_of(self, batch: int) -> None:
        """Nobody waits for what this batch was to become."""
        for inference in [each for each in self.under_way.values() if each.batch == batch]:
            self.asker.on_cancel_call(inference.ticket)

    def close(self) -> None:
        """The worker is gone: nobody waits for anything."""
        # Those that are still to be answered must not hold on to what the worker was.
        self.send = _nowhere
        left = list(self.under_way.values())
        self.under_way.clear()
        for inference in left:
            if inference.holds_up:
                self.asker.on_let_go(inference.ticket)
            self.asker.on_cancel_call(inference.ticket)


def _nowhere(number: int, response: InferenceResponse) -> None:
    """There is nobody to answer."""
