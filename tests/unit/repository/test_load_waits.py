"""Loads that wait for others, and the path from one to another."""

from halimede.core.repository.load_waits import LoadWaits


def test_path_exists_only_along_waits() -> None:
    waits = LoadWaits()
    waits.add("a", ["b", "c"])
    waits.add("c", ["d"])
    assert waits.path("a", "b") == ("a", "b")
    assert waits.path("a", "d") == ("a", "c", "d")
    assert waits.path("d", "a") == ()
    assert waits.path("b", "d") == ()


def test_ended_wait_has_no_path() -> None:
    waits = LoadWaits()
    waits.add("a", ["b"])
    waits.add("a", ["b", "c"])
    waits.remove("a", ["b", "c"])
    assert (waits.path("a", "b"), waits.path("a", "c")) == (("a", "b"), ())
    waits.remove("a", ["b"])
    assert waits.path("a", "b") == ()


def test_model_on_many_paths_is_visited_once() -> None:
    waits = LoadWaits()
    for level in range(100):
        waits.add(f"{level}", [f"{level}l", f"{level}r"])
        waits.add(f"{level}l", [f"{level + 1}"])
        waits.add(f"{level}r", [f"{level + 1}"])
    assert len(waits.path("0", "100")) == 201
    assert waits.path("0", "other") == ()
