"""The reference pages agree with the code, and the site builds without a warning."""

import shutil
import subprocess
import sys
from pathlib import Path

import generate
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", generate.GENERATED)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / "pages" / name).read_text() == generate.GENERATED[name](), "run: make docs"


@pytest.mark.large
def test_the_site_builds(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "pages", tmp_path / "pages")
    shutil.copy(DOCS / "zensical.toml", tmp_path)
    zensical = Path(sys.executable).parent / "zensical"
    done = subprocess.run(
        [zensical, "build", "--strict", "-f", "zensical.toml"],
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    pages = {path.stem for path in (DOCS / "pages").glob("*.md")}
    built = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")} | {"index"}
    assert pages <= built
