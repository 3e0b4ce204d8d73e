"""Run the tests that a change reaches, for a minute: `python tests/affected/run.py`.

The change is what differs from the last commit; in a tree without differences, the last commit itself.
"""

import fnmatch
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from affected.choose import Choice, choose, imports_of, with_fixtures

ROOT = Path(__file__).parents[2]
SOURCES = ("server", "operator", "tests")
"""Folders from which modules are imported by name."""
ROOMS = json.loads(Path(__file__).with_name("rooms.json").read_text())
DURATIONS = ROOT / "build" / "durations.json"
LIMIT_S = 60.0
START_S = 13.0
"""Seconds for the start of pytest and its processes, and the collection of tests."""
GUESS_S = 3.0
"""Seconds of a test file that no recorded run has."""


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split()


def changed_files(base: str | None) -> list[str]:
    """Those that differ from `base` or are new; without a base, from the last commit, or from the one before it."""
    new = git("ls-files", "--others", "--exclude-standard")
    if base is not None:
        return git("diff", "--name-only", base) + new
    return git("diff", "--name-only", "HEAD") + new or git("diff", "--name-only", "HEAD~1")


def seconds_of(tests: list[str]) -> dict[str, float]:
    """CPU or wall seconds of each test file, whichever is more, in the last run that had it."""
    found = defaultdict(lambda: GUESS_S)
    if DURATIONS.exists():
        recorded: dict[str, float] = defaultdict(float)
        for nodeid, cost in json.loads(DURATIONS.read_text())["tests"].items():
            recorded[nodeid.partition("::")[0]] += max(cost["wall_s"], cost["cpu_s"])
        found |= recorded
    return {test: found[test] for test in tests}


def plan(changed: list[str], limit_s: float) -> Choice:
    """What to run for a change of this tree."""
    files = [
        file for file in git("ls-files", "--cached", "--others", "--exclude-standard", "*.py") if (ROOT / file).exists()
    ]
    modules = {}
    for file in files:
        for source in SOURCES:
            if file.startswith(f"{source}/"):
                modules[
                    file.removeprefix(f"{source}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                ] = file
    graph = {file: imports_of((ROOT / file).read_text(), file, modules) for file in files}
    tests = [
        file for file in files if fnmatch.fnmatch(file, "tests/*/test_*.py") and not file.startswith("tests/cluster/")
    ]
    rooms = {
        room: [
            file for name in named for file in tests if file == name or (name.endswith("/") and file.startswith(name))
        ]
        for room, named in ROOMS.items()
    }
    return choose(changed, tests, with_fixtures(graph), rooms, seconds_of(tests), limit_s)


@click.command()
@click.option("--base", help="a commit to compare with")
@click.option("--jobs", default=os.cpu_count() or 1)
@click.option("--plan", "only_plan", is_flag=True, help="print the test files, and run nothing")
def main(base: str | None, jobs: int, only_plan: bool) -> None:
    begun = time.monotonic()
    changed = changed_files(base)
    chosen = plan(changed, (LIMIT_S - START_S) * jobs)
    print(f"{len(changed)} changed files: {len(chosen.run)} test files to run")
    if chosen.left_out:
        print(f"Left out, as a minute is over; `make test` runs them: {' '.join(chosen.left_out)}")
    if only_plan or not chosen.run:
        print("\n".join(chosen.run))
        return
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "--no-loadscope-reorder", *chosen.run]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print(f"{time.monotonic() - begun:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    main()
