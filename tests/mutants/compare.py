"""The table of two records: what was detected before and after a change of the tests."""

from collections.abc import Mapping, Sequence

from mutants.find import Mutant
from mutants.record import GONE, KILLED, SURVIVED, Row


def table(mutants: Sequence[Mutant], before: Mapping[str, Row], after: Mapping[str, Row]) -> tuple[str, bool]:
    """The table, and whether all that was killed before is killed after, or gone with its code.

    "killed" is by `make test`, "test-all" by `make test-all` alone.
    """
    lost, later, gone, lines = [], [], [], []
    by_outcome: dict[tuple[str, str], int] = {}
    for mutant in mutants:
        then, now = (_outcome(rows.get(mutant.id)) for rows in (before, after))
        by_outcome[then, now] = by_outcome.get((then, now), 0) + 1
        if then == KILLED and now != KILLED:
            {GONE: gone, "test-all": later}.get(now, lost).append(mutant)
    lines += ["before     after      mutants"]
    lines += [f"{then:10} {now:10} {count:7}" for (then, now), count in sorted(by_outcome.items())]
    for title, those in (
        ("Killed before, not after", lost),
        ("Killed by make test-all alone", later),
        ("Their code is gone", gone),
    ):
        if those:
            lines += ["", f"{title}:"]
            lines += [f"{describe(each)}; before by {before[each.id].killer}" for each in those]
    survivors = [each for each in mutants if _outcome(before.get(each.id)) == SURVIVED]
    if survivors:
        lines += ["", "Survived before:", *map(describe, survivors)]
    return "\n".join(lines), not lost


def describe(mutant: Mutant) -> str:
    return f"{mutant.id} {mutant.file}, {mutant.symbol}: {mutant.text}  ->  {mutant.replacement}"


def _outcome(row: Row | None) -> str:
    if row is None:
        return "not run"
    return "test-all" if row.outcome == KILLED and row.target != "make test" else row.outcome
