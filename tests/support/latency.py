"""How late something is, on a machine that others use: tests in CI are content with one quick attempt, tests marked
`load` want the goal itself, of most attempts. What is measured is told a number that no other attempt has."""

from collections.abc import Callable
from itertools import count
from statistics import median

LOOSE_MS = 500.0
"""What one attempt of a few keeps on any machine, and nothing that comes a second late."""

_numbers = count()


def quickest_ms(measure: Callable[[int], float], enough_ms: float = LOOSE_MS, attempts: int = 5) -> float:
    """The quickest of some attempts; the first that is quick enough is the last."""
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
