"""The errors of a fetch. `store_errors` has the meaning of a store's responses."""

import re

from halimede_spec.fetch_exit import FetchExit

MAX_CAUSE_CHARS = 300
_QUERY = re.compile(r"\?\S+")


class FetchError(Exception):
    """A fetch failed: the exit code, and a text with the root cause and a way to fix it."""

    def __init__(self, code: FetchExit, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class TransientError(Exception):
    """The store failed in a way that may succeed on another try."""


class ChangedError(Exception):
    """An object differs from the listed one."""


def cause_of(error: object) -> str:
    """The operating system's text of an error. If it has none, its class and its own text, without queries of
    addresses, which may have signatures."""
    if system := getattr(error, "strerror", None):
        return str(system)
    text = _QUERY.sub("?...", str(error))[:MAX_CAUSE_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
