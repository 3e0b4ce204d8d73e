"""Which test files to run after a change, within a time: those that are nearest to it first.

Nearest are changed test files, then tests that import a changed module, directly before through others, the cheapest
first, then the tests of whole servers that `rooms.json` names for a folder of the product.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([^\n]*))", re.MULTILINE)
NAME = re.compile(r"[\w.]+")

Graph = Mapping[str, frozenset[str]]
"""The files that a file imports, as paths from the root."""


@dataclass(frozen=True, slots=True)
class Choice:
    run: tuple[str, ...]
    left_out: tuple[str, ...]
    """Reached by the change, but beyond the time."""


def imports_of(source: str, file: str, modules: Mapping[str, str]) -> frozenset[str]:
    """The project's files that a file imports anywhere in it; `modules` has the file of each module's name.

    By a regular expression, since parsing a thousand files takes seconds. Code in a text counts too.
    """
    found: set[str] = set()
    for package, imported, plain in IMPORT.findall(source):
        # A name that is imported from a package can be a module.
        names = [package, *(f"{package}.{name}" for name in NAME.findall(imported))] if package else NAME.findall(plain)
        found.update(modules[name] for name in names if name in modules)
    return frozenset(found - {file})


def distances(changed: Iterable[str], graph: Graph) -> dict[str, int]:
    """The number of imports from a file to the nearest changed one, of all files that reach one."""
    importers: dict[str, set[str]] = {}
    for file, imported in graph.items():
        for each in imported:
            importers.setdefault(each, set()).add(file)
    reached = dict.fromkeys(changed, 0)
    frontier = set(reached)
    for distance in count(1):
        frontier = {file for each in frontier for file in importers.get(each, ())} - set(reached)
        if not frontier:
            return reached
        reached |= dict.fromkeys(frontier, distance)
    raise AssertionError


def with_fixtures(graph: Graph) -> Graph:
    """The graph in which a test file also imports the `conftest.py` of its folder, and what that imports."""

    def fixtures(file: str) -> frozenset[str]:
        conftest = f"{file.rpartition('/')[0]}/conftest.py"
        return graph[conftest] | {conftest} if conftest in graph and file != conftest else frozenset()

    return {file: imported | fixtures(file) for file, imported in graph.items()}


def by_room(changed: Iterable[str], rooms: Mapping[str, Sequence[str]]) -> list[str]:
    """The tests of the deepest rooms that hold changed files, in the order of the rooms."""
    found: dict[str, None] = {}
    for file in changed:
        named = [room for room in rooms if file.startswith(room)]
        if named:
            found |= dict.fromkeys(rooms[max(named, key=len)])
    return list(found)


def choose(
    changed: Sequence[str],
    tests: Sequence[str],
    graph: Graph,
    rooms: Mapping[str, Sequence[str]],
    seconds: Mapping[str, float],
    limit_s: float,
) -> Choice:
    """The test files to run, nearest first, whose seconds together are within the limit, and those left out.

    A file that alone is beyond what remains is left out, and a cheaper one after it may still run.
    """
    reached = distances(changed, graph)
    direct = {file: distance for file, distance in reached.items() if distance <= 1}
    in_process = [test for test in tests if test in reached]
    near = sorted((test for test in in_process if test in direct), key=lambda test: (direct[test], seconds[test]))
    far = sorted((test for test in in_process if test not in direct), key=lambda test: (reached[test], seconds[test]))
    known = set(tests)
    order = dict.fromkeys([*near, *(test for test in by_room(changed, rooms) if test in known), *far])
    run, left_out, spent_s = [], [], 0.0
    for test in order:
        if spent_s + seconds[test] <= limit_s:
            run.append(test)
            spent_s += seconds[test]
        else:
            left_out.append(test)
    return Choice(tuple(run), tuple(left_out))
