"""The environments that the Makefile makes: one per Python and purpose, each with what its lock says."""

import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.environment import name, requirements

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
MAKEFILE = (ROOT / "Makefile").read_text()
SIZES = {lock: float(gigabytes) for lock, gigabytes in re.findall(r"call environment,\S+,(\S+),([\d.]+) GB", MAKEFILE)}
"""What the Makefile says of each lock's size on disk."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file in ("Makefile", "pyproject.toml", *SIZES):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def run_make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    clean = {"PATH": f"{checkout}/programs:/usr/bin:/bin"}
    return subprocess.run(command, cwd=checkout, env=clean, capture_output=True, text=True, check=False)


def made(folder: Path, version: str = HERE) -> None:
    """An environment that is up to date."""
    (folder / "lib" / f"python{version}").mkdir(parents=True)
    (folder / ".stamp").touch()


def commands(checkout: Path, *arguments: str) -> list[str]:
    """What make would run."""
    done = run_make(checkout, "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def python3(checkout: Path) -> None:
    """The Python that runs here is `python3`."""
    (checkout / "programs").mkdir()
    (checkout / "programs" / "python3").symlink_to(sys.executable)


@pytest.mark.usefixtures("python3")
@pytest.mark.parametrize(
    ("target", "last"),
    [("demo", "bin/python -m halimede.demo"), ("docs", "bin/zensical build --strict -f docs/zensical.toml")],
)
def test_demo_and_documentation_have_small_environments(target: str, last: str, checkout: Path) -> None:
    done = commands(checkout, target)
    assert any(f"environment.py .venv-{target} requirements-{target}.lock" in line for line in done)
    assert not any("requirements.lock" in line for line in done)
    assert done[-1] == f".venv-{target}/{last}"
    made(checkout / ".venv")
    done = commands(checkout, target)
    assert not any("environment.py" in line for line in done)
    assert done[-1] == f".venv/{last}"


def test_a_python_that_is_named_has_an_environment_of_its_own(checkout: Path) -> None:
    done = commands(checkout, "check", f"PYTHON={sys.executable}")
    assert any(f"environment.py .venv-{HERE} requirements.lock" in line for line in done)
    assert f".venv-{HERE}/bin/mypy" in done


@pytest.mark.usefixtures("python3")
@pytest.mark.parametrize("folder", [".venv", ".venv-demo", ".venv-docs"])
def test_an_environment_of_another_python_is_not_used(folder: str, checkout: Path) -> None:
    assert run_make(checkout, "python-version").returncode == 0
    made(checkout / folder, "3.9")
    done = run_make(checkout, ".venv")
    assert done.returncode == 2
    assert done.stdout == f"{folder} has another version of Python than python3, which is {HERE}: remove the folder\n"


@pytest.mark.parametrize("python", ["false", "no-such-python"])
def test_an_older_python_or_none_is_refused(python: str, checkout: Path) -> None:
    done = run_make(checkout, ".venv", f"PYTHON={python}")
    assert done.returncode == 2
    assert "Python 3.11 or newer is needed; name one with make PYTHON=..." in done.stdout


@pytest.mark.parametrize("lock", SIZES)
def test_requirements_of_a_lock_are_installed_with_all_their_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    found = requirements(text)
    assert sum(each.count("--hash=sha256:") for each in found) == text.count("--hash=sha256:")
    names = [name(each) for each in found]
    assert sorted(names) == sorted(set(names))
    assert {"numpy", "click"} <= set(names)


@pytest.mark.parametrize("lock", SIZES)
def test_the_makefile_says_how_large_an_environment_is(lock: str) -> None:
    # The first line of a requirement ends with a backslash, before its hashes.
    texts = re.findall(r"^([a-z0-9].*?) \\$", (ROOT / lock).read_text(), re.MULTILINE)
    installed = [one for one in map(Requirement, texts) if one.marker is None or one.marker.evaluate()]
    files = [file for one in installed for file in distribution(one.name).files or ()]
    assert sum(file.size or 0 for file in files) / 1e9 == pytest.approx(SIZES[lock], rel=0.2)
