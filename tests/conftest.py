"""Settings of all tests."""

import os
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # its annotations are not for others

from support.examples import QUICK, QUICK_EXAMPLES

SERVERS = re.compile(r"^tests/conformance/.*[\[-](thread|process)[\]-]")

# No deadline for an example: how long one takes says more about the machine than about the code.
settings.register_profile("default", deadline=None)
# In CI the examples are the same each time: a change must not fail for an example that another part's test finds.
settings.register_profile("ci", derandomize=True, deadline=None)
# A run that ends within a minute; a busy machine must not fail it.
settings.register_profile(
    QUICK, derandomize=True, max_examples=QUICK_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Groups":
    return Groups(config, log)


class Groups(LoadScopeScheduling):  # type: ignore[misc]  # as above
    """Tests of one group run in one process, one after the other: they share what is dear to start, or is there once."""

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test."""
        if nodeid.startswith("tests/cluster/"):
            return "cluster"
        if server := SERVERS.match(nodeid):
            return server[1]
        return nodeid.partition("::")[0]
