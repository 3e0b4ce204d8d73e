"""Examples of property tests: their number, which is lower in the profile `quick`, and long lists of events."""

from collections.abc import Sequence
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st

T = TypeVar("T")

QUICK = "quick"
QUICK_EXAMPLES = 10


def examples(count: int) -> int:
    """For `settings(max_examples=...)`, which a profile does not override."""
    return min(count, QUICK_EXAMPLES) if settings.get_current_profile_name() == QUICK else count


def scripts(events: Sequence[T], min_size: int, max_size: int) -> st.SearchStrategy[list[tuple[T, int]]]:
    """Lists of events, each with a number below 2^24.

    They are drawn as bytes: hypothesis needs as long for one draw of a hundred bytes as for one of a number, and three
    draws for each event took far longer than the code under test.
    """

    def read(drawn: bytes) -> list[tuple[T, int]]:
        numbers = [int.from_bytes(drawn[at : at + 4]) for at in range(0, len(drawn) - 3, 4)]
        return [(events[number % 256 * len(events) // 256], number >> 8) for number in numbers]

    return st.binary(min_size=4 * min_size, max_size=4 * max_size).map(read)


def words(alphabets: Sequence[str], min_size: int = 1) -> st.SearchStrategy[str]:
    """Words of at least `min_size` characters, the nth of which is one of the nth alphabet. Each is drawn as bytes."""

    def spell(drawn: bytes) -> str:
        return "".join(alphabet[byte % len(alphabet)] for alphabet, byte in zip(alphabets, drawn, strict=False))

    return st.binary(min_size=min_size, max_size=len(alphabets)).map(spell)
