"""Headers that become request parameters."""

import pytest

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.forwarding import compile_pattern, forwarded_parameters


def test_a_header_is_forwarded_when_its_whole_name_matches_in_any_case() -> None:
    headers = [("X-A", "1"), ("x-b", ""), ("ax-a", "3"), ("X", "4"), ("Other", "5")]
    assert forwarded_parameters(compile_pattern("x-.*"), headers) == {"X-A": "1", "x-b": ""}
    assert forwarded_parameters(compile_pattern("X-A|other"), headers) == {"X-A": "1", "Other": "5"}
    assert forwarded_parameters(compile_pattern(""), headers) == {}


@pytest.mark.parametrize("name", ["priority", "Timeout", "SEQUENCE_ID", "headers", "binary_data_output", "Triton_x"])
def test_a_reserved_name_is_refused_only_where_it_matches(name: str) -> None:
    assert forwarded_parameters(compile_pattern("x-.*"), [(name, "1")]) == {}
    with pytest.raises(InferenceError) as raised:
        forwarded_parameters(compile_pattern(".*"), [("x-a", "1"), (name, "1")])
    assert raised.value == InferenceError(
        ErrorCode.INVALID_ARG, f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    )


def test_a_pattern_that_is_none_says_why() -> None:
    with pytest.raises(ValueError, match=r"Invalid regular expression '\(': "):
        compile_pattern("(")
