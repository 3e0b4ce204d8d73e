"""How many requests make a batch that waits for no more."""

import pytest

from halimede.core.schedule.company import SPLIT_NS, Company


@pytest.mark.parametrize(
    ("requests", "instances", "took_ns", "share"),
    [
        (16, 1, SPLIT_NS - 1, 8),
        (16, 1, SPLIT_NS, 16),
        (16, 3, SPLIT_NS - 1, 4),
        (16, 3, SPLIT_NS, 5),
        (7, 1, SPLIT_NS - 1, 1),
        (3, 1, SPLIT_NS, 1),
        (1, 1, 0, 1),
        (200, 1, SPLIT_NS, 32),
        # All instances died as one of them answered.
        (16, 0, SPLIT_NS, 16),
    ],
)
def test_a_part_for_each_instance_and_one_for_the_server_beside_quick_ones(
    requests: int, instances: int, took_ns: int, share: int
) -> None:
    company = Company(max_batch_size=32)
    assert company.share == 1
    company.note(requests, instances, took_ns)
    assert company.share == share


def test_a_model_that_does_not_batch_waits_for_nobody() -> None:
    company = Company(max_batch_size=1)
    company.note(100, 1, 0)
    assert company.share == 1


def test_the_last_batch_tells() -> None:
    company = Company(max_batch_size=32)
    company.note(16, 1, 0)
    company.note(2, 1, 0)
    assert company.share == 1
