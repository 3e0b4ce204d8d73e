"""`make demo`, as a user runs it: it trains, serves, measures, compares, kills and cleans up."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch


def check_frameworks(shown: str, demo: Path) -> None:
    """The table has a row for each framework, and the accuracies of scikit-learn's and PyTorch's own models."""
    import joblib

    found = {
        title: (accuracy, outside, rate)
        for title, accuracy, outside, rate in re.findall(
            r"│ ([\w-]+) +│ [a-z]+ +│ +([\d.]+) \(([\d.]+)\) │ +([\d.]+) │", shown
        )
    }
    assert list(found) == ["scikit-learn", "XGBoost", "PyTorch", "TensorFlow", "OpenVINO"]
    assert all(served == outside and float(served) > 0.9 for served, outside, _ in found.values())
    assert all(float(rate) > 0 for _, _, rate in found.values())

    with np.load(demo / "digits/held_out.npz") as arrays:
        images, digits = arrays["images"], arrays["digits"]
    forest = joblib.load(demo / "sklearn/models/digits_sklearn/1/model.joblib")
    assert found["scikit-learn"][0] == f"{(forest.predict(images) == digits).mean():.4f}"
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", FutureWarning)
        network = torch.jit.load(demo / "torch/models/digits_torch/1/model.pt")
        answered = network(torch.from_numpy(images)).numpy().argmax(axis=1)
    assert found["PyTorch"][0] == f"{(answered == digits).mean():.4f}"


@pytest.mark.large
@pytest.mark.timeout(360)
def test_the_demo_compares_answers_and_survives_a_killed_process(tmp_path: Path) -> None:
    # A terminal of 140 columns, so that no cell of a table is cut.
    done = subprocess.run(
        [sys.executable, "-m", "halimede.demo"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=320,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"│ (HTTP|gRPC) +│ +([\d.]+) \(([\d.]+)\)", done.stdout)
    assert [protocol for protocol, _, _ in rows] == ["HTTP", "gRPC"]
    assert all(served == outside and float(served) > 0.9 for _, served, outside in rows)

    check_frameworks(done.stdout, tmp_path / ".demo")

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
