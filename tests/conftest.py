"""Settings of all tests."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

HERE = Path(__file__).parent
NO_PARAMETERS = SimpleNamespace(params={})

# A change must not fail for what chance finds in another part; by hand, chance may look.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.hookimpl(tryfirst=True)  # xdist then reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))


def group(item: pytest.Item) -> str:
    """Tests of one group run in one process, one after the other: they share what is dear to start, or is there once."""
    folder, _, file = item.path.relative_to(HERE).as_posix().partition("/")
    if folder == "cluster":
        return folder
    if "server" in (parameters := getattr(item, "callspec", NO_PARAMETERS).params):
        return f"{folder} {parameters['server']}"
    return f"{folder}/{file}"
