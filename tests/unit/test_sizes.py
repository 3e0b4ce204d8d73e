"""The bounds of files and classes: what is larger states the reason in its module docstring and is listed here."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 500
MAX_ATTRIBUTES = 20
MAX_METHODS = 30
EXCEPTIONS = {
    "server/halimede/core/config/model_config.py": "as many fields as the protocol's messages",
    "server/halimede/settings.py": "one flat record",
}
FOLDERS = ("server", "operator", "tests", "manifests")


def breaches(source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MAX_LINES:
        yield f"{lines} lines"
    # Parsing every file takes five seconds.
    if "class " not in source or not any(map(may_be_too_large, re.split(r"^(?=class )", source, flags=re.MULTILINE))):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            attributes = len(set(_attributes(node)))
            if methods > MAX_METHODS:
                yield f"{node.name}: {methods} methods"
            if attributes > MAX_ATTRIBUTES:
                yield f"{node.name}: {attributes} attributes"


def may_be_too_large(part: str) -> bool:
    """Whether a part of a file, which begins with a class or the file, has enough names and functions."""
    # A text of several lines is no end of a class, though one of its lines may begin like a class.
    if part.count('"""') % 2 or part.count("def ") > MAX_METHODS:
        return True
    return len(set(re.findall(r"\bself\.(\w+)|^ +(\w+):", part, re.MULTILINE))) > MAX_ATTRIBUTES


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """The annotated names of the class, and what its methods assign to `self`."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
    for each in ast.walk(node):
        is_assigned = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_assigned and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_files_and_classes_are_of_a_size_that_one_can_read() -> None:
    found = {str(path.relative_to(ROOT)): list(breaches(path.read_text())) for path in FILES}
    assert {name: what for name, what in found.items() if what and name not in EXCEPTIONS} == {}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_a_larger_class_has_a_reason_at_the_top_of_its_file(name: str) -> None:
    source = (ROOT / name).read_text()
    assert list(breaches(source)), "the exception is not needed"
    assert EXCEPTIONS[name] in re.sub(r"\s+", " ", ast.get_docstring(ast.parse(source)) or "")


def test_names_of_tests_are_at_most_70_characters_long() -> None:
    found = [name for path in FILES for name in re.findall(r"def test_(\w{71,})\(", path.read_text())]
    assert found == []


def test_what_is_too_large_is_found() -> None:
    methods = "\n".join(f"    def m{number}(self): self.a{number % 21} = 0" for number in range(31))
    assert list(breaches(f"class A:\n{methods}\n" + "\n" * 500)) == [
        "532 lines",
        "A: 31 methods",
        "A: 21 attributes",
    ]
