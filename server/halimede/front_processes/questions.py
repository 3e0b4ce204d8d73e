"""What a front-end process asks the core besides inferences, and what it knows of the models from earlier answers."""

import asyncio
from typing import Any

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError
from halimede.front_processes.asks import decode_told, encode_ask, error_of, result_of
from halimede.front_processes.page import Page
from halimede.workers.child.channel import Channel
from halimede.workers.child.reader import ServerGoneError
from halimede.workers.frames.kinds import FrameKind

MAX_KNOWN_MODELS = 4096
"""Versions of models, and names without a model, that are kept. Above it, all are asked again."""

_MAX_NUMBER = (1 << 32) - 1


class Questions:
    """ASK frames, and the TOLD frames that answer them. All methods are called on the event loop's thread.

    Questions raise InferenceError UNAVAILABLE when the core has ended.
    """

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._channel = channel
        self._loop = loop
        self._told: dict[int, tuple[bool, bytes]] = {}
        self._asking: dict[int, asyncio.Future[tuple[bool, bytes]] | None] = {}
        """Questions without an answer; those of `answer_now` without a future."""
        self._asked = 0
        channel.handle(FrameKind.TOLD, self._on_told)

    def ask_now(self, method: str, *arguments: Any) -> Any:
        """Call a method of `asks.AT_ONCE`. InferenceError."""
        return result_of(*self.answer_now(method, arguments))

    def answer_now(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, bytes]:
        """Wait for the answer without a turn of the loop: the core answers such a question at once."""
        number = self._send(method, arguments)
        self._asking[number] = None
        try:
            self._channel.wait_for(lambda: number in self._told)
        except ServerGoneError:
            raise _gone() from None
        return self._told.pop(number)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `asks.AWAITED`. InferenceError."""
        number = self._send(method, arguments)
        future = self._asking[number] = self._loop.create_future()
        return result_of(*await future)

    def _send(self, method: str, arguments: tuple[Any, ...]) -> int:
        self._asked = number = self._asked % _MAX_NUMBER + 1
        try:
            self._channel.send(encode_ask(number, method, arguments))
        except ServerGoneError:
            raise _gone() from None
        return number

    def _on_told(self, body: memoryview) -> None:
        number, is_result, pickled = decode_told(body)
        future = self._asking.pop(number, None)
        if future is None:
            self._told[number] = is_result, pickled
        elif not future.done():
            future.set_result((is_result, pickled))


def _gone() -> InferenceError:
    return InferenceError(ErrorCode.UNAVAILABLE, "the server has ended")


class KnownModels:
    """The models that serve, as far as they were asked for since the last change that the page counts."""

    def __init__(self, questions: Questions, page: Page) -> None:
        self._questions = questions
        self._page = page
        self._changes = page.changes
        self._models: dict[tuple[str, str], ModelView] = {}
        """What serves, as of `_changes`."""
        self._views: dict[tuple[str, str], tuple[bytes, ModelView]] = {}
        """Every view that the core sent, with its pickled form."""

    def find(self, name: str, version: str) -> ModelView:
        """As `runtime.server.Server.model`."""
        key = name, version
        changes = self._page.changes
        if changes != self._changes or len(self._models) > MAX_KNOWN_MODELS:
            self._changes = changes
            self._models.clear()
            if len(self._views) > MAX_KNOWN_MODELS:
                self._views.clear()
        view = self._models.get(key)
        if view is None:
            view = self._models[key] = self._ask(key)
        return view

    def _ask(self, key: tuple[str, str]) -> ModelView:
        """Ask the core. A model that did not change keeps its view, and with it what front ends have made from that.
        Errors are not kept: a model may begin to load without a change of what serves."""
        is_result, pickled = self._questions.answer_now("model", key)
        if not is_result:
            self._views.pop(key, None)
            raise error_of(pickled)
        known = self._views.get(key)
        if known is None or known[0] != pickled:
            known = self._views[key] = pickled, result_of(True, pickled)
        return known[1]
