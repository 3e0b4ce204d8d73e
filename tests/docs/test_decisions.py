"""The maps and the decisions: what is there is named, and what is named is there."""

import re
from pathlib import Path

import pytest

from support.documents import DECISIONS, MAPS, ROOT

FILES = sorted(DECISIONS.glob("[0-9]*.md"))
SOURCES = {"halimede": ROOT / "server", "halimede_operator": ROOT / "operator"}
ROOM = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`")
NAME = re.compile(r"`((?:[a-z_0-9]+\.)+[a-z_0-9]+)(?:\.[A-Z]\w*)?`")
"""`runtime.pump`, the module of `runtime.pump.Pump`, and the function `runtime.model.start_version`."""
NO_MODULES = {"custom.metrics.k8s.io", "halimede.backends", "os._exit", "pyproject.toml"}


def test_the_index_lists_each_decision_by_its_title() -> None:
    titles = {path.name: path.read_text().partition("\n")[0] for path in FILES}
    listed = re.findall(r"^- \[(\d+)\]\((\S+)\) (.+)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name[:3], name, title.removeprefix(f"# {name[:3]} ")) for name, title in titles.items()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_decision_says_why_and_what_follows(path: Path) -> None:
    text = path.read_text()
    parts = re.findall(r"^## (Context|Decision|Consequences)$", text, re.MULTILINE)
    assert parts == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("package", MAPS)
def test_a_map_is_short_and_has_each_room(package: str) -> None:
    text, folder = MAPS[package].read_text(), SOURCES[package] / package
    assert len(text.splitlines()) <= 250
    rooms = {".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("__init__.py")}
    assert rooms - {"", "core"} <= set(ROOM.findall(text.partition("## Rooms")[2]))


@pytest.mark.parametrize("package", MAPS)
def test_the_modules_and_functions_that_a_map_names_exist(package: str) -> None:
    folder = SOURCES[package] / package
    names = set(NAME.findall(MAPS[package].read_text())) - NO_MODULES
    assert {name for name in names if not _exists(folder, name)} == set()


def _exists(folder: Path, name: str) -> bool:
    path, function = name.replace(".", "/"), name.rpartition(".")[2]
    if any(folder.glob(f"**/{path}.py")) or any(folder.glob(f"**/{path}/__init__.py")):
        return True
    return any(f"def {function}(" in module.read_text() for module in folder.glob(f"**/{path.rpartition('/')[0]}.py"))
