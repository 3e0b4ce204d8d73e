"""What a run of the tests on a GPU does next, and its results as a table. Pure.

The tests run in a pytest process that reports each test. A call into CUDA that hangs cannot be interrupted within its
process, and a driver may crash it. So limits are kept from outside: the process is killed, its test is named, and
another process runs the tests that remain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MOST_REASON = 160
"""Characters of a reason in the table; the JSON has all."""


class Outcome(StrEnum):
    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    CRASHED = "crashed"
    NOT_RUN = "not run"


GOOD = frozenset({Outcome.PASSED, Outcome.SKIPPED})


class Step(StrEnum):
    WAIT = "wait"
    KILL = "kill the process"
    """A test has reached its limit, or the whole run has."""
    START = "start a process for the remaining tests"
    END = "end"


@dataclass(frozen=True, slots=True)
class Result:
    test: str
    outcome: Outcome
    seconds: float = 0.0
    reason: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)
    details: str = ""
    """The end of a failure's text."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `start_s` is for the import and collection of the tests, `whole_s` for the run."""

    test_s: float
    start_s: float
    whole_s: float


class Progress:
    """Gets events and the time in seconds since the begin of the run, and says the next step.

    Each file has a process of its own, and a further one after each test that was killed or crashed: frameworks bring
    libraries of CUDA, which may not fit each other in one process.
    """

    def __init__(self, files: Sequence[str], limits: Limits) -> None:
        """`files` are not empty; the first is the file to start with."""
        self._limits = limits
        self._files = [*files]
        """The current one, and those after it."""
        self._results: dict[str, Result] = {}
        self._tests: list[str] = []
        """Of the current file, once they are known."""
        self._running = ""
        """The current test; empty while the process starts, or between two tests."""
        self._since_s = 0.0
        self._has_begun = False
        """Whether the current process has begun a test."""
        self._is_over = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the next process runs: a file, or the tests of it that remain."""
        return self._remaining if self._tests else (self._files[0],)

    @property
    def results(self) -> tuple[Result, ...]:
        """So far. In place of tests that have no outcome: not run."""
        missing = (*self._remaining, *self._files[1 if self._tests else 0 :])
        named = [name for name in missing if name not in self._results]
        return (
            *self._results.values(),
            *(Result(name, Outcome.NOT_RUN, reason="the run ended before it") for name in named),
        )

    @property
    def _remaining(self) -> tuple[str, ...]:
        return tuple(test for test in self._tests if test not in self._results)

    def started(self, now_s: float) -> None:
        """A process has started."""
        self._running, self._since_s, self._has_begun = "", now_s, False

    def event(self, event: Mapping[str, Any], now_s: float) -> None:
        """What the process reported: `tests` that it found, the `begin` of a test, or an `end`."""
        if "tests" in event:
            self._tests = self._tests or event["tests"]
        elif "begin" in event:
            self._running, self._since_s, self._has_begun = event["begin"], now_s, True
        else:
            name, outcome = event["end"], Outcome(event["outcome"])
            shown = (event["reason"], event["figures"], event["details"])
            self._results[name] = Result(name, outcome, event["seconds"], *shown)
            self._running, self._since_s = "", now_s

    def step(self, now_s: float) -> Step:
        """What to do while a process runs: WAIT or KILL. After KILL the caller reports `ended`."""
        if now_s >= self._limits.whole_s:
            self._is_over = True
        return Step.KILL if self._is_over or now_s - self._since_s >= self._limit_s else Step.WAIT

    def ended(self, how: str, now_s: float) -> Step:
        """The process has ended by `how`, such as `exit code 1`: START or END."""
        # Each process gives an outcome to one test at least, so that the run comes to an end.
        name = self._running or ("" if self._has_begun or self._is_over else next(iter(self.arguments), ""))
        if name and name not in self._results:
            self._results[name] = self._lost(name, how, now_s)
        self._running = ""
        if self._is_over:
            return Step.END
        if not self._remaining:
            del self._files[0]
            self._tests = []
        return Step.START if self._files else Step.END

    def _lost(self, name: str, how: str, now_s: float) -> Result:
        """The result of what was running when the process ended."""
        seconds = round(now_s - self._since_s, 1)
        if self._is_over:
            return Result(name, Outcome.TIMED_OUT, seconds, "the time of the run was over")
        if seconds >= self._limit_s:
            return Result(name, Outcome.TIMED_OUT, seconds, f"no end within {self._limit_s:g} s")
        return Result(name, Outcome.CRASHED, seconds, how)

    @property
    def _limit_s(self) -> float:
        return self._limits.test_s if self._running else self._limits.start_s


def is_good(results: Sequence[Result]) -> bool:
    """Whether something has passed, and all else was skipped by name."""
    return all(each.outcome in GOOD for each in results) and any(each.outcome is Outcome.PASSED for each in results)


def table(results: Sequence[Result]) -> str:
    """A line for each test: its name, the outcome, seconds, and figures or the reason."""
    rows = [("test", "result", "s", "figure"), *(_row(each) for each in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{test:{widths[0]}}  {outcome:{widths[1]}}  {seconds:>{widths[2]}}  {figure}".rstrip()
        for test, outcome, seconds, figure in rows
    ]
    counts = {outcome: sum(each.outcome is outcome for each in results) for outcome in Outcome}
    return "\n".join([*lines, "", ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)])


def _row(result: Result) -> tuple[str, str, str, str]:
    figure = ", ".join(f"{name} {value}" for name, value in result.figures.items())
    reason = " ".join(result.reason.split())
    reason = reason if len(reason) <= MOST_REASON else f"{reason[:MOST_REASON]}..."
    text = "; ".join(part for part in (figure, reason) if part)
    return result.test.removeprefix("tests/gpu/"), result.outcome.value, f"{result.seconds:.1f}", text
