"""The errors of a fetch. `store_errors` has the meaning of a store's responses."""

from halimede_spec.fetch_exit import FetchExit


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
