"""Draws mutants by a seed: so many of each room of the product, as many of each kind as there are."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mutants.find import Kind, Mutant


@dataclass(frozen=True, slots=True)
class Quota:
    """So many mutants whose file matches `files`, and whose symbol or text matches `words`."""

    count: int
    files: str
    words: str = ""


SERVER, OPERATOR = "server/halimede", "operator/halimede_operator"

QUOTAS = (
    # What a test misses most easily: durations of statistics, limits, deadlines, recovery.
    Quota(7, f"{SERVER}/(core/observe/stats|core/types/stat|runtime|inference_frames|processes|workers)", r"_ns\b"),
    Quota(9, f"{SERVER}/(core|runtime|channel|inference_frames|processes|workers|frontends|fetch|front_processes)", r"^_?(MAX|MOST|LONGEST)_[A-Z_]+$"),
    Quota(4, f"{SERVER}/(runtime|channel|inference_frames|processes|workers|frontends|fetch|front_processes)", r"^_?[A-Z_]+_(S|SECS|SECONDS|MS)$"),
    Quota(9, f"{SERVER}/(core|runtime|channel|inference_frames|processes|workers|frontends)", r"(?i)deadline|timeout|expire|stall"),
    Quota(9, f"{SERVER}/(core/restarts|runtime|channel|inference_frames|processes|workers|fetch|front_processes)", r"(?i)restart|retr(y|ies)|again|gone|crash|lost|ended|abandon"),
    Quota(5, f"{OPERATOR}/(reconcile|cluster|api_server|handlers|lease|queue|core/process/workqueue)", r"(?i)retry|again|expire|lost|fail|resume|stale"),
    # Each room of the product.
    Quota(26, f"{SERVER}/core/"),
    Quota(15, f"{OPERATOR}/(metrics_api/)?core/"),
    Quota(14, f"{SERVER}/runtime/"),
    Quota(12, f"{SERVER}/(channel|inference_frames|processes|workers)/"),
    Quota(12, f"{SERVER}/frontends/"),
    Quota(9, f"{SERVER}/fetch/"),
    Quota(8, f"{SERVER}/backends/"),
    Quota(4, f"{SERVER}/front_processes/"),
    Quota(7, f"{OPERATOR}/(reconcile|cluster|api_server|handlers|lease|queue)"),
)  # fmt: skip


def draw(
    candidates: Iterable[Mutant], seed: int, quotas: Iterable[Quota], is_usable: Callable[[Mutant], bool]
) -> list[Mutant]:
    """At most one mutant of each function or constant."""
    rng = random.Random(seed)
    shuffled = sorted(candidates, key=lambda each: (each.file, each.symbol, each.text, each.index, each.replacement))
    rng.shuffle(shuffled)
    drawn: list[Mutant] = []
    for quota in quotas:
        fitting = [each for each in shuffled if _fits(each, quota)]
        for _ in range(quota.count):
            taken = {(each.file, each.symbol) for each in drawn}
            by_kind = Counter(each.kind for each in drawn)
            order = sorted(fitting, key=lambda each: by_kind[each.kind])
            free = (each for each in order if (each.file, each.symbol) not in taken)
            chosen = next((each for each in free if is_usable(each)), None)
            if chosen is None:
                break
            drawn.append(chosen)
    return drawn


def _fits(mutant: Mutant, quota: Quota) -> bool:
    if not re.match(quota.files, mutant.file):
        return False
    return bool(re.search(quota.words, mutant.symbol) or re.search(quota.words, mutant.text))


def kinds(mutants: Iterable[Mutant]) -> dict[Kind, int]:
    return Counter(each.kind for each in mutants)
