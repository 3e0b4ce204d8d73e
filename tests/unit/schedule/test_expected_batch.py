"""The number of requests that closed-loop clients are expected to send together."""

import pytest

from halimede.core.schedule.expected_batch import SPLIT_NS, ExpectedBatch


@pytest.mark.parametrize(
    ("in_model", "slots", "took_ns", "requests"),
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
def test_the_expected_batch_depends_on_slots_and_batch_time(
    in_model: int, slots: int, took_ns: int, requests: int
) -> None:
    expected = ExpectedBatch(max_batch_size=32)
    assert expected.requests == 1
    expected.note(in_model, slots, took_ns)
    assert expected.requests == requests


def test_a_model_that_does_not_batch_expects_no_others() -> None:
    expected = ExpectedBatch(max_batch_size=1)
    expected.note(100, 1, 0)
    assert expected.requests == 1


def test_the_estimate_follows_the_last_batch() -> None:
    expected = ExpectedBatch(max_batch_size=32)
    expected.note(16, 1, 0)
    expected.note(2, 1, 0)
    assert expected.requests == 1
