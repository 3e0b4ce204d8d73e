"""How many examples a property is tried with: those that it names, or few of them in the profile `quick`."""

from hypothesis import settings

QUICK = "quick"
QUICK_EXAMPLES = 10


def examples(count: int) -> int:
    """For `settings(max_examples=...)`, which a profile would not change."""
    return min(count, QUICK_EXAMPLES) if settings.get_current_profile_name() == QUICK else count
