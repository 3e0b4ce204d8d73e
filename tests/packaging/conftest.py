"""The server's image, and large tests of packages: they are skipped where they passed before with the same inputs, because they take minutes of building."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest

from cluster.programs import provide_programs
from halimede import __version__
from support.image import REPOSITORY_ROOT, Container, Image, Unavailable, built_image, extended_image
from support.models import add_simple
from support.passed_before import record_of
from support.phases import shown

PAGE = (REPOSITORY_ROOT / "docs/pages/container.md").read_text()
USED = {"packaging", "support"}
OTHERS = [f"tests/{path.name}" for path in REPOSITORY_ROOT.glob("tests/*") if path.is_dir() and path.name not in USED]


@cache
def record(item: pytest.Item) -> Path | None:
    """The record of a large test; None for others, and outside a git checkout."""
    if item.get_closest_marker("large") is None or not (REPOSITORY_ROOT / ".git").exists():
        return None
    return record_of(REPOSITORY_ROOT, item.nodeid, OTHERS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before fixtures, which build."""
    file = record(item)
    if file is not None and file.exists():
        pytest.skip(f"passed before with the same inputs: {file}")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    file = record(item)
    if file is not None and call.when == "call" and call.excinfo is None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(item.nodeid)


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The image, or one built from it with a package."""
    kind = getattr(request, "param", "cpu")
    try:
        with ExitStack() as stack:
            built = stack.enter_context(built_image())
            if kind != "cpu":
                built = stack.enter_context(extended_image(recipe(kind, built.name), f"localhost/halimede:test-{kind}"))
            yield built
    except Unavailable as reason:
        if os.environ.get("CI"):
            pytest.fail(f"the image is not tested: {reason}")
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\nTHE IMAGE IS NOT TESTED: {reason}")
        pytest.skip(str(reason))


def recipe(package: str, base: str) -> str:
    """The page's Dockerfile with another package and another base image."""
    (text,) = re.findall(r"```dockerfile\n(.*?)```", PAGE, re.DOTALL)
    name = f"halimede:{__version__}"
    assert (text.count(f" {name}\n"), text.count(f"={name},"), text.count(" torch\n")) == (1, 1, 1)
    return text.replace(name, base).replace(" torch\n", f" {package}\n")


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Container]:
    add_simple(tmp_path / "models")
    made = Container(image, tmp_path, tmp_path / "models")
    yield made
    made.remove()


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Iterator[Path]:
    try:
        with shown(request.config):
            built = provide_programs()
        yield built
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="session")
def helm(programs: Path) -> str:
    return str(programs / "helm")
