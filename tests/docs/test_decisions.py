"""The maps and the decisions: what is there is named, and what is named is there."""

import re
from pathlib import Path

import pytest

from support.documents import DECISIONS, MAPS, ROOT

FILES = sorted(DECISIONS.glob("[0-9]*.md"))
SOURCES = {"halimede": ROOT / "server", "halimede_operator": ROOT / "operator"}
ROOM = re.compile(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`")
MODULE = re.compile(r"`((?:[a-z_0-9]+\.)+[a-z_0-9]+)(?:\.[A-Z]\w*)?`")
"""`runtime.pump`, and the module of `runtime.pump.Pump`."""
NO_MODULES = {"custom.metrics.k8s.io", "pyproject.toml"}


def test_the_index_lists_each_decision_by_its_title() -> None:
    titles = {path.name: path.read_text().partition("\n")[0] for path in FILES}
    listed = re.findall(r"^- \[(\d+)\]\((\S+)\) (.+)$", (DECISIONS / "README.md").read_text(), re.MULTILINE)
    assert listed == [(name[:3], name, title.removeprefix(f"# {name[:3]} ")) for name, title in titles.items()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_decision_says_why_and_what_follows(path: Path) -> None:
    text = path.read_text()
    parts = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert [part for part in parts if part in {"Context", "Decision", "Consequences"}] == ["Context", "Decision", "Consequences"]
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize("package", MAPS)
def test_a_map_is_short_and_has_each_room(package: str) -> None:
    text, folder = MAPS[package].read_text(), SOURCES[package] / package
    assert len(text.splitlines()) <= 250
    rooms = {".".join(path.parent.relative_to(folder).parts) for path in folder.rglob("__init__.py")}
    assert rooms - {"", "core"} <= set(ROOM.findall(text.partition("## Rooms")[2]))


@pytest.mark.parametrize("package", MAPS)
def test_the_modules_that_a_map_names_exist(package: str) -> None:
    text, folder = MAPS[package].read_text(), SOURCES[package] / package
    known = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    known |= {name.removesuffix(".__init__") for name in known}
    named = set(MODULE.findall(text)) - NO_MODULES
    assert {name for name in named if not any(f".{each}".endswith(f".{name}") for each in known)} == set()
