"""`make demo`, as a user runs it: it trains, serves, measures, compares, kills and cleans up."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(240)
def test_the_demo_compares_answers_and_survives_a_killed_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "halimede.demo"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ (HTTP|gRPC) +│ +([\d.]+) \(([\d.]+)\)", done.stdout)
    assert [protocol for protocol, _, _ in rows] == ["HTTP", "gRPC"]
    assert all(served == outside and float(served) > 0.9 for _, served, outside in rows)

    *before, after = re.findall(
        r"  (\w+)\.jpg \([\d,]+ bytes\) to 224 x 224 x 3 in \d+ ms: as opencv does here", done.stdout
    )
    assert (before, after) == (["china", "flower"], "flower")
    assert re.search(r"  21 answers, the first after \d+ ms, the last after \d+ ms: as opencv does here", done.stdout)
    killed = re.search(r"Process (\d+) killed. The log says: instance 'photos_0_0': its process is gone", done.stdout)
    answered = re.search(r"answered by process (\d+); the server is still process (\d+)", done.stdout)
    assert killed is not None
    assert answered is not None
    assert len({killed[1], answered[1], answered[2]}) == 3

    readings = re.findall(
        r"  (\w+), [\w ]+: 60 digits in \d+ ms, (\d+) read right; china.jpg looks like a \w+, flower.jpg looks like a \w+:"
        r" as the same steps do here",
        done.stdout,
    )
    assert [model for model, _ in readings] == ["read_digits", "read_digits_bls"]
    assert all(int(correct) > 50 for _, correct in readings)
    assert re.search(r"'spell' reads \d{4} aloud in 4 server-sent events: (\w+ ?){4}", done.stdout)
    assert re.search(
        r"'ward_mean' .* in 34 wards, a sequence of 13 patients each, all at the same time \(batches by size: [^)]+\): as "
        r"each ward alone does here",
        done.stdout,
    )

    for command in ("halimede serve", "curl -s -d", "/metrics"):
        assert command in done.stdout
