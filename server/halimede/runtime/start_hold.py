"""Reads the environment variables with which tests of Triton hold back the executions of sequence models."""

from collections.abc import Mapping

from halimede.core.schedule.sequences.policy import StartHold

SEATED_VARIABLE = "TRITONSERVER_DELAY_SCHEDULER"
BACKLOGGED_VARIABLE = "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"


def start_hold(environment: Mapping[str, str]) -> StartHold | None:
    """The hold of sequence models; None if no variable is set to a positive number."""
    seated, backlogged = (_number(environment.get(name, "")) for name in (SEATED_VARIABLE, BACKLOGGED_VARIABLE))
    return StartHold(seated, backlogged) if seated or backlogged else None


def _number(text: str) -> int:
    """The value of a variable, 0 if it is not a number, as in Triton."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else 0
