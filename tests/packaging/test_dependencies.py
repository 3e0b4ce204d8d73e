"""Each dependency is imported by the code of the extra that installs it."""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY_ROOT = Path(__file__).parents[2]
SERVER = REPOSITORY_ROOT / "server/halimede"
PROJECT = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@cache
def distributions() -> Mapping[str, list[str]]:
    """By module. To read them takes half a second."""
    return packages_distributions()


def imported(files: Iterator[Path]) -> set[str]:
    """The distributions that these files import from."""
    modules: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                modules.add(node.module.partition(".")[0])
    owners = distributions()
    return {canonicalize_name(owner) for module in modules for owner in owners.get(module, ())}


@pytest.mark.parametrize(
    ("requirements", "files"),
    [
        (PROJECT["dependencies"], [file for file in SERVER.rglob("*.py") if "demo" not in file.parts]),
        (EXTRAS["demo"], (SERVER / "demo").rglob("*.py")),
        (EXTRAS["operator"], (REPOSITORY_ROOT / "operator").rglob("*.py")),
    ],
    ids=["base", "demo", "operator"],
)
def test_each_dependency_is_imported(requirements: list[str], files: Iterator[Path]) -> None:
    needed = {canonicalize_name(Requirement(each).name) for each in requirements}
    assert needed - imported(files) == set()
