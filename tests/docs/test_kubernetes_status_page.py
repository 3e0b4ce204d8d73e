"""The tables of warnings and of hints in the page on the status agree with the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from halimede_operator.core.pods.failure import Reason
from halimede_operator.core.pods.kubelet_events import START_WARNINGS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "kubernetes-status.md").read_text()
PLACEMENT = ROOT / "operator" / "halimede_operator" / "core" / "placement"
NO_EVENT = {Reason.DEVICE_UNHEALTHY, Reason.DEVICE_LOST, Reason.WORKER_CRASHED}
"""Reasons of which Kubernetes has no warning."""
HINTS_OF = {"explain.py": None, "node_filter.py": "obstacle", "inventory.py": "misconfiguration"}
"""The modules whose texts are hints, with the function whose texts they are; None: all."""


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(heading: str) -> list[list[list[str]]]:
    """Of each row of the section's tables, what each cell has as code."""
    lines = [line for line in section(heading).splitlines() if line.startswith("| `")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split(" | ")] for line in lines]


def hints_of(name: str, function: str | None) -> Iterator[str]:
    """The parts of the texts in a module, with {} for each value. Docstrings are none."""
    tree: ast.AST = ast.parse((PLACEMENT / name).read_text())
    if function is not None:
        tree = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == function)
    docstrings = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
    inner = {id(part) for each in ast.walk(tree) if isinstance(each, ast.JoinedStr) for part in each.values}
    for each in ast.walk(tree):
        if isinstance(each, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in each.values)
        elif isinstance(each, ast.Constant) and isinstance(each.value, str) and id(each) not in docstrings | inner:
            text = each.value
        else:
            continue
        yield from {text, *text.split("; ")}


HINTS = {hint for name, function in HINTS_OF.items() for hint in hints_of(name, function) if re.search("[a-z]", hint)}


def test_warnings_that_are_read_from_events_are_those_of_the_code() -> None:
    listed = {event: cells[2][0] for cells in rows("Warnings of Kubernetes") if len(cells) == 3 for event in cells[0]}
    assert listed == {event: str(reason) for event, reason in START_WARNINGS.items()}


def test_warnings_lead_to_every_reason_that_has_one() -> None:
    named = {reason for cells in rows("Warnings of Kubernetes") for reason in cells[-1]}
    assert named == set(Reason) - NO_EVENT


def test_the_page_has_every_hint_of_the_code() -> None:
    said = section("When no device fits")
    parts = {part.strip(" ;,()") for hint in HINTS for part in hint.split("{}")}
    assert {part for part in parts if re.search("[a-z] [a-z]", part) and part not in said} == set()


def test_every_hint_of_the_page_is_one_of_the_code() -> None:
    known = re.compile("|".join(re.escape(hint.strip()).replace(r"\{\}", ".+") for hint in HINTS))
    hints = [hint for cells in rows("When no device fits") for hint in cells[0]]
    assert [hint for hint in hints if not known.fullmatch(hint)] == []
    assert len(hints) > 30
