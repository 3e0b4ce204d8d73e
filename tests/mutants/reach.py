"""Which tests reach which mutants: one run of tests in a tree whose product says so."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutants.apply import Position, Sources, effects, mark
from mutants.find import Mutant
from mutants.runs import Runner
from mutants.tree import say

LIMIT_S = 3600
UNIT, CONFORMANCE, CLUSTER = "tests/unit", "tests/conformance", "tests/cluster"
TEST, TEST_ALL = "make test", "make test-all"

NOT_RUN = ("tests/bench", "tests/checks", "tests/docs", "tests/gpu", "tests/packaging")
"""Folders whose tests are about no product code, or need a machine of their own."""

NEAREST = ("operator", "fetch", "runtime", "workers", "grpc", "http", "port", "backends", "front_processes")
"""Folders of tests/shell, of which most run one part of the product."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that run before those of the next stage, because they find more per second."""

    target: str = TEST
    marks: str | None = None
    """Of the tests that run, in place of those that the target runs."""
    profile: str = "ci"
    """Of hypothesis: the same examples each time."""
    label: str = ""
    """Of a file that ran in this stage and runs in another one, too."""
    at_once: bool = True
    """The files of a group run in one process."""
    times: int = 1
    """How much longer tests take than they did when they were measured."""


STAGES = {
    "unit": Stage(marks="not large and not load", profile="quick", label=" with few examples"),
    "rest": Stage(),
    "conformance": Stage(at_once=False),
    # The unit tests with all examples of their properties.
    "properties": Stage(times=20),
    "cluster": Stage(at_once=False),
    "large": Stage(target=TEST_ALL, marks="large", label=f" of {TEST_ALL}", at_once=False),
}

HELPER = """
def _mutant_reached(name, _seen=set(), _stat=__import__("os").stat):
    try:
        key = (name, _stat({started!r}).st_size)
        if key not in _seen:
            _seen.add(key)
            with open({marks!r}, "a") as file:
                file.write("%s %d\\n" % key)
    except OSError:
        pass


"""


@dataclass(frozen=True, slots=True)
class Reach:
    """Seconds of each test that ran, and the tests that reach each mutant, by its id."""

    seconds: dict[str, float]
    failed: list[str]
    tests: dict[str, list[str]]

    @classmethod
    def read(cls, path: Path) -> "Reach":
        return cls(**json.loads(path.read_text()))

    def tests_by_file(self, mutant: str) -> dict[str, list[str]]:
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.tests.get(mutant, []):
            by_file[test.partition("::")[0]].append(test)
        return by_file

    def __or__(self, other: "Reach") -> "Reach":
        both = self.tests.keys() | other.tests.keys()
        tests = {mutant: self.tests.get(mutant, []) + other.tests.get(mutant, []) for mutant in both}
        return Reach(self.seconds | other.seconds, self.failed + other.failed, tests)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"seconds": self.seconds, "failed": self.failed, "tests": self.tests}))


def groups(root: Path, stage: str) -> list[list[list[str]]]:
    """The test files of a stage, in groups whose tests are run for a mutant before those of the next group.

    Each list of files is run by a process of its own, to measure what they reach: a file of tests/conformance alone,
    because of servers that several files share, and of frameworks that do not bear each other.
    """
    by_folder = defaultdict(list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = str(path.relative_to(root))
        if not file.startswith(NOT_RUN):
            by_folder[UNIT if file.startswith(UNIT) else str(Path(file).parent)].append(file)
    unit, cluster = by_folder.pop(UNIT), by_folder.pop(CLUSTER)
    conformance = [[file] for file in by_folder.pop(CONFORMANCE)]
    rest = [[by_folder[name]] for name in sorted(by_folder, key=_distance)]
    return {
        "unit": [[unit]],
        "properties": [[unit]],
        "rest": rest,
        "conformance": [conformance],
        "cluster": [[cluster]],
        "large": [[unit], *rest, conformance, [cluster]],
    }[stage]


def _distance(folder: str) -> tuple[int, str]:
    name = folder.removeprefix("tests/shell/").partition("/")[0]
    return NEAREST.index(name) if name in NEAREST else len(NEAREST), folder


def measure(runner: Runner, files: list[str], mutants: Mapping[Mutant, Position], stage: Stage) -> Reach:
    """Run the files in a tree with marks at the mutants."""
    sources = runner.tree.sources()
    reached = runner.folder / "marks"
    reached.write_text("")
    with runner.tree.changed(marked(sources, mutants, runner.folder / "started", reached)):
        run = runner.run(files, LIMIT_S, marks=stage.marks, profile=stage.profile, to_the_end=True)
    say(f"{files[0]} and {len(files) - 1} more files: {run.end}, {run.seconds:.0f} s")
    seconds: dict[str, float] = defaultdict(float)
    failed = []
    for report in runner.reports():
        seconds[str(report["test"])] += float(report["seconds"])
        if report["outcome"] == "failed":
            failed.append(str(report["test"]))
    return Reach(seconds, failed, read_marks(reached.read_text(), runner.started()))


def marked(sources: Sources, mutants: Mapping[Mutant, Position], started: Path, reached: Path) -> dict[str, str]:
    """The changed files of a tree with marks."""
    wanted: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for mutant, position in mutants.items():
        for effect in effects(mutant, position, sources):
            wanted[effect.file].append((effect.line, mutant.id))
    helper = HELPER.format(started=str(started), marks=str(reached))
    return {file: mark(sources[file], lines, helper) for file, lines in wanted.items()}


def read_marks(text: str, started: Iterable[str]) -> dict[str, list[str]]:
    """Tests by mutant. A mark names its mutant and the size that the list of started tests had.

    What a test's setup reaches, such as the start of a server, may be for all tests of its file.
    """
    by_size, by_file, size = {}, defaultdict(set), 0
    for line in started:
        size += len(line.encode()) + 1
        test, _, phase = line.partition("\t")
        by_size[size] = test, phase
        by_file[test.partition("::")[0]].add(test)
    found: dict[str, set[str]] = defaultdict(set)
    for line in text.splitlines():
        name, size_text = line.split()
        # No test has started yet while files are imported.
        if known := by_size.get(int(size_text)):
            test, phase = known
            found[name] |= by_file[test.partition("::")[0]] if phase == "setup" else {test}
    return {name: sorted(tests) for name, tests in found.items()}
