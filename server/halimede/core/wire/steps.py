"""Work in steps, between which other tasks run."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[int, None, T]
"""Work in steps: iterate, and let other tasks run between steps; the result is the generator's return value.

A step yields the number of bytes that the work additionally holds, or is about to hold; 0 if it adds little.
"""


def run(steps: Steps[T]) -> T:
    """Execute all steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
