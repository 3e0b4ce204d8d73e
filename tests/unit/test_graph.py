import pytest

from halimede.core.graph import longest_path, path, reachable

GRAPH = {"a": "bc", "b": "d", "c": "de", "d": "f", "e": "", "f": "", "g": "h", "h": "g"}


@pytest.mark.parametrize(
    ("start", "goal", "expected"),
    [
        ("a", "b", "ab"),
        ("a", "e", "ace"),
        ("a", "f", "abdf"),
        ("g", "h", "gh"),
        ("a", "a", "a"),
        ("f", "a", ""),
        ("b", "e", ""),
        ("a", "unknown", ""),
        ("unknown", "a", ""),
    ],
)
def test_a_path_has_both_ends_and_is_empty_without_one(start: str, goal: str, expected: str) -> None:
    assert path(start, goal, lambda node: GRAPH.get(node, "")) == tuple(expected)


def test_a_path_is_a_shortest_one() -> None:
    edges = {0: (1, 4), 1: (2,), 2: (3,), 3: (4,)}
    assert path(0, 4, lambda node: edges.get(node, ())) == (0, 4)


def test_many_paths_to_one_node_are_searched_once() -> None:
    visited: list[int] = []

    def successors(node: int) -> tuple[int, ...]:
        visited.append(node)
        return (node + 2 - node % 2, node + 3 - node % 2) if node < 200 else ()

    assert len(path(0, 200, successors)) == 101
    assert path(0, -1, successors) == ()
    assert len(visited) <= 2 * 202
    visited.clear()
    assert len(reachable(0, successors)) == len(visited) == 201


@pytest.mark.parametrize(("start", "expected"), [("a", "abcdef"), ("b", "bdf"), ("f", "f"), ("g", "gh")])
def test_reachable_nodes_include_the_start(start: str, expected: str) -> None:
    assert sorted(reachable(start, lambda node: GRAPH.get(node, ""))) == list(expected)


@pytest.mark.parametrize(("start", "expected"), [("a", "acdf"), ("b", "bdf"), ("f", "f"), ("unknown", ("unknown",))])
def test_the_longest_path_ends_where_nothing_follows(start: str, expected: str) -> None:
    assert longest_path(start, lambda node: GRAPH.get(node, "")) == tuple(expected)


def test_the_longest_path_of_many_that_meet_is_found_level_by_level() -> None:
    assert len(longest_path(0, lambda node: (node + 2, node + 3) if node < 200 else ())) == 101
