"""How a fetch ended: the server's `halimede fetch` exits with these codes, and the operator reads them from the pod."""

from enum import IntEnum


class FetchExit(IntEnum):
    """Exit codes of `halimede fetch`. Programs distinguish reasons by these numbers, so they must never change."""

    DONE = 0
    BAD_PLAN = 2
    AUTH = 10
    NOT_FOUND = 11
    DIGEST = 12
    NO_SPACE = 13
    NOT_A_MODEL = 14
    UNREACHABLE = 15
    """The store did not answer. The next run retries until it does."""
    RECOVERED = 16
    """Not a failure: the store that an earlier run could not reach answers again. Another run continues."""


OF_CA_BUNDLE = "CA bundle"
"""Messages of failures that another CA bundle may repair have these words."""
