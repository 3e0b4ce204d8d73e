"""The words in names: the glossaries define those of the project, and replaced ones do not come back."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.documents import MAPS

TOKEN = re.compile(
    r'[rbfu]{0,2}"""(?:\\.|[^\\])*?"""|[rbfu]{0,2}"(?:\\.|[^"\\\n])*"|[rbfu]{0,2}\'(?:\\.|[^\'\\\n])*\'|#.*|([^\W\d]\w*)',
    re.IGNORECASE,
)
"""A text, a comment, or a name, which is the group."""
PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
REPLACED = frozenset(
    [
        "barred",
        "lend",
        "lent",
        "offer",
        "offered",
        "offers",
        "overtaken",
        "place",
        "places",
        "reclaim",
        "rested",
        "resting",
        "seat",
        "seated",
        "seats",
    ]
)
IN_PLACE = re.compile(r"(?<![a-z])in_?place", re.IGNORECASE)


def names_in(source: str) -> set[str]:
    return set(TOKEN.findall(source)) - {""}


def parts_of(name: str) -> list[str]:
    return [part.lower() for part in PART.findall(IN_PLACE.sub("", name))]


def replaced_words(source: str) -> Iterator[str]:
    return (name for name in sorted(names_in(source)) if REPLACED.intersection(parts_of(name)))


def names_by_file(package: str) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(MAPS[package].parent.rglob("*.py"))}


@pytest.mark.parametrize("package", MAPS)
def test_names_have_the_words_of_the_glossary(package: str) -> None:
    glossary = MAPS[package].read_text().partition("## Words\n")[2].partition("\n## ")[0]
    words = re.findall(r"^\| `(\w+)` \|", glossary, re.MULTILINE)
    names = set[str]().union(*map(names_in, names_by_file(package).values()))
    used = {f"_{'_'.join(parts_of(name))}_" for name in names}
    assert 0 < len(words) <= 20
    assert [word for word in words if not any(f"_{word}_" in each for each in used)] == []


@pytest.mark.parametrize("package", MAPS)
def test_names_have_no_replaced_word(package: str) -> None:
    found = {str(path): [*replaced_words(source)] for path, source in names_by_file(package).items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_replaced_word_is_found_in_names_only() -> None:
    source = '''
# A place in a comment.
class SeatMap:
    """A place in a docstring."""

    free_places = replace(self, "place", is_in_place=placement)
'''
    assert [*replaced_words(source)] == ["SeatMap", "free_places"]
