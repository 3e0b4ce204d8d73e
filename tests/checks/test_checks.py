"""Lint, format, types and import contracts of the whole project, beside the other tests."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_make_check_finds_nothing() -> None:
    """Without its caches mypy takes a minute, and much longer on a busy machine."""
    done = subprocess.run(["make", "check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
