"""A plug-in of pytest that reports each test to `tests/gpu/run.py`, as lines of JSON in the file HALIMEDE_GPU_EVENTS."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

EVENTS = "HALIMEDE_GPU_EVENTS"
MOST_DETAILS = 20_000
"""Characters of a failure's text."""


def report(**event: Any) -> None:
    # One write, so that a line is whole, and it stays if the process crashes.
    with Path(os.environ[EVENTS]).open("ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or that skips itself, has no tests: it is reported in their place."""
    if report.outcome != "passed":
        ended(report.nodeid, report, 0.0, [])


def pytest_collection_finish(session: pytest.Session) -> None:
    report(tests=[item.nodeid for item in session.items])


def pytest_runtest_logstart(nodeid: str) -> None:
    report(begin=nodeid)


class Parts:
    """The reports of the test that runs: of its set-up, its call and its end."""

    def __init__(self) -> None:
        self.seen: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seen.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seen, self.seen = self.seen, []
        worst = max(seen, key=lambda each: ("passed", "skipped", "failed").index(each.outcome))
        # Of the call: at the end there is the CPU time too.
        figures = [pair for each in seen if each.when == "call" for pair in each.user_properties]
        ended(nodeid, worst, sum(each.duration for each in seen), figures)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Parts(), "parts")


def ended(
    name: str, found: pytest.TestReport | pytest.CollectReport, seconds: float, figures: list[tuple[str, object]]
) -> None:
    report(
        end=name,
        outcome=found.outcome,
        seconds=round(seconds, 2),
        reason=_reason(found),
        figures={key: str(value) for key, value in figures},
        details=found.longreprtext[-MOST_DETAILS:] if found.failed else "",
    )


def _reason(found: pytest.TestReport | pytest.CollectReport) -> str:
    """Why it was skipped, or the message of its error; "" if it has passed."""
    if isinstance(found.longrepr, tuple):
        return found.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(found.longrepr, "reprcrash", None)
    return crash.message if crash is not None else found.longreprtext
