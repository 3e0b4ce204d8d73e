"""Execution environments of models."""

import venv
from pathlib import Path

import numpy as np


def make_environment(path: Path) -> None:
    """A virtual environment of the running Python, with its numpy and an additional module."""
    venv.create(path)
    [site] = path.glob("lib/python*/site-packages")
    for package in Path(np.__file__).parent.parent.glob("numpy*"):
        (site / package.name).symlink_to(package)
    (site / "only_here.py").write_text("WORD = 'found'\n")
