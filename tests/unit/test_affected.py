"""Which tests `make affected` runs after a change."""

import json
from pathlib import Path

import pytest

import affected.choose
from affected.choose import Choice, by_room, choose, distances, imports_of, with_fixtures

ROOT = Path(__file__).parents[2]
ROOMS = json.loads(Path(affected.choose.__file__).with_name("rooms.json").read_text())
MODULES = {"a.b": "server/a/b.py", "a.c": "server/a/c.py", "support.d": "tests/support/d.py"}
GRAPH = {
    "server/a.py": frozenset[str](),
    "server/b.py": frozenset({"server/a.py"}),
    "tests/near.py": frozenset({"server/a.py"}),
    "tests/far.py": frozenset({"server/b.py"}),
    "tests/other.py": frozenset({"server/other.py"}),
    "tests/whole.py": frozenset[str](),
}
TESTS = ["tests/near.py", "tests/far.py", "tests/other.py", "tests/whole.py"]


@pytest.mark.parametrize(
    ("source", "files"),
    [
        ("import a.b, a.c as d\n", {"server/a/b.py", "server/a/c.py"}),
        ("from a.b import x\n", {"server/a/b.py"}),
        ("from a import b\n", {"server/a/b.py"}),
        ("from a import (\n    b,\n    c,\n)\n", {"server/a/b.py", "server/a/c.py"}),
        ("def f():\n    from support.d import x\n", {"tests/support/d.py"}),
        ("import os, numpy as np\nfrom . import b\n# import a.b\nx = 'from a'\n", set()),
    ],
)
def test_imports_are_found_in_each_form(source: str, files: set[str]) -> None:
    assert imports_of(source, "server/x.py", MODULES) == files


def test_a_file_does_not_import_itself() -> None:
    assert imports_of("import a.b", "server/a/b.py", MODULES) == set()


def test_distances_count_imports_also_in_a_circle() -> None:
    graph = {**GRAPH, "server/a.py": frozenset({"tests/far.py"})}
    assert distances(["server/a.py"], graph) == {
        "server/a.py": 0, "server/b.py": 1, "tests/near.py": 1, "tests/far.py": 2,
    }  # fmt: skip


def test_a_test_has_the_imports_of_the_fixtures_of_its_folder() -> None:
    fixtures, test = "tests/http/conftest.py", "tests/http/test_x.py"
    graph = {fixtures: frozenset({"server/a.py"}), test: frozenset({"server/b.py"}), "tests/y.py": frozenset[str]()}
    assert with_fixtures(graph) == {**graph, test: {"server/b.py", "server/a.py", fixtures}}


def test_the_deepest_room_counts() -> None:
    rooms = {"server/": ["all"], "server/http/": ["http"], "operator/": ["operator"]}
    assert by_room(["server/http/x.py", "server/x.py", "docs/x.md"], rooms) == ["http", "all"]


def chosen(changed: list[str], limit_s: float, **seconds: float) -> Choice:
    costs = {test: seconds.get(Path(test).stem, 1.0) for test in TESTS}
    return choose(changed, TESTS, GRAPH, {"server/": ["tests/whole.py", "tests/gone.py"]}, costs, limit_s)


def test_direct_tests_run_first_then_those_of_the_room_then_the_others() -> None:
    assert chosen(["server/a.py"], 10) == Choice(("tests/near.py", "tests/whole.py", "tests/far.py"), ())
    assert chosen(["tests/other.py"], 10) == Choice(("tests/other.py",), ())


def test_what_is_beyond_the_time_is_left_out_and_a_cheaper_test_still_runs() -> None:
    assert chosen(["server/a.py"], 2) == Choice(("tests/near.py", "tests/whole.py"), ("tests/far.py",))
    assert chosen(["server/a.py"], 2, whole=5) == Choice(("tests/near.py", "tests/far.py"), ("tests/whole.py",))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_and_its_tests_exist(room: str) -> None:
    assert list(ROOT.glob(f"{room}*")), room
    assert [test for test in ROOMS[room] if not (ROOT / test).exists()] == []
