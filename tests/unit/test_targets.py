"""Each test has one target of the Makefile that runs it: that of its mark, or `make test`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
MARKS = {line.partition(":")[0]: line for line in SETTINGS["markers"]}
MAKEFILE = (ROOT / "Makefile").read_text()
GPU_RUN = (ROOT / "tests" / "gpu" / "run.py").read_text()


def test_make_test_leaves_out_every_mark_and_no_other_test() -> None:
    (expression,) = re.findall(r"-m '([^']+)'", SETTINGS["addopts"])
    assert set(expression.split(" and ")) == {f"not {mark}" for mark in MARKS}


def test_each_mark_has_the_target_that_its_description_names() -> None:
    targets = dict(re.findall(r"^([\w-]+):.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    for mark, description in MARKS.items():
        (target,) = re.findall(r"`make ([\w-]+)`", description)
        if mark == "gpu":
            assert "tests/gpu/run.sh" in targets[target]
            assert 'OPTIONS = ("-m", "gpu",' in GPU_RUN
        else:
            assert re.search(rf"pytest .*-m {mark}\b", targets[target]), (mark, target)


def test_the_marks_of_which_a_test_has_one_are_all_marks() -> None:
    text = (ROOT / "tests" / "conftest.py").read_text()
    (listed,) = re.findall(r"^TARGETS = frozenset\(\{([^}]+)\}\)", text, re.MULTILINE)
    assert set(re.findall(r'"(\w+)"', listed)) == set(MARKS)
