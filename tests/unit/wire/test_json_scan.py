"""The arrays of a document are found and taken out, in steps."""

import json
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.json_scan import BLOCK_BYTES, check_depth, load_json, scan_steps
from halimede.core.wire.steps import run
from support.refusals import error_of


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def scan_refusal(text: bytes, block_bytes: int = BLOCK_BYTES) -> InferenceError:
    return error_of(run, scan_steps(text, block_bytes))


def test_only_arrays_inside_of_one_other_array_are_taken_out() -> None:
    text = b'{"a":[1],"inputs":[{"shape":[2,3],"parameters":{"p":[4]},"data":[[1],"]"]},[7]],"b":{"c":{"d":[5]}}}'
    layout = run(scan_steps(text))
    assert layout.skeleton == (
        b'{"a":[1],"inputs":[{"shape":[0],"parameters":{"p":[1]},"data":[2]},[3]],"b":{"c":{"d":[5]}}}'
    )
    spans = [text[opened : closed + 1] for opened, closed in layout.spans]
    assert spans == [b"[2,3]", b"[4]", b'[[1],"]"]', b"[7]"]


@pytest.mark.parametrize("block_bytes", [1, 5, 16, 1000])
def test_outermost_arrays_of_members_are_taken_out_and_their_elements_counted(block_bytes: int) -> None:
    text = b'{"a":[1,[2,3],",",4,  5],"b":{"c":{"d":[[6]]}},"e":[]}'
    layout = run(scan_steps(text, block_bytes, members=True))
    assert layout.skeleton == b'{"a":[0],"b":{"c":{"d":[1]}},"e":[2]}'
    assert layout.commas == [4, 0, 0]


def test_long_values_of_members_are_taken_out_but_not_long_names() -> None:
    text = b'{"%b":"%b","b":["%b",{"c":"%b"}],"d":"short"}' % (b"n" * 100, b"v" * 100, b"w" * 100, b"x" * 100)
    layout = run(scan_steps(text, 32, members=True))
    assert layout.skeleton == b'{"%b":[0],"b":[1],"d":"short"}' % (b"n" * 100)
    assert layout.commas == [None, 1]
    assert [run(layout.parse_steps(place)) for place in (0, 1)] == ["v" * 100, ["w" * 100, {"c": "x" * 100}]]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1000])
def test_brackets_in_strings_are_text_for_any_block_size(block_bytes: int) -> None:
    text = rb'{"\\":[{"k[\"":["]\\\"[",1,"\\\\"],"}":"{"}]}'
    layout = run(scan_steps(text, block_bytes))
    assert layout.skeleton == rb'{"\\":[{"k[\"":[0],"}":"{"}]}'


@settings(deadline=None)
@example(b'"\\[\\', 1)
@given(st.lists(st.sampled_from([b"\\", b'"', b"[", b"]", b"a", b","]), max_size=40).map(b"".join), st.integers(1, 8))
def test_scan_result_does_not_depend_on_the_block_size(content: bytes, block_bytes: int) -> None:
    text = b'{"inputs":[{"data":["' + content + b'"]}]}'

    def result_of(block_bytes: int) -> object:
        try:
            layout = run(scan_steps(text, block_bytes))
        except InferenceError as error:
            return error.code
        return layout.skeleton, layout.spans

    assert result_of(block_bytes) == result_of(1000)


@pytest.mark.parametrize("text", [b"[" * 101 + b"]" * 101, b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 1_000_000])
def test_nesting_has_a_limit(text: bytes) -> None:
    error = invalid("JSON nesting depth exceeds maximum allowed limit (100)")
    assert scan_refusal(text) == error
    assert error_of(check_depth, text) == error


def test_nesting_up_to_the_limit_and_brackets_in_strings_are_fine() -> None:
    check_depth(b"[" * 100 + b"]" * 100)
    check_depth(b'["' + b"[" * 1000 + b'"]')
    check_depth(b"[" + b",".join([b"[]"] * 1000) + b"]")


@pytest.mark.parametrize("text", [b'{"inputs":[{"data":[1}]}', b"]", b'{"a":"', b'{"inputs":[{"data":[1', b'"\\"'])
def test_brackets_and_quotes_must_match(text: bytes) -> None:
    assert scan_refusal(text).message.startswith("failed to parse the request JSON buffer: ")
    assert scan_refusal(text, 3).message.startswith("failed to parse the request JSON buffer: ")


@pytest.mark.parametrize("text", [b"]", b"}", b'{"a":[]]}'])
def test_a_closing_bracket_too_many_is_named(text: bytes) -> None:
    assert scan_refusal(text) == invalid("failed to parse the request JSON buffer: a closing bracket too many. at 0")


def test_content_beside_the_data_is_limited() -> None:
    error = invalid(
        "the request JSON has more than 262144 bytes beside the 'data' of its inputs and white space;"
        " send large values as tensors"
    )
    assert scan_refusal(b'{"id":"' + b"x" * 300_000 + b'"}') == error
    assert scan_refusal(b'{"inputs":[' + b'{"data":[]},' * 30_000) == error
    run(scan_steps(b'{"inputs":[{"data":[' + b" " * 1_000_000 + b"]}]}"))


def test_arrays_that_are_not_data_count_once_and_are_read_in_steps() -> None:
    layout = run(scan_steps(b'{"a":["' + b"x" * 60 + b'"]}', skeleton_limit=100, members=True))
    run(layout.parse_steps(0))
    run(layout.rest_steps())
    with pytest.raises(InferenceError, match="more than 100 bytes"):
        run(layout.parse_steps(0))
    layout = run(scan_steps(b'{"inputs":[' + b"[],".join([b""] * 3000) + b"[]]}"))
    assert sum(1 for _ in layout.rest_steps()) > 10


def test_a_long_string_beside_the_data_is_not_copied() -> None:
    text = b'{"id":"' + b"x" * 4_000_000 + b'"}'
    tracemalloc.start()
    with pytest.raises(InferenceError):
        run(scan_steps(text))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


PIECES = [b" ", b"\n", b"\t", b"\r\n  ", b"a", b'\\"', b"\\\\", b"[", b"{", b",", b"    "]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join),
    st.lists(st.sampled_from([b" ", b"\n", b"\t", b"\r"]), max_size=30).map(b"".join),
    st.integers(1, 40),
)
def test_white_space_is_shortened_outside_of_strings_alone(content: bytes, space: bytes, block_bytes: int) -> None:
    string = b'"' + content.replace(b"\n", b"n").replace(b"\t", b"t").replace(b"\r", b"r") + b'"'
    marked = b'{|"id"|:|%b|,|"inputs"|:|[|{|"name"|:|%b|}|]|,|"n"|:|-1|}' % (string, string)
    text = marked.replace(b"|", space)
    for members in (False, True):
        skeleton = run(scan_steps(text, block_bytes, members=members)).skeleton
        if not members:
            assert json.loads(skeleton) == json.loads(text)
        # A block ends in each run at most.
        assert len(skeleton) <= len(marked) + len(text) // block_bytes + 1


def test_white_space_is_limited_by_the_body_alone_and_read_in_steps() -> None:
    space = b" \n" * (4 << 20)
    text = b'{"id":%b"a  b"%b,"inputs":%b[{"shape":[%b1%b],"data":[%b1]}%b]}' % ((space[: 1 << 20],) * 7)
    layout = run(scan_steps(text))
    assert json.loads(layout.skeleton) == {"id": "a  b", "inputs": [{"shape": [0], "data": [1]}]}
    assert run(layout.parse_steps(0)) == [1]
    steps = sum(1 for _ in scan_steps(b'{"id":"a"' + space + b"}"))
    assert steps >= len(space) // BLOCK_BYTES


def test_white_space_between_two_numbers_keeps_them_apart() -> None:
    text = b'{"id":1' + b" " * 1000 + b"2}"
    with pytest.raises(InferenceError):
        load_json(run(scan_steps(text)).skeleton)
    # A line end in a string is an error, wherever it stands.
    layout = run(scan_steps(b'[["a  \n"]]', 4))
    with pytest.raises(InferenceError):
        run(layout.parse_steps(0))
