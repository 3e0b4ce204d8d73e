"""The summary of a Deployment's replicas that cluster tests compare."""

import pytest

from cluster.scaling import turns_of


@pytest.mark.parametrize(
    ("values", "turns"),
    [
        ([], []),
        ([1], [1]),
        ([1, 3], [1, 3]),
        ([1, 2, 3], [1, 3]),
        ([1, 2, 3, 5, 3], [1, 5, 3]),
        ([1, 3, 2, 3, 1], [1, 3, 2, 3, 1]),
        ([6, 3, 2, 1, 0, 1], [6, 0, 1]),
    ],
)
def test_steps_in_one_direction_are_one(values: list[int], turns: list[int]) -> None:
    assert turns_of(values) == turns
