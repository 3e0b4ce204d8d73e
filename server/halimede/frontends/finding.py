"""Finds the models of requests: at once, or by a wait that ends when the client leaves."""

from collections.abc import Callable
from functools import partial

from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import Server
from halimede.frontends.steps import Waiting

Use = Callable[[ModelView], None]
"""What is done with a model. It may raise InferenceError."""

OnError = Callable[[InferenceError], None]


def find_model(server: Server, client: Waiting, name: str, version: str, use: Use, on_error: OnError) -> None:
    """Call `use` with the view of the model, now or later. `on_error` gets the error of the search or of `use`."""
    try:
        found = server.model(name, version)
        if isinstance(found, ModelLookup):
            wait_for_model(found, client, use, on_error)
        else:
            use(found)
    except InferenceError as error:
        on_error(error)


def wait_for_model(lookup: ModelLookup, client: Waiting, use: Use, on_error: OnError) -> None:
    """Like `find_model`, for a model that is looked up. Other exceptions of `use` break off the request."""
    client.on_gone = lookup.wait(partial(_found, client, use, on_error))


def _found(client: Waiting, use: Use, on_error: OnError, found: ModelView | InferenceError) -> None:
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
        client.break_off(error)
