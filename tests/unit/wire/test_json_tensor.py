"""Arrays of a document: found, cut in pieces, read and printed in steps."""

import json
import math
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.tensor import join_bytes, tensor_from_array
from halimede.core.wire.json_members import scan_members_steps
from halimede.core.wire.json_tensor import (
    BLOCK_BYTES,
    PRINT_ELEMENTS,
    array_steps,
    check_depth,
    load_json,
    pack,
    pack_steps,
    print_steps,
    run,
    scan_steps,
)

COUNT_ERROR = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def document(array: str) -> bytes:
    return f'{{"inputs":[{{"data":{array}}}]}}'.encode()


def read(array: str, datatype: DataType, count: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The array as a large document's would be read."""
    text = document(array)
    layout = run(scan_steps(text, block_bytes))
    return bytes(run(pack_steps("x", datatype, count, text, layout, layout.spans[0], block_bytes)))


def refusal(array: str, datatype: DataType, count: int, block_bytes: int = BLOCK_BYTES) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        read(array, datatype, count, block_bytes)
    return caught.value


def scan_refusal(text: bytes, block_bytes: int = BLOCK_BYTES) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        run(scan_steps(text, block_bytes))
    return caught.value


# ---- Finding arrays


def test_only_arrays_inside_of_inputs_are_taken_out() -> None:
    text = b'{"a":[1],"inputs":[{"shape":[2,3],"parameters":{"p":[4]},"data":[[1],"]"]},[7]],"b":{"c":{"d":[5]}}}'
    layout = run(scan_steps(text))
    assert layout.skeleton == (
        b'{"a":[1],"inputs":[{"shape":[0],"parameters":{"p":[4]},"data":[1]},[7]],"b":{"c":{"d":[2]}}}'
    )
    assert [text[opened : closed + 1] for opened, closed in layout.spans] == [b"[2,3]", b'[[1],"]"]', b"[5]"]


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1000])
def test_brackets_in_strings_are_text_for_any_block_size(block_bytes: int) -> None:
    text = rb'{"\\":[{"k[\"":["]\\\"[",1,"\\\\"],"}":"{"}]}'
    layout = run(scan_steps(text, block_bytes))
    assert layout.skeleton == rb'{"\\":[{"k[\"":[0],"}":"{"}]}'


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"\\", b'"', b"[", b"]", b"a", b","]), max_size=40).map(b"".join), st.integers(1, 8))
def test_scan_result_does_not_depend_on_the_block_size(content: bytes, block_bytes: int) -> None:
    text = b'{"inputs":[{"data":["' + content + b'"]}]}'

    def verdict(block_bytes: int) -> object:
        try:
            layout = run(scan_steps(text, block_bytes))
        except InferenceError as error:
            return error.code
        return layout.skeleton, layout.spans

    assert verdict(block_bytes) == verdict(1000)


@pytest.mark.parametrize("text", [b"[" * 101 + b"]" * 101, b'{"a":' * 101 + b"1" + b"}" * 101, b"[" * 1_000_000])
def test_nesting_has_a_limit(text: bytes) -> None:
    error = invalid("JSON nesting depth exceeds maximum allowed limit (100)")
    assert scan_refusal(text) == error
    with pytest.raises(InferenceError) as caught:
        check_depth(text)
    assert caught.value == error


def test_nesting_up_to_the_limit_and_brackets_in_strings_are_fine() -> None:
    check_depth(b"[" * 100 + b"]" * 100)
    check_depth(b'["' + b"[" * 1000 + b'"]')
    check_depth(b"[" + b",".join([b"[]"] * 1000) + b"]")


@pytest.mark.parametrize("text", [b'{"inputs":[{"data":[1}]}', b"]", b'{"a":"', b'{"inputs":[{"data":[1', b'"\\"'])
def test_brackets_and_quotes_must_match(text: bytes) -> None:
    assert scan_refusal(text).message.startswith("failed to parse the request JSON buffer: ")
    assert scan_refusal(text, 3).message.startswith("failed to parse the request JSON buffer: ")


def test_content_beside_the_data_is_limited() -> None:
    error = invalid(
        "the request JSON has more than 262144 bytes beside the 'data' of its inputs and white space;"
        " send large values as tensors"
    )
    assert scan_refusal(b'{"id":"' + b"x" * 300_000 + b'"}') == error
    assert scan_refusal(b'{"inputs":[' + b'{"data":[]},' * 30_000) == error
    run(scan_steps(b'{"inputs":[{"data":[' + b" " * 1_000_000 + b"]}]}"))


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
    for scan in (scan_steps, scan_members_steps):
        skeleton = run(scan(text, block_bytes)).skeleton
        if scan is scan_steps:
            assert json.loads(skeleton) == json.loads(text)
        # A block ends in each run at most.
        assert len(skeleton) <= len(marked) + len(text) // block_bytes + 1


def test_white_space_is_limited_by_the_body_alone_and_read_in_steps() -> None:
    space = b" \n" * (4 << 20)
    text = b'{"id":%b"a  b"%b,"inputs":%b[{"shape":[%b1%b],"data":[%b1]}%b]}' % ((space[: 1 << 20],) * 7)
    layout = run(scan_steps(text))
    assert json.loads(layout.skeleton) == {"id": "a  b", "inputs": [{"shape": [0], "data": [1]}]}
    opened, closed = layout.spans[0]
    assert json.loads(run(array_steps(memoryview(text), opened, closed, 1000, BLOCK_BYTES))) == [1]
    steps = sum(1 for _ in scan_steps(b'{"id":"a"' + space + b"}"))
    assert steps >= len(space) // BLOCK_BYTES


def test_white_space_between_two_numbers_keeps_them_apart() -> None:
    text = b'{"id":1' + b" " * 1000 + b"2}"
    with pytest.raises(InferenceError):
        load_json(run(scan_steps(text)).skeleton)
    # A line end in a string is an error, wherever it stands.
    array = b'["a  \n"]'
    with pytest.raises(InferenceError):
        load_json(run(array_steps(memoryview(array), 0, len(array) - 1, 1000, 4)))


# ---- Reading


@pytest.mark.parametrize("block_bytes", [16, 17, 33, 1000])
def test_any_nesting_is_flattened(block_bytes: int) -> None:
    array = "[[1,2],[[3],[],4], 5,\n[[[6,[7,8]]]],[],[[]]]"
    expected = np.arange(1, 9, dtype="<i2").tobytes()
    assert read(array, DataType.INT16, 8, block_bytes) == expected
    assert pack("x", DataType.INT16, 8, json.loads(array)) == expected


numbers = [t for t in DataType if t.itemsize and t.name not in ("FP16", "BF16", "BOOL")]
KIND = {"U": "unsigned-integer", "I": "signed-integer", "F": "double"}


@pytest.mark.parametrize("datatype", numbers, ids=lambda datatype: datatype.name)
@pytest.mark.parametrize("element", ["true", '"1"', "null", "{}", '{"a":[1]}'])
def test_elements_of_another_kind_are_refused(datatype: DataType, element: str) -> None:
    kind = KIND[datatype.name[0]]
    wrong = "number" if kind == "double" else kind
    expected = invalid(f"Unable to parse 'data': attempt to access JSON non-{wrong} as {kind}")
    assert refusal(f"[1,{element}]", datatype, 2) == expected
    with pytest.raises(InferenceError) as caught:
        pack("x", datatype, 2, orjson.loads(f"[1,{element}]"))
    assert caught.value == expected


def test_booleans_and_strings_take_nothing_else() -> None:
    assert read("[true,false]", DataType.BOOL, 2) == b"\1\0"
    assert refusal("[true,1]", DataType.BOOL, 2) == invalid(
        "Unable to parse 'data': attempt to access JSON non-boolean as boolean"
    )
    assert refusal('["a",1]', DataType.BYTES, 2) == invalid(
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
    )


@pytest.mark.parametrize("datatype", [t for t in numbers if t.name[0] in "UI"], ids=lambda datatype: datatype.name)
def test_integers_reach_their_limits_and_never_wrap(datatype: DataType) -> None:
    limits = np.iinfo(datatype.dtype)
    expected = np.array([limits.min, limits.max], datatype.dtype).tobytes()
    assert read(f"[{limits.min},{limits.max}]", datatype, 2) == expected
    for value in (limits.min - 1, limits.max + 1, -(10**30), 10**30):
        error = refusal(f"[0,{value}]", datatype, 2)
        assert (error.code, error.message[:23]) == (ErrorCode.INVALID_ARG, "Unable to parse 'data':")
    assert refusal("[1.0]", datatype, 1).message.startswith("Unable to parse 'data': attempt to access JSON non-")
    assert refusal("[1e2]", datatype, 1).message.startswith("Unable to parse 'data': attempt to access JSON non-")


def test_an_integer_out_of_range_is_named() -> None:
    assert refusal("[1,300]", DataType.UINT8, 2) == invalid(
        "Unable to parse 'data': 300 of input 'x' is out of range for datatype UINT8, 0 to 255"
    )


@pytest.mark.parametrize("count", [0, 2, 4, 2**40, 2**62])
def test_a_count_that_does_not_match_is_refused(count: int) -> None:
    assert refusal("[1,2,3]", DataType.FP32, count) == invalid(COUNT_ERROR)
    assert refusal('["1","2",["3"]]', DataType.BYTES, count, 16) == invalid(COUNT_ERROR)


def test_declared_count_allocates_nothing() -> None:
    text = document("[" + "1," * 100_000 + "1]")
    layout = run(scan_steps(text))
    tracemalloc.start()
    with pytest.raises(InferenceError):
        run(pack_steps("x", DataType.FP64, 2**40, text, layout, layout.spans[0]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_floats_are_doubles_rounded_to_the_datatype() -> None:
    array = "[0.1,1,-0.0,1e39,18446744073709551616,1e-400,3.4028235e38]"
    values = [0.1, 1, -0.0, 1e39, 2**64, 0, 3.4028235e38]
    assert read(array, DataType.FP64, 7) == np.array(values, "<f8").tobytes()
    with np.errstate(over="ignore"):
        assert read(array, DataType.FP32, 7) == np.array(values).astype("<f4").tobytes()


def test_a_number_beyond_doubles_is_refused() -> None:
    assert refusal("[1e999]", DataType.FP64, 1).message.startswith(
        "failed to parse the request JSON buffer: Number too big to be stored in double. at "
    )


@pytest.mark.parametrize("block_bytes", [16, 1000])
def test_nan_and_infinity_are_floats_as_in_triton(block_bytes: int) -> None:
    array = "[NaN,1,[-Infinity],Infinity, 0,-1.5]"
    values = [math.nan, 1, -math.inf, math.inf, 0, -1.5]
    assert read(array, DataType.FP32, 6, block_bytes) == np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    "array",
    [
        *("[NaN,null]", "[NaN,true]", "[NaN,false]", '[NaN,"null"]'),
        *("[NaN1]", "[-NaN]", "[+Infinity]", "[--Infinity]", "[nuNaNll]"),
    ],
)
def test_invalid_words_beside_nan_are_refused(array: str) -> None:
    assert refusal(array, DataType.FP32, 2).code is ErrorCode.INVALID_ARG


def test_nan_is_refused_as_integer_and_string() -> None:
    assert refusal("[NaN]", DataType.INT32, 1).code is ErrorCode.INVALID_ARG
    assert refusal("[NaN]", DataType.BYTES, 1).code is ErrorCode.INVALID_ARG
    assert read('["NaN"]', DataType.BYTES, 1) == join_bytes(["NaN"])


text_values = st.lists(st.text(max_size=60), max_size=12)


@settings(deadline=None)
@given(text_values, st.integers(16, 70), st.booleans())
def test_strings_of_any_length_in_pieces(values: list[str], block_bytes: int, ascii_only: bool) -> None:
    array = json.dumps(values, ensure_ascii=ascii_only)
    assert read(array, DataType.BYTES, len(values), block_bytes) == join_bytes(values)


@pytest.mark.parametrize(
    "unit", ["\\\\", "\\n", "\\u00e9", "\\ud83d\\ude00", "€", "😀", "a\\\\", "\\\\u1234", "\\\\\\ud83d\\ude00"]
)
@pytest.mark.parametrize("block_bytes", [16, 17, 18, 19, 20, 21, 22, 23])
def test_a_long_string_is_never_cut_inside_a_character(unit: str, block_bytes: int) -> None:
    inside = unit * 40
    text = json.loads(f'"{inside}"')
    expected = join_bytes(["a", text, "b"])
    for before in ("", " " * 50):
        array = f'["a",{before}["{inside}"]{before},"b"]'
        assert read(array, DataType.BYTES, 3, block_bytes) == expected


@pytest.mark.parametrize("bad", ["\\ud83d", "\\ude00", "\\x", "\n", "\x00", '"', "\\u12g"])
@pytest.mark.parametrize("place", [0, 35, 70])
def test_invalid_long_string_is_refused(bad: str, place: int) -> None:
    inside = "a" * place + bad + "a" * (70 - place)
    assert refusal(f'["{inside}","b"]', DataType.BYTES, 2, 16).code is ErrorCode.INVALID_ARG


@pytest.mark.parametrize(
    "array", ['["{0}" "b"]', '["{0}"1]', '[1"{0}"]', '[[]"{0}"]', '["{0}"[]]', '["{0}",]', '[,"{0}"]', '["{0}"}}']
)
def test_long_string_must_be_a_single_element(array: str) -> None:
    assert refusal(array.format("a" * 100), DataType.BYTES, 1, 16).code is ErrorCode.INVALID_ARG


def test_a_long_string_among_numbers_is_of_the_wrong_kind() -> None:
    assert refusal('["' + "a" * 100 + '"]', DataType.FP32, 1, 16) == invalid(
        "Unable to parse 'data': attempt to access JSON non-number as double"
    )


def test_only_numbers_have_a_maximum_length_not_white_space() -> None:
    blanks = " \t\n\r" * 50_000
    assert read(f"[{blanks}1{blanks},{blanks}2{blanks}]", DataType.UINT8, 2) == b"\1\2"
    assert refusal(f"[1{blanks}2]", DataType.UINT8, 1).message.startswith("failed to parse")
    assert refusal("[" + "1" * 200_000 + "]", DataType.FP32, 1).message.startswith(
        "failed to parse the request JSON buffer: a value of more than 65536 bytes that is not a string. at "
    )


def steps_of(array: str, datatype: DataType, count: int) -> Iterator[int]:
    """How many elements the tensor may have gained in each step."""
    text = document(array)
    layout = run(scan_steps(text))
    yield from (1 for _ in pack_steps("x", datatype, count, text, layout, layout.spans[0]))


def test_a_large_array_is_read_in_many_steps() -> None:
    count = 200_000
    assert sum(steps_of("[" + "1," * (count - 1) + "1]", DataType.FP32, count)) >= 2 * count // (2 * BLOCK_BYTES)
    assert sum(1 for _ in scan_steps(document("[" + "1," * count + "1]"))) >= 2 * count // BLOCK_BYTES
    assert sum(steps_of('["' + "x" * 1_000_000 + '"]', DataType.BYTES, 1)) >= 1_000_000 // BLOCK_BYTES


# ---- Printing


def printed(datatype: DataType, values: Any) -> str:
    tensor = tensor_from_array("y", datatype, np.array(values, datatype.dtype))
    return b"".join(run(print_steps(tensor))).decode()


def test_floats_are_printed_as_doubles() -> None:
    assert printed(DataType.FP32, [[0.1, 1], [-0.0, 16777216]]) == "[0.10000000149011612,1.0,-0.0,16777216.0]"
    assert printed(DataType.FP64, [0.1, -2]) == "[0.1,-2.0]"


def test_nan_and_infinity_are_printed_as_triton_prints_them() -> None:
    assert printed(DataType.FP32, [math.inf, math.nan, 0, -math.inf]) == "[Infinity,NaN,0.0,-Infinity]"
    assert printed(DataType.FP64, [math.nan]) == "[NaN]"


def test_integers_booleans_and_nothing() -> None:
    assert printed(DataType.UINT64, [2**64 - 1, 0]) == "[18446744073709551615,0]"
    assert printed(DataType.INT8, [[-128], [127]]) == "[-128,127]"
    assert printed(DataType.BOOL, [True, False]) == "[true,false]"
    assert printed(DataType.FP32, np.zeros((0, 4))) == "[]"
    assert printed(DataType.BYTES, np.zeros(0)) == "[]"
    assert printed(DataType.INT32, 5) == "[5]"


def test_a_tensor_at_any_offset_is_printed() -> None:
    data = memoryview(b"xyz" + np.array([1, -2], "<i4").tobytes())[3:]
    assert run(print_steps(Tensor("y", DataType.INT32, (2,), data))) == [b"[1,-2]"]


def test_strings_are_escaped_and_nul_is_kept() -> None:
    tensor = Tensor("y", DataType.BYTES, (4,), join_bytes(["a\0b", 'q"\\', "é", ""]))
    assert b"".join(run(print_steps(tensor))).decode() == '["a\\u0000b","q\\"\\\\","é",""]'


@pytest.mark.parametrize("element", [b"\xff", b"x" * (BLOCK_BYTES * 2) + b"\xc3", b"\xed\xa0\x80"])
def test_strings_that_are_not_utf8_must_be_requested_as_binary(element: bytes) -> None:
    with pytest.raises(InferenceError) as caught:
        run(print_steps(Tensor("y", DataType.BYTES, (2,), join_bytes([b"ok", element]))))
    assert caught.value == invalid(
        "output 'y' has an element that is not UTF-8 and cannot be sent via JSON, ask for it as binary data"
    )


def test_strings_of_a_broken_layout_are_the_models_fault() -> None:
    with pytest.raises(InferenceError) as caught:
        run(print_steps(Tensor("y", DataType.BYTES, (2,), join_bytes(["ok"]) + b"\x09\0\0\0a")))
    assert caught.value.code is ErrorCode.INTERNAL
    assert caught.value.message == "output 'y' is broken: an element at byte 6 ends at byte 19 of 11"


def test_large_outputs_are_printed_in_steps() -> None:
    values = np.arange(PRINT_ELEMENTS * 2 + 1, dtype="<i4")
    steps = print_steps(tensor_from_array("y", DataType.INT32, values))
    assert sum(1 for _ in steps) >= 2
    chunks = run(print_steps(tensor_from_array("y", DataType.INT32, values)))
    assert json.loads(b"".join(chunks)) == values.tolist()


@pytest.mark.parametrize(
    "values",
    [
        ["a" * 10] * 20_000,
        ["€" * BLOCK_BYTES],
        ["€" * BLOCK_BYTES, "b"],
        ["b", "x€" * BLOCK_BYTES, "", "😀" * BLOCK_BYTES, "c"],
    ],
)
def test_large_strings_are_printed_in_steps(values: list[str]) -> None:
    tensor = Tensor("y", DataType.BYTES, (len(values),), join_bytes(values))
    assert sum(1 for _ in print_steps(tensor)) >= 2
    chunks = run(print_steps(tensor))
    assert json.loads(b"".join(chunks)) == values
    assert max(map(len, chunks)) <= 4 * BLOCK_BYTES
