"""The number of examples of a property test: its own number, or fewer in the profile `quick`."""

from hypothesis import settings

QUICK = "quick"
QUICK_EXAMPLES = 10


def examples(count: int) -> int:
    """For `settings(max_examples=...)`, which a profile does not override."""
    return min(count, QUICK_EXAMPLES) if settings.get_current_profile_name() == QUICK else count
