"""`make demo`, as a person runs it: it trains, serves, measures, compares and cleans up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_the_demo_shows_the_accuracy_of_the_model_outside_the_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halimede.demo"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ (HTTP|gRPC) +│ +([\d.]+) \(([\d.]+)\)", done.stdout)
    assert [protocol for protocol, _, _ in rows] == ["HTTP", "gRPC"]
    assert all(served == outside and float(served) > 0.9 for _, served, outside in rows)
    for command in ("halimede serve", "curl -s -d", "/metrics"):
        assert command in done.stdout
