from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.status.merge_patch import merge_patch


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        ({}, {}, {}),
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {}, {"a": None}),
        ({}, {"a": {}}, {"a": {}}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}, {"a": {"c": None, "d": 3}}),
        ({"a": [1, 2]}, {"a": [1]}, {"a": [1]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
    ],
)
def test_a_patch_contains_only_what_changed(old: dict[str, Any], new: dict[str, Any], patch: dict[str, Any]):
    assert merge_patch(old, new) == patch


def merged(old: Any, patch: Any) -> Any:
    """RFC 7386, section 2."""
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


VALUES = st.recursive(
    st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(OBJECTS, OBJECTS)
def test_the_patch_turns_the_old_value_into_the_new_one(old: dict[str, Any], new: dict[str, Any]):
    assert merged(old, merge_patch(old, new)) == new
