"""The wait for a model that is not known in this process yet."""

from collections.abc import Callable
from functools import partial

from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError

OnFound = Callable[[ModelView | InferenceError], None]


class ModelLookup:
    """One question after a model, and who waits for its answer. Everything runs on the event loop's thread."""

    __slots__ = ("_next", "_waiting")

    def __init__(self) -> None:
        self._next = 0
        self._waiting: dict[int, OnFound] = {}

    def __repr__(self) -> str:
        return f"<ModelLookup waiting={len(self._waiting)}>"

    def wait(self, on_found: OnFound) -> Callable[[], None]:
        """Call `on_found` later, with the view or with the error. It must not raise.

        Returns a function that ends this wait: `on_found` is then not called, and not kept.
        """
        self._next = number = self._next + 1
        self._waiting[number] = on_found
        return partial(self._leave, number)

    def end(self, found: ModelView | InferenceError) -> None:
        """The answer has come."""
        for number in list(self._waiting):
            # A client may leave while another one is answered.
            on_found = self._waiting.pop(number, None)
            if on_found is not None:
                on_found(found)

    def _leave(self, number: int) -> None:
        self._waiting.pop(number, None)
