"""Checks, units and a few servers on the newest Python that is found here, in an environment that is kept. With the
Python of this run there is nothing more to do."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEWEST_FIRST = ("3.13", "3.12")
"""Versions besides the oldest for which all packages of the lock exist."""
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
SERVERS = ["tests/conformance/test_clients.py", "tests/conformance/test_python_models.py"]
INSTALL_S, TESTS_S = 1800, 1500


def find(version: str) -> str | None:
    """A program that runs this version. Some in the path only tell how to install it."""
    kept_apart = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}"))
    for program in (shutil.which(f"python{version}"), *map(str, kept_apart)):
        if program and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0:
            return program
    return None


def run(command: list[str], limit_s: float) -> None:
    # Not the settings of the run of pytest and make that this is part of.
    others = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout[-10000:]}\n{done.stderr[-10000:]}"


@pytest.mark.large
@pytest.mark.filterwarnings("default:Python")
@pytest.mark.timeout(INSTALL_S + 2 * TESTS_S)
def test_the_newest_python() -> None:
    found = {version: find(version) for version in NEWEST_FIRST if version > THIS}
    lacking = [version for version, program in found.items() if program is None]
    version, python = next(((version, program) for version, program in found.items() if program), (THIS, ""))
    # In the summary of the run, also when tests run in several processes.
    warnings.warn(f"Python {version} is tested; not found here: {', '.join(lacking) or 'none'}", stacklevel=1)
    if version == THIS:
        return
    run(["make", ".venv", f"PYTHON={python}"], INSTALL_S)
    run(["make", "quick", f"PYTHON={python}"], TESTS_S)
    run([f".venv-{version}/bin/python", "-m", "pytest", "-n", "2", *SERVERS], TESTS_S)
