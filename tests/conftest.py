"""Settings of all tests."""

import gc
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # its annotations are not for others

from support.costs import Measured, Totals
from support.examples import QUICK, QUICK_EXAMPLES

GROUPS = {
    # These run in one process each: they share a cluster, a server, or the import of a framework, which takes seconds.
    "cluster": r"tests/cluster/",
    "openvino": r"tests/.*/test_openvino",
    "pytorch": r"tests/.*/test_(pytorch|dlpack)",
    "tensorflow": r"tests/.*/test_tensorflow",
    "tensorrt": r"tests/.*/test_tensorrt",
    "fetch": r"tests/(shell/fetch/|conformance/test_fetch)",
    "trees": r"tests/(shell/backends/trees/|conformance/test_trees)",
    # The server that files of tests/conformance share: no other test there has such an identifier.
    "thread": r"tests/conformance/.*[\[-]thread[\]-]",
    "process": r"tests/conformance/.*[\[-]process[\]-]",
}
"""By group: what the names of its tests begin with; the first that fits counts. The others form a group for each file."""

TARGETS = frozenset({"gpu", "images", "interop", "keda", "large", "load"})
"""Marks of tests that `make test` leaves out; each has a target of the Makefile."""

# No deadline for an example: how long one takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
# In CI the examples are the same each time: a change must not fail for an example that another part's test finds.
settings.register_profile("ci", derandomize=True, deadline=None)
# A run that ends within a minute; a busy machine must not fail it.
settings.register_profile(
    QUICK, derandomize=True, max_examples=QUICK_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget", type=Path, help="CPU seconds per folder, as JSON: a run fails far above them")


def pytest_configure(config: pytest.Config) -> None:
    # At its end a library would report what it still holds as leaks. Last of all: pytest collects garbage before it.
    config.add_cleanup(gc.unfreeze)
    if not hasattr(config, "workerinput"):
        budget = config.option.budget and json.loads(config.option.budget.read_text())
        config.pluginmanager.register(Totals(config.rootpath / "build" / "durations.json", budget), "costs")
    if hasattr(config, "workerinput") or not config.option.numprocesses:
        config.pluginmanager.register(Measured(config), "measured")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collections: all that the collection of ten thousand tests makes is kept."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):
            item.add_marker("gpu")
        if len(targets := TARGETS.intersection(mark.name for mark in item.iter_markers())) > 1:
            raise pytest.UsageError(f"{item.nodeid} has the marks {sorted(targets)}: a test has at most one of them")


def pytest_collection_finish() -> None:
    # Without a garbage collection: it takes most of a second, and the garbage of the collection of tests is small.
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        forget_the_past()
    return result


def forget_the_past() -> None:
    """Leave what is in memory now out of garbage collections: ten thousand collected tests and the modules of frameworks.

    With them each collection of a test takes up to half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Groups":
    return Groups(config, log)


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Tests of one group run in one process, one after the other: they share what is dear to start, or is there once."""

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test."""
        by_name = (group for group, pattern in GROUPS.items() if re.match(pattern, nodeid))
        return next(by_name, nodeid.partition("::")[0])
