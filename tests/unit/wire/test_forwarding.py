"""Headers that become request parameters."""

import pytest

from halimede.core.types import ApiCategory, ErrorCode, InferenceError, Restrictions, Secret
from halimede.core.wire.forwarding import Forwarding, compile_pattern
from support.refusals import error_of


def forwarded(pattern: str, headers: list[tuple[str, str]], restricted: Restrictions = {}) -> dict[str, object]:  # noqa: B006 -- never changed
    return Forwarding(compile_pattern(pattern), restricted).parameters(headers)


def test_a_header_is_forwarded_when_its_whole_name_matches_in_any_case() -> None:
    headers = [("X-A", "1"), ("x-b", ""), ("ax-a", "3"), ("X", "4"), ("Other", "5")]
    assert forwarded("x-.*", headers) == {"X-A": "1", "x-b": ""}
    assert forwarded("X-A|other", headers) == {"X-A": "1", "Other": "5"}
    assert forwarded("", headers) == {}


@pytest.mark.parametrize("name", ["priority", "Timeout", "SEQUENCE_ID", "headers", "binary_data_output", "Triton_x"])
def test_a_reserved_name_is_refused_only_where_it_matches(name: str) -> None:
    assert forwarded("x-.*", [(name, "1")]) == {}
    assert error_of(forwarded, ".*", [("x-a", "1"), (name, "1")]) == InferenceError(
        ErrorCode.INVALID_ARG, f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    )


def test_invalid_pattern_reports_the_reason() -> None:
    with pytest.raises(ValueError, match=r"Invalid regular expression '\(': "):
        compile_pattern("(")


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("(?i)x-.*", ["X-A", "x-b"]),
        ("(?-i)x-.*", ["x-b"]),
        ("(?i)(?-i)x-.*", ["x-b"]),
        ("(?-i)(?i)x-.*", ["X-A", "x-b"]),
        ("(?s-i)X-.*", ["X-A"]),
        ("(?ms-iU)X-.*", ["X-A"]),
        ("(?U)x-.*", ["X-A", "x-b"]),
        ("(?:x-.*)", ["X-A", "x-b"]),
    ],
)
def test_leading_flags_are_those_of_re2(pattern: str, names: list[str]) -> None:
    assert list(forwarded(pattern, [("X-A", "1"), ("x-b", "2")])) == names


@pytest.mark.parametrize("pattern", ["(?q)x", "(?-)x", "(?i-)x", "(?x)("])
def test_flags_unknown_to_re2_are_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="Invalid regular expression"):
        compile_pattern(pattern)


RESTRICTED = {
    ApiCategory.INFERENCE: Secret("infer-key", "open sesame"),
    ApiCategory.TRACE: Secret("triton-grpc-protocol-key", "x"),
}
HEADERS = [("AUTHORIZATION", "a"), ("Infer-Key", "b"), ("triton-grpc-protocol-key", "c"), ("x-a", "d")]


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        (".*", "d"),
        ("x-.*|[a-z-]*", "d"),
        ("authorizatio.", ""),
        ("(x-a|auth)(orization)?", "d"),
        ("authorization", "a"),
        ("^Authorization$", "a"),
        ("(?-i)AUTHORIZATION", "a"),
        (r"x-.*|infer\-key", "bd"),
        ("infer-key|.*", "bd"),
        ("(authorization|infer-key)", "ab"),
        ("(?:x-.*|Authorization)", "ad"),
        ("(x-(a|authorization))|.*", "d"),
        ("(x-)?(authorization|a)|.*", "d"),
        ("triton-grpc-protocol-key|authorization|infer-key|x-a", "abcd"),
        ("triton-grpc-protocol-.*", ""),
    ],
)
def test_secret_headers_are_forwarded_only_by_full_name(pattern: str, values: str) -> None:
    assert "".join(map(str, forwarded(pattern, HEADERS, RESTRICTED).values())) == values


def test_secret_header_is_ordinary_without_restrictions() -> None:
    assert list(forwarded(".*", HEADERS)) == ["Infer-Key", "triton-grpc-protocol-key", "x-a"]
