"""Finds the models of requests: at once, or by a wait that ends when the client leaves."""

from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import Server
from halimede.frontends.steps import Waiting

W = TypeVar("W", bound=Waiting)


class ModelFinder(Generic[W]):
    """Finds models for the requests of one front end. `on_crash` gets exceptions other than InferenceError."""

    __slots__ = ("_on_crash", "_server")

    def __init__(self, server: Server, on_crash: Callable[[W, Exception], None]) -> None:
        self._server = server
        self._on_crash = on_crash

    def find(
        self,
        client: W,
        name: str,
        version: str,
        use: Callable[[ModelView], None],
        on_error: Callable[[InferenceError], None],
    ) -> None:
        """Call `use` with the model's view, now or later. `on_error` gets why there is none, and what `use` raises."""
        try:
            found = self._server.model(name, version)
            if isinstance(found, ModelLookup):
                self.wait(found, client, use, on_error)
            else:
                use(found)
        except InferenceError as error:
            on_error(error)

    def wait(
        self,
        lookup: ModelLookup,
        client: W,
        use: Callable[[ModelView], None],
        on_error: Callable[[InferenceError], None],
    ) -> None:
        """Like `find`, for a model that is looked up."""
        client.on_gone = lookup.wait(partial(self._found, client, use, on_error))

    def _found(
        self,
        client: W,
        use: Callable[[ModelView], None],
        on_error: Callable[[InferenceError], None],
        found: ModelView | InferenceError,
    ) -> None:
        client.on_gone = None
        if not client.is_open:
            return
        try:
            if isinstance(found, InferenceError):
                on_error(found)
            else:
                use(found)
        except InferenceError as error:
            on_error(error)
        except Exception as error:  # noqa: BLE001 -- the other clients go on, and this one gets an answer
            self._on_crash(client, error)
