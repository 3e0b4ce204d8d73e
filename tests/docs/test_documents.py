"""The documents: their links, and that each block of commands is run or says why not. test_commands.py runs them."""

import ast
import re
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from support.documents import DOCUMENTS, PAGES, RECORDS, ROOT, RUN, SHOWN, blocks

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMAND = re.compile(
    r"^\s*(?:\$ |sudo |\S*/)?"
    r"(?:apt-get|bash|buildah|cd|cp|curl|docker|export|git|halimede|helm|kubectl|make|mkdir|perf_analyzer|pip|podman|python3?|source|"
    r"tritonserver|trtexec|uv|def|import)"
    r" (?!=)",
    re.MULTILINE,
)
"""The beginning of a line that is a command, or Python."""
NOT_RUN = {
    ("README.md", "run by tests/conformance/test_demo_run.py"): 1,
    ("README.md", "run by .ci/run"): 1,
    ("README.md", "not run: cluster"): 3,
    ("CONTRIBUTING.md", "not run: environment of contributors"): 3,
    ("CONTRIBUTING.md", "not run: gpu"): 1,
    ("alerts.md", "not run: cluster"): 1,
    ("autoscaling-metrics.md", "not run: cluster"): 1,
    ("autoscaling.md", "not run: cluster"): 1,
    ("backend-tensorrt.md", "not run: gpu"): 1,
    ("container.md", "run by tests/packaging/test_image.py"): 4,
    ("debugging.md", "not run: an editor attaches"): 1,
    ("debugging.md", "not run: fragment"): 1,
    ("kubernetes-status.md", "not run: cluster"): 1,
    ("kubernetes.md", "not run: cluster"): 15,
    ("model-stores.md", "not run: fragment"): 1,
    ("model-stores.md", "not run: store"): 1,
    ("python-models.md", "not run: fragment"): 1,
    ("security.md", "run by tests/packaging/test_image.py"): 1,
    ("sequences.md", "run by tests/conformance/test_perf_analyzer.py"): 1,
    ("tuning.md", "not run: network"): 1,
    ("writing-a-backend.md", "not run: fragment"): 1,
}
"""How many blocks of each document test_commands.py does not run, and why. A new one belongs here, after a thought whether it
can be run after all."""


def test_the_blocks_that_are_not_run_are_known() -> None:
    found = Counter(
        (document.name, each.mark)
        for document in DOCUMENTS
        for each in blocks(document)
        if each.mark or each.language == "console"
    )
    assert found == NOT_RUN
    for _, mark in found:
        kind, _, file = mark.rpartition(" ")
        assert kind != "run by" or (ROOT / file).is_file(), file


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_command_hides_in_a_block_that_is_only_shown(document: Path) -> None:
    found = list(blocks(document))
    assert len(found) * 2 == len(re.findall(r"^ *```", document.read_text(), re.MULTILINE)), "a block is not read"
    assert {each.language for each in found} <= RUN | SHOWN
    shown = [each.text for each in found if each.language in SHOWN - {"dockerfile"}]
    assert [text for text in shown if COMMAND.search(text)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_python_that_is_not_run_is_python(document: Path) -> None:
    for each in blocks(document):
        if each.language == "python":
            ast.parse(textwrap.dedent(each.text))


@pytest.mark.parametrize("overview", [ROOT / "README.md", PAGES / "index.md"], ids=lambda path: path.name)
def test_the_overviews_link_every_page(overview: Path) -> None:
    linked = {(overview.parent / target).resolve() for target, _ in LINK.findall(overview.read_text())}
    assert {path.name for path in PAGES.glob("*.md")} - {"index.md"} <= {path.name for path in linked}
    assert overview.parent == PAGES or (PAGES / "index.md") in linked


@pytest.mark.parametrize("document", [*DOCUMENTS, *RECORDS], ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in LINK.findall(document.read_text()):
        if "://" in target:
            continue
        path = document.parent / target if target else document
        assert path.exists(), target
        assert not anchor or anchor in map(anchor_of, HEADING.findall(path.read_text())), f"{target}#{anchor}"


def anchor_of(heading: str) -> str:
    """As on GitHub and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_the_page_on_installation_lists_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"^\| `(\w+)` \|", (PAGES / "install.md").read_text(), re.MULTILINE)
    assert set(listed) == project["optional-dependencies"].keys() - {"demo", "dev", "docs", "operator"}


def test_the_site_lists_every_page() -> None:
    navigation = (PAGES.parent / "zensical.toml").read_text()
    assert [path.name for path in PAGES.glob("*.md") if f'"{path.name}"' not in navigation] == []
