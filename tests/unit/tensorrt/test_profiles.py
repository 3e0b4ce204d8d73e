import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.backends.tensorrt.profiles import Profile, Range, batch_problem, choose, explain, read_indices
from halimede.core.types import ErrorCode, InferenceError


def profile(index: int, low, usual, high, values=None) -> Profile:
    return Profile(index, {"x": Range(low, usual, high)}, {} if values is None else {"s": Range(*values)})


SMALL = profile(0, (1, 16), (2, 16), (4, 64))
LARGE = profile(1, (1, 16), (8, 64), (8, 64))


@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((1, 16), 0),
        ((4, 64), 1),  # both allow it: 2 + 48 from the small optimum, 4 + 0 from the large one
        ((4, 20), 0),
        ((5, 16), 1),
        ((8, 64), 1),
        ((9, 64), None),
        ((4, 65), None),
        ((4,), None),
        ((0, 16), None),
    ],
)
def test_the_nearest_profile_that_allows_the_shape_is_chosen(shape, index):
    chosen = choose([SMALL, LARGE], {"x": shape}, {})
    assert (None if chosen is None else chosen.index) == index


def test_the_first_profile_wins_a_tie():
    first, second = profile(3, (1,), (2,), (9,)), profile(1, (1,), (6,), (9,))
    assert choose([first, second], {"x": (4,)}, {}) is first
    assert choose([second, first], {"x": (4,)}, {}) is second


def test_values_of_shape_tensors_count_too():
    near = profile(0, (2,), (2,), (2,), ((1, 1), (4, 4), (8, 8)))
    far = profile(1, (2,), (2,), (2,), ((1, 1), (9, 9), (16, 16)))
    choices = [choose([near, far], {"x": (2,)}, {"s": values}) for values in ((4, 5), (8, 8), (9, 9), (17, 1))]
    assert choices == [near, far, far, None]


def test_a_single_profile_must_allow_the_shape_too():
    assert choose([SMALL], {"x": (2, 16)}, {}) is SMALL
    assert choose([SMALL], {"x": (5, 16)}, {}) is None


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5), st.integers(0, 9))
def test_the_choice_is_the_minimum_over_all_that_allow(numbers, size):
    profiles = [profile(at, *((each,) for each in sorted(three))) for at, three in enumerate(numbers)]
    allowed = [
        (abs(middle - size), at) for at, (low, middle, high) in enumerate(map(sorted, numbers)) if low <= size <= high
    ]
    chosen = choose(profiles, {"x": (size,)}, {})
    assert (None if chosen is None else chosen.index) == (min(allowed)[1] if allowed else None)


def test_the_explanation_names_input_profile_and_limits():
    assert explain([SMALL, LARGE], {"x": (9, 16)}, {}) == (
        "profile 0: input 'x' has shape [9,16], expected [1,16] to [4,64]; "
        "profile 1: input 'x' has shape [9,16], expected [1,16] to [8,64]"
    )
    valued = profile(0, (1,), (1,), (1,), ((1,), (2,), (3,)))
    assert explain([valued], {"x": (1,)}, {"s": (4,)}) == "profile 0: input 's' has values [4], expected [1] to [3]"
    many = explain([SMALL] * 9, {"x": (9, 16)}, {})
    assert many.count("profile 0") == 4
    assert many.endswith("; and 5 more profiles")


@pytest.mark.parametrize(
    ("ranges", "most", "missing"),
    [
        ([(1, 8)], 8, None),
        ([(1, 8)], 9, 9),
        ([(2, 8)], 4, 1),
        ([(5, 8), (1, 4)], 8, None),
        ([(6, 8), (1, 4)], 8, 5),
        ([(1, 8), (2, 3)], 8, None),
    ],
)
def test_every_batch_of_the_configuration_needs_a_profile(ranges, most, missing):
    profiles = [profile(at, (low, 1), (low, 1), (high, 1)) for at, (low, high) in enumerate(ranges)]
    problem = batch_problem(profiles, most)
    assert (problem == "") if missing is None else f"a batch of {missing} rows (profile 0: " in problem


def test_profile_indices_of_a_group():
    assert read_indices((), 3, "m_0") == (0,)
    assert read_indices(("2", "0", "2"), 3, "m_0") == (2, 0)
    for text in ("3", "-1", "x", "", "٣", "9" * 5000):
        with pytest.raises(InferenceError, match="the engine has 3 optimization profiles: 0 to 2") as caught:
            read_indices((text,), 3, "m_0")
        assert caught.value.code is ErrorCode.INVALID_ARG
    with pytest.raises(InferenceError, match="the engine has 1 optimization profile: 0"):
        read_indices(("1",), 1, "m_0")
