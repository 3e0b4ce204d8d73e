import pytest

from halimede.core.watching import WATCH_NS, WATCHED_REQUESTS, is_worth_watching


@pytest.mark.parametrize(
    ("processors", "last_ns", "requests", "expected"),
    [
        (2, WATCH_NS - 1, WATCHED_REQUESTS, True),
        (2, WATCH_NS, 1, False),
        (2, 0, WATCHED_REQUESTS + 1, False),
        (1, 0, 1, False),
    ],
)
def test_it_is_worth_it_after_what_came_soon_and_was_small_with_a_processor_to_spare(
    processors: int, last_ns: int, requests: int, expected: bool
):
    assert is_worth_watching(processors, last_ns, requests) is expected
