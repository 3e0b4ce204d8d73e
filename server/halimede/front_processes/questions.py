"""What a front-end process asks the core besides inferences, and what it knows of the models from earlier answers.

Nothing here waits for the core, which may hang: answers come by callbacks, or are awaited.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.reader import ServerGoneError
from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError, unavailable
from halimede.facade.lookup import ModelLookup
from halimede.front_processes.asks import MODEL, AnswerT, AnyQuestion, Question, Ts, decode_told, encode_ask, told_of
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.page import Page

MAX_KNOWN_MODELS = 4096
"""Versions of models, and names that are asked for. Above it, all are asked again."""

MAX_UNANSWERED = 4096
"""Questions without an answer. A core that hangs answers none, while clients come and go."""

_MAX_NUMBER = (1 << 32) - 1

OnTold = Callable[[AnswerT | InferenceError], None]


class Questions:
    """ASK frames, and the TOLD frames that answer them. All methods are called on the event loop's thread.

    Questions raise InferenceError UNAVAILABLE when the core has ended, or leaves too many unanswered.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._asking: dict[int, tuple[AnyQuestion, Callable[[Any], None]]] = {}
        """By the number of the ask: the question, and what gets the answer or the error."""
        self._asked = 0
        channel.handle(FrontFrame.TOLD, self._on_told)

    def __repr__(self) -> str:
        return f"<Questions unanswered={len(self._asking)}>"

    async def ask(self, question: Question[*Ts, AnswerT], *arguments: *Ts) -> AnswerT:
        """The core's answer. InferenceError."""
        told: asyncio.Future[AnswerT | InferenceError] = asyncio.get_running_loop().create_future()

        def on_told(found: AnswerT | InferenceError) -> None:
            if not told.done():
                told.set_result(found)

        self.send(question, arguments, on_told)
        found = await told
        if isinstance(found, InferenceError):
            raise found
        return found

    def send(self, question: Question[*Ts, AnswerT], arguments: tuple[*Ts], on_told: OnTold[AnswerT]) -> None:
        """Ask; `on_told` is called later, and must not raise. InferenceError."""
        if len(self._asking) >= MAX_UNANSWERED:
            text = f"the server has not answered {MAX_UNANSWERED} questions of this front end, try again later"
            raise unavailable(text)
        self._asked = number = self._asked % _MAX_NUMBER + 1
        try:
            self._channel.send(encode_ask(number, question, arguments))
        except ServerGoneError:
            raise unavailable("the server has ended") from None
        self._asking[number] = question, on_told

    def _on_told(self, body: memoryview) -> None:
        number, document = decode_told(body)
        question, on_told = self._asking.pop(number)
        on_told(told_of(question, document))


class KnownModels:
    """The models that serve, as far as they were asked for since the last change that the page counts."""

    def __init__(self, questions: Questions, page: Page) -> None:
        self._questions = questions
        self._page = page
        self._changes = page.changes
        self._models: dict[tuple[str, str], ModelView | ModelLookup] = {}
        """What serves, as of `_changes`, or is asked for."""
        self._views: dict[tuple[str, str], ModelView] = {}
        """Every view that the core sent."""

    def __repr__(self) -> str:
        return f"<KnownModels models={len(self._models)} views={len(self._views)}>"

    def find(self, name: str, version: str) -> ModelView | ModelLookup:
        """As `facade.server.Server.model`."""
        key = name, version
        changes = self._page.changes
        if changes != self._changes or len(self._models) > MAX_KNOWN_MODELS:
            # Answers to earlier questions may be older than the change: they are for those that wait for them already.
            self._changes = changes
            self._models.clear()
            if len(self._views) > MAX_KNOWN_MODELS:
                self._views.clear()
        found = self._models.get(key)
        if found is None:
            found = ModelLookup()
            self._questions.send(MODEL, key, partial(self._on_told, key, found))
            self._models[key] = found
        return found

    def _on_told(self, key: tuple[str, str], lookup: ModelLookup, found: ModelView | InferenceError) -> None:
        """A model that did not change keeps its view, and with it what front ends have made from that. Errors are not
        kept: a model may begin to load without a change of what serves."""
        known = self._views.pop(key, None)
        is_newest = self._models.get(key) is lookup
        if not isinstance(found, InferenceError):
            found = self._views[key] = known if known is not None and known == found else found
            if is_newest:
                self._models[key] = found
        elif is_newest:
            del self._models[key]
        lookup.end(found)
