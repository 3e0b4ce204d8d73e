"""The arena compared with a slow model that keeps one flag for each 64 bytes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.shm.arena import ALIGNMENT, FIRST_SEGMENT_BYTES, Arena
from support.examples import Draws, drawn, examples

UNIT = ALIGNMENT


@dataclass
class Obvious:
    """Blocks by segment and offset, and the segments' sizes."""

    sizes: dict[int, int] = field(default_factory=dict)
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)

    def free_runs(self, segment: int) -> list[tuple[int, int]]:
        is_used = [False] * (self.sizes[segment] // UNIT)
        for (number, offset), size in self.blocks.items():
            if number == segment:
                for unit in range(offset // UNIT, (offset + size) // UNIT):
                    assert not is_used[unit], "blocks overlap"
                    is_used[unit] = True
        runs: list[tuple[int, int]] = []
        for unit, used in enumerate([*is_used, True]):
            if not used and (unit == 0 or is_used[unit - 1]):
                runs.append((unit * UNIT, 0))
            if not used:
                start, length = runs[-1]
                runs[-1] = start, length + UNIT
        return runs

    def first_fit(self, size: int) -> tuple[int, int] | None:
        for segment in self.sizes:
            for start, length in self.free_runs(segment):
                if length >= size:
                    return segment, start
        return None

    def holding(self, segment: int, offset: int, size: int) -> int | None:
        for (number, start), length in self.blocks.items():
            if number == segment and start <= offset and offset + size <= start + length:
                return start
        return None


VALUES = {"add": (1, 12), "allocate": (0, 6 * UNIT), "free": (0, 1_000), "holding": (0, 12 * UNIT)}
"""The least and the largest value of each step."""


def step(draws: Draws) -> tuple[str, int]:
    what = draws.pick(tuple(VALUES))
    return what, draws.integer(*VALUES[what])


def steps(draws: Draws) -> list[tuple[str, int]]:
    return [step(draws) for _ in range(draws.below(41))]


@given(drawn(steps, 160))
@settings(max_examples=examples(300), deadline=None)
def test_arena_behaves_like_a_simple_model(steps: list[tuple[str, int]]):
    arena, obvious = Arena(1 << 30), Obvious()
    for what, value in steps:
        match what:
            case "add":
                arena.add(len(obvious.sizes) + 1, value * UNIT)
                obvious.sizes[len(obvious.sizes) + 1] = value * UNIT
            case "allocate":
                size = max(1, -(-value // UNIT)) * UNIT
                expected = obvious.first_fit(size)
                assert arena.allocate(value) == expected
                if expected is not None:
                    obvious.blocks[expected] = size
            case "free" if obvious.blocks:
                block = list(obvious.blocks)[value % len(obvious.blocks)]
                del obvious.blocks[block]
                assert arena.free(*block)
                assert not arena.free(*block)
            case "holding":
                for segment in (*obvious.sizes, 99):
                    for size in (0, 1, UNIT, 3 * UNIT):
                        if value % UNIT or size:  # for an empty range at a border, both neighbours are correct
                            assert arena.holding(segment, value, size) == obvious.holding(segment, value, size)
        runs = [run for segment in obvious.sizes for run in obvious.free_runs(segment)]
        assert arena.blocks == len(obvious.blocks)
        assert arena.size_bytes == sum(obvious.sizes.values())
        assert arena.free_bytes == max((length for _, length in runs), default=0)
    for block in obvious.blocks:
        assert arena.free(*block)
    for segment, size in obvious.sizes.items():
        assert arena.allocate(size) == (segment, 0), "what was freed is one range again"


@given(st.integers(0, 1 << 24), st.lists(st.integers(1, 1 << 23), max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_growth_makes_room_and_keeps_to_the_limit(limit: int, sizes: list[int]):
    arena = Arena(limit)
    segments = 0
    for size in sizes:
        growth = arena.growth(size)
        before = arena.size_bytes
        assert growth % ALIGNMENT == 0
        if not growth:
            assert before + size + ALIGNMENT > limit, "refused only for want of room"
            continue
        segments += 1
        arena.add(segments, growth)
        assert arena.size_bytes <= limit
        assert arena.allocate(size) is not None
    assert segments <= 6, "each doubles the arena or is the last"


@pytest.mark.parametrize("first", [1, 100 << 20])
def test_an_arena_has_few_segments(first: int):
    arena = Arena(256 << 20)
    segments = 1
    arena.add(1, arena.growth(first))
    while growth := arena.growth(64 << 10):
        segments += 1
        arena.add(segments, growth)

    assert arena.size_bytes == 256 << 20
    assert segments <= 9


def test_freed_block_merges_with_adjacent_free_ranges():
    arena = Arena(1 << 20)
    arena.add(1, FIRST_SEGMENT_BYTES)
    blocks = [arena.allocate(FIRST_SEGMENT_BYTES // 4) for _ in range(4)]
    assert arena.allocate(1) is None

    for at in (0, 2, 3, 1):
        block = blocks[at]
        assert block is not None
        assert arena.free(*block)

    assert arena.free_bytes == FIRST_SEGMENT_BYTES


@pytest.mark.parametrize(("segment", "offset"), [(1, 64), (2, 0), (1, -64), (1, 1)])
def test_free_fails_at_an_offset_without_a_block(segment: int, offset: int):
    arena = Arena(1 << 20)
    arena.add(1, FIRST_SEGMENT_BYTES)
    assert arena.allocate(100) == (1, 0)

    assert not arena.free(segment, offset)
    assert arena.blocks == 1
