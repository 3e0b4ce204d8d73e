"""Plugin of pytest in the copy of the tree: writes which test runs, and how it ended, for the program outside.

It stands in the environment of the copy, and imports nothing of this package.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

FOLDER = Path(os.environ["MUTANTS_FOLDER"])


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Do not look for the smallest example that fails: that it fails is enough."""
    profile = settings.get_current_profile_name()
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(profile, settings.get_profile(profile), phases=phases)
    settings.load_profile(profile)


# The size of this file names the test that runs, for processes of the product: to ask for it costs a microsecond.
STARTED = FOLDER / "started"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    with STARTED.open("a") as file:
        file.write(f"{nodeid}\tsetup\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    with STARTED.open("a") as file:
        file.write(f"{item.nodeid}\tcall\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    with (FOLDER / "reports").open("a") as file:
        line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "seconds": report.duration}
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: Any) -> None:
    """Run the tests of the plan alone."""
    plan = json.loads((FOLDER / "plan").read_text())
    only, without = plan["only"] and set(plan["only"]), set(plan["without"])
    dropped = [item for item in items if (only and item.nodeid not in only) or item.nodeid in without]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in set(dropped)]
