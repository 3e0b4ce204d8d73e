"""`make demo` in a fresh folder, without uv: it installs little, runs, and says how to add the rest."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.large
@pytest.mark.timeout(1200)
def test_the_first_demo_in_a_fresh_folder(tmp_path: Path) -> None:
    checkout, programs = tmp_path / "checkout", tmp_path / "programs"
    for name in ("Makefile", "README.md", "LICENSE", "pyproject.toml", "requirements-demo.lock"):
        checkout.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, checkout)
    for name in ("server", "operator", "tests/support"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    programs.mkdir()
    (programs / "python3").symlink_to(Path(sys.executable).resolve())

    outer = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PYTHON"))}
    done = subprocess.run(
        ["make", "demo"],
        cwd=checkout,
        env=outer | {"PATH": f"{programs}:/usr/bin:/bin", "COLUMNS": "140"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    first, *_ = done.stdout.splitlines()
    announced = re.fullmatch(r"Installing (\d+) packages into \.venv-demo: 0\.65 GB of disk; .+", first)
    assert announced is not None, first
    progress = re.findall(rf"^ *\d+ s  (\d+) of {announced[1]}: \S+ to \S+$", done.stdout, re.MULTILINE)
    assert [int(count) for count in progress] == list(range(0, int(announced[1]), 10))
    assert re.search(r"^ *\d+ s  done$", done.stdout, re.MULTILINE)
    assert (checkout / ".venv-demo/bin/halimede").is_file()

    assert re.findall(r"│ ([\w-]+) +│ (?:sklearn|fil) +│", done.stdout) == ["scikit-learn", "XGBoost"]
    assert re.findall(r"^(\w+) is not installed here\. To add it: (.+)$", done.stdout, re.MULTILINE) == [
        (title, f".venv-demo/bin/python -m pip install -e '.[{extra}]'")
        for title, extra in (("PyTorch", "torch"), ("TensorFlow", "tensorflow"), ("OpenVINO", "openvino"))
    ]
