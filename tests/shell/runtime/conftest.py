"""A repository, and a backend whose models misbehave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from halimede.backends.discover import installed_backend
from support.plugin import FaultyBackend


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBackend]:
    backend = FaultyBackend.install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed_backend.cache_clear()
    yield backend
    installed_backend.cache_clear()
