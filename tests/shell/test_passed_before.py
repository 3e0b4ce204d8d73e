"""A test that passed is found again by its inputs alone."""

import subprocess
from pathlib import Path

from support.passed_before import record_of


def test_only_a_change_of_the_inputs_needs_another_run(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "input").write_text("1")

    def now(test: str = "test_a") -> Path:
        return record_of(tmp_path, test, ["other"])

    before = now()
    (tmp_path / "other" / "test.py").write_text("1")
    (tmp_path / "ignored").write_text("1")
    assert (now(), now("test_b") == before) == (before, False)

    (tmp_path / "input").write_text("2")
    changed = now()
    (tmp_path / "added").write_text("1")
    assert len({before, changed, now()}) == 3
    (tmp_path / "added").unlink()
    (tmp_path / "input").write_text("1")
    assert now() == before
