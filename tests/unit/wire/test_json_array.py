"""JSON arrays are cut in pieces and read as tensors, in steps."""

import gc
import json
import math
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from itertools import product

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.json_array import pack, pack_steps
from halimede.core.wire.json_scan import BLOCK_BYTES, scan_steps
from halimede.core.wire.steps import run
from support.refusals import error_of

COUNT_ERROR = "Unable to parse 'data': Shape does not match true shape of 'data' field"


def invalid(text: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, text)


def document(array: str) -> bytes:
    return f'{{"inputs":[{{"data":{array}}}]}}'.encode()


def read(array: str, datatype: DataType, count: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The array as a large document's would be read."""
    text = document(array)
    layout = run(scan_steps(text, block_bytes))
    return bytes(run(pack_steps("x", datatype, count, layout, 0)))


def refusal(array: str, datatype: DataType, count: int, block_bytes: int = BLOCK_BYTES) -> InferenceError:
    return error_of(read, array, datatype, count, block_bytes)


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
    assert error_of(pack, "x", datatype, 2, orjson.loads(f"[1,{element}]")) == expected


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
        run(pack_steps("x", DataType.FP64, 2**40, layout, 0))
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
    yield from (1 for _ in pack_steps("x", datatype, count, layout, 0))


def test_a_large_array_is_read_in_many_steps() -> None:
    count = 200_000
    assert sum(steps_of("[" + "1," * (count - 1) + "1]", DataType.FP32, count)) >= 2 * count // (2 * BLOCK_BYTES)
    assert sum(1 for _ in scan_steps(document("[" + "1," * count + "1]"))) >= 2 * count // BLOCK_BYTES
    assert sum(steps_of('["' + "x" * 1_000_000 + '"]', DataType.BYTES, 1)) >= 1_000_000 // BLOCK_BYTES


MANY = 300


def test_many_arrays_are_read_as_by_a_parser_of_json() -> None:
    parts = {"".join(each) for size in (1, 2, 3) for each in product("[],1 -", repeat=size)}
    for part in parts | {"".join(each) for each in product("[],1", repeat=4)}:
        # Not the last element, which is a piece of its own.
        array = f"[{'[[1],[ ]],' * MANY}{part},1]"
        count = MANY + len(re.findall("1+", part)) + 1
        try:
            expected = pack("x", DataType.INT64, count, json.loads(array))
        except json.JSONDecodeError:
            expected = None
        assert read_or_none(array, count) == expected, part


def read_or_none(array: str, count: int) -> bytes | None:
    try:
        # Brackets may end the array early.
        orjson.loads(run(scan_steps(document(array))).skeleton)
        return read(array, DataType.INT64, count)
    except (InferenceError, orjson.JSONDecodeError):
        return None


@pytest.mark.parametrize("element", ["[]", "[[[[]]]]", "[ ]", "[1]"])
def test_arrays_in_a_piece_make_no_objects(element: str) -> None:
    array = f"[{f'{element},' * 50_000}1]"
    before = gc.get_stats()[0]["collections"]
    read(array, DataType.INT64, array.count("1"))
    # Python's garbage collector counts them; of the objects there were 70 to 500.
    assert gc.get_stats()[0]["collections"] - before < 10


def test_elements_that_are_missing_are_noticed_before_the_end() -> None:
    # As many elements as there are commas, as `generate` announces them.
    array = f"[{'[],' * 500_000}[]]"
    steps = steps_of(array, DataType.INT32, 500_001)
    done = 0
    with suppress(InferenceError):
        for _ in steps:
            done += 1
    assert done < len(array) // BLOCK_BYTES // 2
