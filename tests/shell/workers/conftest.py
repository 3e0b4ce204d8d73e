"""Fixtures of the tests of workers."""

from collections.abc import Iterator

import pytest

from halimede.processes.launcher import Launcher
from support.child_channel import Server
from support.workers import FOLDER, Crew


@pytest.fixture
def server() -> Iterator[Server]:
    each = Server()
    yield each
    each.close()
    each.channel.disconnect()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Of all tests of a module that leave its zygote as it is: to start one takes longer than most tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", FOLDER)
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        made = Launcher()
        yield made
        made.close()


@pytest.fixture
def crew(launcher: Launcher) -> Iterator[Crew]:
    with Crew(launcher) as crew:
        yield crew


@pytest.fixture
def own_crew(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """With a launcher of its own."""
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Crew() as crew:
        yield crew
