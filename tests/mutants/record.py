"""Finds the test that kills each mutant, and writes what was found after each, so that a run can go on later."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mutants.apply import Position, effects, locate
from mutants.find import Mutant
from mutants.reach import CLUSTER, STAGES, TEST, TEST_ALL, UNIT, Reach, Stage, groups, measure
from mutants.runs import End, Run, Runner
from mutants.tree import say

TIMES = 3
"""A run that takes so many times as long as without the mutant is ended, and counts as failed."""

START_S = 40
"""To start pytest and import the product, on a busy machine."""

UNKNOWN_S = 60
"""A file of tests that were not measured."""

KILLED, SURVIVED, GONE = "killed", "survived", "gone"
IN_CLUSTERS = "operator/"


@dataclass(frozen=True, slots=True)
class Row:
    mutant: str
    outcome: str
    killer: str = ""
    how: str = ""
    seconds: float = 0.0
    """Of the run that killed it."""
    unsure: tuple[str, ...] = ()
    """Tests that failed once with the mutant, but not again, or without it too."""
    ran: tuple[str, ...] = ()
    """Files of which the tests that reach it did not kill it."""
    left: tuple[str, ...] = ()
    """Files that reach it but were not run, because they take too long."""
    target: str = TEST


def read(path: Path) -> dict[str, Row]:
    """The last row of each mutant."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lists = ("unsure", "ran", "left")
    return {row["mutant"]: Row(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in rows}


@dataclass(slots=True)
class Recorder:
    runner: Runner
    mutants: Sequence[Mutant]
    path: Path
    known: Mapping[str, Row]
    """Rows of an earlier record: their killers are tried first."""
    seconds: dict[str, float]
    """Of tests, without mutants."""
    rows: dict[str, Row] = field(default_factory=dict)
    positions: dict[Mutant, Position] = field(default_factory=dict)
    _clean: dict[str, bool] = field(default_factory=dict)
    _stage: Stage = STAGES["rest"]

    def __post_init__(self) -> None:
        self.rows = read(self.path)
        sources = self.runner.tree.sources()
        for mutant in self.mutants:
            if position := locate(mutant, sources):
                self.positions[mutant] = position
            elif mutant.id not in self.rows:
                self._write(Row(mutant.id, GONE))

    def known_killers(self) -> None:
        """Try the killers of the earlier record."""
        for mutant in self._alive():
            killer = self.known[mutant.id].killer if mutant.id in self.known else ""
            row = self._row(mutant)
            if killer and killer not in row.ran and (self.runner.tree.root / killer.partition("::")[0]).exists():
                self.seconds.setdefault(killer, self.known[mutant.id].seconds)
                self._kill(mutant, [killer], [killer.partition("::")[0]], [killer] if "::" in killer else [])

    def stage(self, name: str, budget_s: float) -> None:
        """Run the tests of a stage that reach each mutant: of each group of files as many as fit in `budget_s` seconds."""
        alive = self._alive()
        self._stage = STAGES[name]
        if self._stage.target == TEST_ALL:
            alive = [each for each in alive if each.id in self.known and self.known[each.id].outcome == KILLED]
        for group in groups(self.runner.tree.root, name):
            alive = [each for each in alive if self._is_alive(each)]
            if alive:
                reach = Reach({}, [], {})
                for files in group:
                    reach |= self._measured(name, files, alive)
                self.seconds |= reach.seconds
                if name == "unit":
                    self._clean |= {test: True for test in reach.seconds if test not in reach.failed}
                for mutant in alive:
                    self._group(mutant, reach.tests_by_file(mutant.id), budget_s)

    def _group(self, mutant: Mutant, by_file: Mapping[str, list[str]], budget_s: float) -> None:
        costs = {file: sum(map(self._cost, tests)) for file, tests in by_file.items()}
        left = [file for file in by_file if file + self._stage.label not in self._row(mutant).ran]
        left.sort(key=lambda file: costs[file])
        chosen: list[str] = []
        while left and sum(costs[file] for file in (*chosen, left[0])) <= budget_s:
            chosen.append(left.pop(0))
        for files in [chosen] if self._stage.at_once and chosen else [[file] for file in chosen]:
            labels = [file + self._stage.label for file in files]
            if self._kill(mutant, labels, files, [test for file in files for test in by_file[file]]):
                return
        row = self._row(mutant)
        all_left = tuple(sorted(set(row.left) - by_file.keys() | set(left)))
        if all_left != row.left:
            self._write(replace(row, left=all_left))

    def _kill(self, mutant: Mutant, labels: Sequence[str], files: list[str], tests: list[str]) -> bool:
        """Run the tests with the mutant; write a row, with the labels if nothing kills it."""
        row = self._row(mutant)
        ran = tuple(dict.fromkeys((*row.ran, *labels)))
        unsure = set(row.unsure)
        while True:
            without = unsure | {test for test, passes in self._clean.items() if not passes}
            with self.runner.tree.mutated(mutant, self.positions[mutant]):
                run = self._run(files, tests, without)
            if run.end is End.PASSED:
                self._write(replace(row, outcome=SURVIVED, unsure=tuple(sorted(unsure)), ran=ran))
                return False
            if self._confirm(mutant, run):
                found = replace(row, outcome=KILLED, killer=run.test, how=run.end, left=(), target=self._stage.target)
                self._write(replace(found, seconds=round(run.seconds, 1)))
                return True
            if run.test in without or "::" not in run.test:
                self._write(replace(row, outcome=SURVIVED, unsure=(*sorted(unsure), run.test), ran=ran))
                return False
            unsure.add(run.test)

    def _confirm(self, mutant: Mutant, run: Run) -> bool:
        """The test passes without the mutant, alone, and fails with it again; unit tests fail for the same each time."""
        if not self._passes_clean(run.test):
            return False
        if run.test.startswith(UNIT) and run.end is not End.TIMEOUT:
            return True
        with self.runner.tree.mutated(mutant, self.positions[mutant]):
            return self._run_alone(run.test).end is not End.PASSED

    def _passes_clean(self, test: str) -> bool:
        if test not in self._clean:
            run = self._run_alone(test)
            self._clean[test] = run.end is End.PASSED
            self.seconds.setdefault(test, run.seconds)
            if not self._clean[test]:
                say(f"{test} fails without a mutant: {run.end}")
        return self._clean[test]

    def _run_alone(self, test: str) -> Run:
        """Run a test, or a file that cannot be read."""
        return self._run([test.partition("::")[0]], [test] if "::" in test else [])

    def _run(self, files: list[str], tests: Collection[str], without: Collection[str] = ()) -> Run:
        """Run all or some tests of the files in the way of the stage."""
        how = self._stage
        cost_s = sum(map(self._cost, tests or files))
        limit_s = TIMES * how.times * cost_s + START_S
        return self.runner.run(
            files,
            limit_s,
            only=[test for test in tests if "::" in test],
            without=without,
            marks=how.marks,
            profile=how.profile,
        )

    def _measured(self, stage: str, files: list[str], alive: list[Mutant]) -> Reach:
        if files[0].startswith(CLUSTER):
            return self._in_clusters(files, alive)
        if stage == "properties":
            stage = "unit"
        path = self.runner.tree.folder / "reach" / f"{stage}-{files[0].replace('/', '-')}.json"
        measured = Reach.read(path) if path.exists() else Reach({}, [], {})
        missing = {mutant: self.positions[mutant] for mutant in alive if mutant.id not in measured.tests}
        if missing:
            new = measure(self.runner, files, missing, self._stage)
            nothing: dict[str, list[str]] = {mutant.id: [] for mutant in missing}
            measured = Reach(measured.seconds | new.seconds, new.failed, measured.tests | nothing | new.tests)
            path.parent.mkdir(exist_ok=True)
            measured.write(path)
        return measured

    def _in_clusters(self, files: list[str], alive: list[Mutant]) -> Reach:
        """Pods cannot say what they reach: each test of a cluster with an operator may reach all of the operator."""
        tests = [test for test in self.seconds if test.startswith(CLUSTER)]
        # Those that were never measured are run as files.
        tests += [file for file in files if not any(test.startswith(f"{file}::") for test in tests)]
        return Reach(
            {}, [], {mutant.id: tests for mutant in alive if self.positions[mutant].file.startswith(IN_CLUSTERS)}
        )

    def _alive(self) -> list[Mutant]:
        return [each for each in self.mutants if each in self.positions and self._is_alive(each)]

    def _is_alive(self, mutant: Mutant) -> bool:
        return self._row(mutant).outcome not in (KILLED, GONE)

    def _row(self, mutant: Mutant) -> Row:
        return self.rows.get(mutant.id, Row(mutant.id, SURVIVED))

    def _cost(self, test: str) -> float:
        return self.seconds.get(test, 1.0 if "::" in test else UNKNOWN_S)

    def _write(self, row: Row) -> None:
        self.rows[row.mutant] = row
        with self.path.open("a") as record:
            record.write(json.dumps(asdict(row)) + "\n")
        if row.outcome == KILLED:
            say(f"{row.mutant} killed by {row.killer} ({row.how}, {row.seconds} s)")
        else:
            say(f"{row.mutant} {row.outcome}: {len(row.ran)} files ran, {len(row.left)} are left")


def has_effect_at_import(mutant: Mutant, position: Position, sources: Mapping[str, str]) -> bool:
    """Whether a constant is used outside of functions; then too many tests would reach it."""
    return mutant.symbol.isupper() and len(effects(mutant, position, sources)) > 8


def compacted(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(asdict(row)) + "\n" for row in rows)
