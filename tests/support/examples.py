"""Examples of property tests: their number, which is lower in the profile `quick`, and how they are drawn."""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

T = TypeVar("T")

QUICK = "quick"
QUICK_EXAMPLES = 10


def examples(count: int) -> int:
    """For `settings(max_examples=...)`, which a profile does not override."""
    return min(count, QUICK_EXAMPLES) if settings.get_current_profile_name() == QUICK else count


def words(alphabets: Sequence[str], min_size: int = 1) -> st.SearchStrategy[str]:
    """Words of at least `min_size` characters, the nth of which is one of the nth alphabet. Each is drawn as bytes."""

    def spell(drawn: bytes) -> str:
        return "".join(alphabet[byte % len(alphabet)] for alphabet, byte in zip(alphabets, drawn, strict=False))

    return st.binary(min_size=min_size, max_size=len(alphabets)).map(spell)


# Printable ASCII, and characters of one to four bytes in UTF-8: the first of each range, and how many.
_CHARACTERS = ((32, 95), (0, 128), (0x80, 0x780), (0x800, 0xD000), (0x10000, 0x10000))


class Draws:
    """Choices that are read from drawn bytes; after the last byte each choice is the first of its values."""

    def __init__(self, drawn: bytes) -> None:
        self._drawn = iter(drawn)

    def below(self, end: int) -> int:
        """A number from 0 to `end` - 1, which is at most 2^16: each as often. Of large ranges draw an `integer`."""
        byte = next(self._drawn, 0)
        return byte * end >> 8 if end <= 16 else (byte << 8 | next(self._drawn, 0)) * end >> 16

    def pick(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], most: int) -> list[T]:
        """Up to `most` of the values, one of them perhaps several times."""
        return [self.pick(values) for _ in range(self.below(most + 1))]

    def script(self, events: Sequence[T], least: int, most: int) -> list[tuple[T, int]]:
        """From `least` to `most` events, each with a number below 2^16."""
        return [(self.pick(events), self.below(1 << 16)) for _ in range(least + self.below(most - least + 1))]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        rest = list(values)
        return [rest.pop(self.below(len(rest))) for _ in values]

    def raw(self, size_bytes: int) -> bytes:
        return bytes(next(self._drawn, 0) for _ in range(size_bytes))

    def integer(self, least: int, most: int) -> int:
        """A number from `least` to `most`: often one of them, one close to 0, or another small one."""
        kind = self.below(8)
        if kind < 2:
            return (least, most)[kind]
        if kind < 5:
            small = self.below(3) - 1 if kind == 2 else self.below(512) - 256
            return max(least, min(most, small))
        return least + int.from_bytes(self.raw(most.bit_length() // 8 + 1)) % (most - least + 1)

    def float(self, width: int) -> float:
        """A number of 32 or 64 bits: often a special one, or with few digits."""
        kind = self.below(4)
        if kind == 0:
            return self.pick((0.0, -0.0, math.inf, -math.inf, math.nan))
        if kind == 1:
            return (self.below(1 << 16) - (1 << 15)) / 64
        value: float = struct.unpack({32: "<f", 64: "<d"}[width], self.raw(width // 8))[0]
        return value

    def text(self, most: int) -> str:
        """Up to `most` characters of any kind."""
        return "".join(self._character() for _ in range(self.below(most + 1)))

    def _character(self) -> str:
        first, count = self.pick(_CHARACTERS)
        return chr(first + self.below(count))


def json_of(draws: Draws, scalar: Callable[[Draws], Any], key: Callable[[Draws], str], levels: int = 3) -> Any:
    """A scalar, or a list or an object with up to four entries, of so many levels."""
    match draws.below(4) if levels else 0:
        case 2:
            return [json_of(draws, scalar, key, levels - 1) for _ in range(draws.below(5))]
        case 3:
            return {key(draws): json_of(draws, scalar, key, levels - 1) for _ in range(draws.below(5))}
    return scalar(draws)


def drawn(make: Callable[[Draws], T], size_bytes: int) -> st.SearchStrategy[T]:
    """What `make` makes of choices in drawn bytes.

    Hypothesis needs as long to draw one choice as to draw all these bytes. Draw all that a test needs with one call:
    hypothesis mutates examples with several draws of bytes, mixes up their sizes, and replaces most bytes by zeros.
    """
    return st.binary(min_size=size_bytes, max_size=size_bytes).map(lambda drawn: make(Draws(drawn)))
