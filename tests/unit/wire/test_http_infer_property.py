"""Properties of any body: valid or a client's error, the same in slices as at once, no memory for claimed sizes."""

import json
import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.destinations import BINARY, Destinations
from halimede.core.wire.http_request import (
    DecodedInfer,
    decode_infer,
    decode_infer_steps,
    decode_large_steps,
    decode_small,
    parse_header_length,
)
from halimede.core.wire.http_response import encode_infer
from halimede.core.wire.steps import run
from support.examples import Draws, drawn, examples, json_of

CONFIG = ModelConfig(
    name="m",
    max_batch_size=4,
    input=(ModelInput("x", DataType.FP32, dims=(-1,)),),
    output=(ModelOutput("y", DataType.FP32, dims=(-1,)),),
)
VIEW = ModelView("m", "1", ("1",), CONFIG, {"y": ("a", "b")})

many = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
# A drawn body costs less than a drawn document.
more = settings(many, max_examples=examples(400))


def result_of(decode: Callable[[], DecodedInfer]) -> tuple[object, ...]:
    """The request and the format, or the code of the error: two ways of reading must agree on it."""
    try:
        decoded = decode()
    except InferenceError as error:
        return (error.code,) if len(error.message) < 4096 else (error.code, "and too long a text")
    request = decoded.request
    tensors = [(t.name, t.datatype, t.shape, bytes(t.data)) for t in request.inputs]
    return tensors, request.outputs, request.parameters, request.id, decoded.destinations


REFUSALS = [(ErrorCode.INVALID_ARG,), (ErrorCode.UNSUPPORTED,)]


def is_fine(outcome: tuple[object, ...]) -> bool:
    """Whether this is a request, or an error of the client's kind."""
    return len(outcome) == 5 or outcome in REFUSALS


# ---- Bodies that are nearly requests

SCALARS = (
    *("0", "1", "-1", "1.5", "-0", "1e2", "1e400", "300", "18446744073709551616", "true", "false", "null"),
    *("NaN", "Infinity", "-Infinity", '""', '"a"', '"],[{,"', r'"\""', r'"\\"', r'"\u00e9"', '"é"', '"a\\nb"'),
    *(r'"\ud83d\ude00"', r'"\ud83d"', "{}", '{"a":[1,2]}', '"' + "long " * 20 + '"', '"' + r"\\\"" * 20 + '"'),
    *('"' + r"\ud83d\ude00é" * 8 + '"', " " * 60 + "7", "x"),
)
COMMAS = (",", ", ", " ,\n\t", "," + " " * 50)

ELEMENTS: dict[str, Callable[[Draws], str]] = {
    "BOOL": lambda draws: draws.pick(("true", "false")),
    "BYTES": lambda draws: json.dumps(draws.text(12), ensure_ascii=draws.pick((True, False))),
    "FP32": lambda draws: json.dumps(draws.float(32)),
    "FP64": lambda draws: json.dumps(draws.integer(-(2**70), 2**70) if draws.below(2) else draws.float(64)),
    "INT8": lambda draws: str(draws.integer(-128, 127) if draws.below(16) else -129),
    "UINT64": lambda draws: str(draws.integer(0, 2**64 - 1) if draws.below(16) else 2**64),
    "INT32": lambda draws: str(draws.integer(-(2**31), 2**31 - 1) if draws.below(16) else 2**31),
}


def array_of(draws: Draws, element: Callable[[Draws], str], depth: int = 0) -> str:
    """A list of up to six elements, or of up to three lists."""
    comma = draws.pick(COMMAS)
    if depth < 3 and draws.below(4) == 3:
        return f"[{comma.join(array_of(draws, element, depth + 1) for _ in range(draws.below(4)))}]"
    return f"[{comma.join(element(draws) for _ in range(draws.pick((0, 1, 1, 2, 3, 6))))}]"


def count_of(array: str) -> int:
    def size(value: Any) -> int:
        return sum(map(size, value)) if isinstance(value, list) else 1

    try:
        return size(json.loads(array))
    except ValueError:
        return 1


def input_of(draws: Draws) -> str:
    datatype = draws.pick(sorted(ELEMENTS))
    array = array_of(draws, draws.pick((ELEMENTS[datatype],) * 5 + (lambda draws: draws.pick(SCALARS),)))
    members = [
        '"name":"x"',
        f'"datatype":"{datatype}"',
        f'"shape":[{count_of(array) + draws.pick((0, 0, 0, 0, 1))}]',
        f'"data":{array}',
        *draws.some(('"data":[1]', r'"d\u0061ta":[2]', '"shape":[0]', '"z":[{"a":[1]}]'), 1),
    ]
    return f"{{{','.join(draws.shuffled(members))}}}"


def body_of(draws: Draws) -> bytes:
    others = ('"id":"a[{"', '"parameters":{"k":"v","n":[1]}', '"outputs":[{"name":"y"}]', '"q":[[[[1]]]]')
    inputs = [input_of(draws) for _ in range(draws.pick((1, 1, 2, 3)))]
    members = [f'"inputs":[{", ".join(inputs)}]', *draws.some(others, 1)]
    body = bytearray(f"{{{','.join(members)}}}".encode())
    # Most bodies stay whole; the others lose or gain a byte or two at any place.
    for _ in range(draws.pick((0, 0, 0, 1, 2))):
        at = draws.below(len(body))
        body[at : at + draws.below(2)] = draws.pick((b"", *map(bytes, zip(b'[]{},"\\:1 a\xff'))))
    return bytes(body)


@more
@given(drawn(lambda draws: (draws.pick((16, 17, 20, 33, 64, 4096)), body_of(draws)), 400))
@example((16, b'{"inputs":[{"name":"x","datatype":"FP32","shape":[0],"data":[[[0]]]}]}'))
def test_slices_give_the_same_result_as_the_whole(case: tuple[int, bytes]) -> None:
    block_bytes, body = case
    whole = result_of(lambda: decode_small(VIEW, body, None, ""))
    slices = result_of(lambda: run(decode_large_steps(VIEW, body, None, "", block_bytes)))
    assert slices == whole
    assert is_fine(whole)


def bytes_and_header_length(draws: Draws) -> tuple[bytes, int | None]:
    header_length = draws.below(81) if draws.below(2) else None
    return body_of(draws) if draws.below(2) else draws.raw(draws.below(81)), header_length


@more
@given(drawn(bytes_and_header_length, 400))
def test_any_bytes_are_a_request_or_a_clients_fault(case: tuple[bytes, int | None]) -> None:
    body, header_length = case
    length = header_length if header_length is None else min(header_length, len(body))
    at_once = result_of(lambda: decode_infer(VIEW, body, length))
    in_steps = result_of(lambda: run(decode_infer_steps(VIEW, memoryview(body), length)))
    assert at_once == in_steps
    assert is_fine(at_once)


def scalar(draws: Draws) -> Any:
    match draws.below(4):
        case 0:
            return draws.pick((None, False, True))
        case 1:
            return draws.integer(-(2**65), 2**65)
        case 2:
            return draws.float(64)
        case _:
            return draws.text(8)


def any_json(draws: Draws) -> Any:
    return json_of(draws, scalar, lambda draws: draws.text(4), levels=2)


TENSOR_PARAMETERS = ("binary_data_size", "shared_memory_region", "binary_data", "classification")
PARAMETERS = ("sequence_id", "sequence_start", "priority", "timeout", "binary_data_output", "triton_x", "a")


def tensor_parameters(draws: Draws) -> Any:
    return {name: draws.below(10) if draws.below(4) else any_json(draws) for name in draws.some(TENSOR_PARAMETERS, 2)}


TENSOR_MEMBERS: dict[str, Callable[[Draws], Any]] = {
    "name": lambda draws: draws.text(4),
    "datatype": lambda draws: draws.pick(sorted(FROM_WIRE)),
    "shape": lambda draws: [draws.pick((-1, 0, 1, 2, 3, 2**70)) for _ in range(draws.below(4))],
    "data": lambda draws: [draws.below(4) for _ in range(draws.below(5))],
    "parameters": tensor_parameters,
}


def members_of(draws: Draws, members: dict[str, Callable[[Draws], Any]]) -> dict[str, Any]:
    """Most of the members, some of them with any value."""
    return {
        name: make(draws) if draws.below(8) else any_json(draws) for name, make in members.items() if draws.below(8)
    }


def tensors_of(draws: Draws) -> list[Any]:
    return [members_of(draws, TENSOR_MEMBERS) for _ in range(draws.pick((1, 1, 0, 2)))]


MEMBERS: dict[str, Callable[[Draws], Any]] = {
    "id": lambda draws: draws.text(8),
    "inputs": tensors_of,
    "outputs": tensors_of,
    "parameters": lambda draws: {name: any_json(draws) for name in draws.some(PARAMETERS, 3)},
}


def document_and_tail(draws: Draws) -> tuple[Any, bytes | None]:
    tail = draws.raw(draws.below(13)) if draws.below(2) else None
    return members_of(draws, MEMBERS) if draws.below(8) else any_json(draws), tail


@many
@given(drawn(document_and_tail, 250))
def test_any_members_are_a_request_or_a_clients_fault(case: tuple[Any, bytes | None]) -> None:
    document, tail = case
    text = json.dumps(document).encode()
    view = None if tail is None else memoryview(tail)
    whole = result_of(lambda: decode_small(VIEW, text, view, ""))
    assert result_of(lambda: run(decode_large_steps(VIEW, text, view, "", 64))) == whole
    assert is_fine(whole)


@settings(deadline=None)
@given(text=st.text(max_size=30) | st.integers().map(str), body_length=st.integers(0, 2**40))
def test_any_header_length_is_in_range_or_a_clients_fault(text: str, body_length: int) -> None:
    try:
        outcome: object = 0 <= parse_header_length(text, body_length) <= body_length
    except InferenceError as error:
        outcome = error.code
    assert outcome in (True, ErrorCode.INVALID_ARG)


# ---- There and back

INTEGERS = {t: np.iinfo(t.dtype.str) for t in DataType if t.dtype.kind in "iu" and t is not DataType.BF16}


def wire_data(draws: Draws, datatype: DataType, count: int) -> bytes:
    """`count` elements of any value, in wire layout."""
    if datatype is DataType.BYTES:
        return join_bytes([draws.text(8) for _ in range(count)])
    if datatype is DataType.BOOL:
        return bytes(draws.below(2) for _ in range(count))
    if datatype in (DataType.FP32, DataType.FP64):
        return struct.pack(
            f"<{count}{datatype.dtype.char}", *(draws.float(8 * datatype.itemsize) for _ in range(count))
        )
    return draws.raw(count * datatype.itemsize)


def tensors_of_any_value(draws: Draws, datatypes: list[DataType]) -> list[Tensor]:
    made = []
    for n in range(1 + draws.below(3)):
        datatype = draws.pick(datatypes)
        shape = tuple(draws.below(5) for _ in range(draws.below(4)))
        made.append(Tensor(f"t{n}", datatype, shape, wire_data(draws, datatype, math.prod(shape))))
    return made


def request_of(answer: bytes, json_length: int | None) -> tuple[bytes, int | None]:
    """A response body as the body of a request with its outputs as inputs."""
    end = len(answer) if json_length is None else json_length
    head = answer[:end].replace(b'"outputs":', b'"inputs":', 1)
    return head + answer[end:], json_length if json_length is None else len(head)


@many
@given(drawn(lambda draws: tensors_of_any_value(draws, [t for t in DataType if t is not DataType.INVALID]), 400))
def test_binary_tensors_come_back_bit_by_bit(sent: list[Tensor]) -> None:
    encoded = encode_infer(InferenceResponse("m", "1", outputs=sent), Destinations(BINARY), VIEW)
    body, length = request_of(b"".join(encoded.chunks), encoded.json_length)
    assert length is not None
    assert decode_infer(VIEW, body, length).request.inputs == sent


IN_JSON = [t for t in FROM_WIRE.values() if t.name not in ("FP16", "BF16")]


@many
@given(drawn(lambda draws: (draws.pick((16, 40, 4096)), tensors_of_any_value(draws, IN_JSON)), 400))
def test_json_tensors_come_back_value_by_value(case: tuple[int, list[Tensor]]) -> None:
    block_bytes, sent = case
    encoded = encode_infer(InferenceResponse("m", "1", outputs=sent), Destinations(), VIEW)
    body, length = request_of(b"".join(encoded.chunks), encoded.json_length)
    assert length is None
    for decoded in (
        decode_small(VIEW, body, None, ""),
        run(decode_large_steps(VIEW, body, None, "", block_bytes)),
    ):
        for back, tensor in zip(decoded.request.inputs, sent, strict=True):
            assert (back.name, back.datatype, back.shape) == (tensor.name, tensor.datatype, tensor.shape)
            # NaN has many bit patterns and one name.
            np.testing.assert_array_equal(back.array(), tensor.array())


@settings(deadline=None)
@given(st.sampled_from(sorted(INTEGERS, key=lambda t: t.number)), st.integers(-(2**66), 2**66))
def test_integer_arrives_unchanged_or_is_refused(datatype: DataType, value: int) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"%b","shape":[1],"data":[%d]}]}' % (datatype.name.encode(), value)
    limits = INTEGERS[datatype]
    try:
        outcome: object = decode_infer(VIEW, body, None).request.inputs[0].array().tolist()
    except InferenceError as error:
        outcome = error.code
    assert outcome == ([value] if limits.min <= value <= limits.max else ErrorCode.INVALID_ARG)


# ---- Claims


@pytest.mark.parametrize("datatype", ["FP64", "BYTES", "UINT8"])
@pytest.mark.parametrize("shape", [[2**40], [2**20, 2**20], [2**62], [2**31, 2**31, 2**31], [0, 2**62], [1] * 20_000])
@pytest.mark.parametrize("padding", [0, 200_000])
def test_declared_sizes_cost_no_memory(datatype: str, shape: list[int], padding: int) -> None:
    element = '"a"' if datatype == "BYTES" else "1"
    head = json.dumps({"name": "x", "datatype": datatype, "shape": shape})[1:-1]
    body = f'{{"inputs":[{{{head},"data":[{element},{" " * padding}{element}]}}]}}'.encode()
    tracemalloc.start()
    outcome = result_of(lambda: decode_infer(VIEW, body, None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome == (ErrorCode.INVALID_ARG,)
    assert peak < 4 << 20


@pytest.mark.parametrize("size", [2**31, 2**40, 2**63, 2**64 - 1])
def test_declared_binary_sizes_cost_no_memory(size: int) -> None:
    document = json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": size}}]}
    ).encode()
    tracemalloc.start()
    outcome = result_of(lambda: decode_infer(VIEW, document + bytes(16), len(document)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome == (ErrorCode.INVALID_ARG,)
    assert peak < 1 << 20


def test_a_large_array_takes_little_more_memory_than_its_tensor() -> None:
    count = 500_000
    body = b'{"inputs":[{"name":"x","datatype":"INT8","shape":[%d],"data":[%b1]}]}' % (count, b"1," * (count - 1))
    tracemalloc.start()
    decoded = decode_infer(VIEW, body, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert decoded.request.inputs[0].data == b"\1" * count
    assert peak < count + (4 << 20)
