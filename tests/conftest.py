"""Settings of all tests."""

import os
import re
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # its annotations are not for others

SERVERS = re.compile(r"^tests/conformance/.*[\[-](thread|process)[\]-]")

# A change must not fail for what chance finds in another part; by hand, chance may look.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


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
