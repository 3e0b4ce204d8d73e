import pytest

from halimede.core.spin import SPIN_NS, SPIN_REQUESTS, SpinPolicy


@pytest.mark.parametrize(
    ("processors", "last_ns", "requests", "expected"),
    [
        (2, SPIN_NS - 1, SPIN_REQUESTS, True),
        (2, SPIN_NS, 1, False),
        (2, 0, SPIN_REQUESTS + 1, False),
        (1, 0, 1, False),
    ],
)
def test_spins_after_small_batches_that_came_soon_with_two_processors(
    processors: int, last_ns: int, requests: int, expected: bool
):
    assert SpinPolicy(True, processors).is_worth(last_ns, requests) is expected


def test_never_spins_when_it_is_off():
    assert not SpinPolicy(False, 2).is_worth(0, 1)
