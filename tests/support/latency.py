"""Latency on a shared machine. Ordinary tests need one attempt within a loose limit; tests marked `load` check the goal
against the median of all attempts. `measure` gets a number that is unique in the process."""

from collections.abc import Callable
from itertools import count
from statistics import median

LOOSE_MS = 500.0
"""One attempt of a few is within this limit on any machine; a fault that adds a second is not."""

_numbers = count()


def quickest_ms(measure: Callable[[int], float], enough_ms: float = LOOSE_MS, attempts: int = 5) -> float:
    """The shortest of some attempts; stops at the first that is short enough."""
    best = float("inf")
    while attempts and best > enough_ms:
        best = min(best, measure(next(_numbers)))
        attempts -= 1
    return best


def median_ms(measure: Callable[[int], float], attempts: int = 9) -> float:
    """The median of some attempts."""
    times = [measure(next(_numbers)) for _ in range(attempts)]
    print("ms:", " ".join(f"{ms:.1f}" for ms in sorted(times)))
    return median(times)
