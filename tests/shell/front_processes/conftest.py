"""`start` for tests that need a server of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.front_ends import TWO
from support.server import RunningServer, Start, start_server


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty repository."""
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start_server` with two front-end processes; the servers are killed when the test ends."""
    running: list[RunningServer] = []

    def begin(*arguments: str | Path, **options: Any) -> RunningServer:
        running.append(start_server(tmp_path, [TWO, *arguments], **options))
        return running[-1]

    yield begin
    for each in running:
        each.kill()
