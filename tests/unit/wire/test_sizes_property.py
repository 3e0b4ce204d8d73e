"""Shapes and sizes that clients declare, in every form: only data of exactly that size is accepted.

The expected result is computed beforehand with Python's integers, without any of the code under test.
"""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.wire import http_request
from halimede.core.wire.grpc_request import read_infer
from halimede.core.wire.protocol import ModelInferRequest
from support.examples import examples

LARGEST_TENSOR = 2**63 - 1
LONGEST_ERROR = 4 << 10
PER_SENT_BYTE = 100
BASE_BYTES = 1 << 20
"""Maximum memory for reading a request: a constant, plus this many times the bytes that were sent."""

ITEM_BYTES = {"BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8} | {
    f"{sign}INT{bits}": bits // 8 for sign in ("", "U") for bits in (8, 16, 32, 64)
}
CONTENTS = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), ("int_contents", 1)),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), ("uint_contents", 1)),
    "INT64": ("int64_contents", 1),
    "UINT64": ("uint64_contents", 1),
    "BOOL": ("bool_contents", True),
    "FP32": ("fp32_contents", 1.0),
    "FP64": ("fp64_contents", 1.0),
    "BYTES": ("bytes_contents", b"ab"),
}
ELEMENT = b"\2\0\0\0ab"
"""Of BYTES; elements of other types are ones."""

many = settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
datatypes = st.sampled_from(sorted(FROM_WIRE))
edges = st.sampled_from(sorted({0, *(2**power + off for power in range(1, 67) for off in (-1, 0, 1))}))
dims = st.integers(0, 4) | st.integers(0, 4) | edges
long_shapes = st.builds(
    lambda rank, dim: (dim,) * rank,
    st.sampled_from([9, 65, 1000]),
    st.sampled_from([0, 1, 2, 2**31, 2**63 - 1]),
)
shapes = st.lists(dims, max_size=6).map(tuple) | st.lists(st.integers(0, 3), max_size=4).map(tuple) | long_shapes
damage = st.sampled_from([0, 0, 0, 0, 1, -1, 7])


@dataclass(frozen=True)
class Model:
    """One input, IN. `max_batch_size` 0 is a model that does not batch."""

    datatype: str
    dims: tuple[int, ...]
    max_batch_size: int

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape may be sent, and is addressable."""
        if self.max_batch_size:
            if not shape or not 1 <= shape[0] <= self.max_batch_size:
                return False
            rest = shape[1:]
        else:
            rest = shape
        if len(rest) != len(self.dims) or any(want not in (-1, got) for want, got in zip(self.dims, rest, strict=True)):
            return False
        # numpy's arrays refer to elements of BYTES with 8 bytes each.
        item_bytes = ITEM_BYTES.get(self.datatype, 8)
        return min(shape, default=0) >= 0 and prod(dim or 1 for dim in shape) * item_bytes <= LARGEST_TENSOR

    def least_bytes(self, shape: Sequence[int]) -> int:
        return prod(shape) * ITEM_BYTES.get(self.datatype, 4)

    def payload(self, elements: int) -> bytes:
        return (ELEMENT if self.datatype == "BYTES" else b"\1" * ITEM_BYTES[self.datatype]) * elements

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            name="m",
            max_batch_size=self.max_batch_size,
            input=(ModelInput("IN", DataType[self.datatype], dims=self.dims),),
            output=(ModelOutput("OUT", DataType.FP32, dims=(1,)),),
        )

    @property
    def view(self) -> ModelView:
        return ModelView("m", "1", ("1",), self.config, {})


@st.composite
def asked(draw: st.DrawFn) -> tuple[Model, tuple[int, ...], int]:
    """A model, the shape that is sent to it, and a count of elements: that of the shape, or close to it."""
    shape = draw(shapes)
    max_batch_size = draw(st.sampled_from([0, 0, 1, 4, 2**31 - 1]))
    rest = shape[1:] if max_batch_size else shape
    wanted = tuple(draw(st.sampled_from([-1, dim or -1])) for dim in rest[:8])
    if draw(st.integers(0, 5)) == 0:
        wanted = draw(st.sampled_from([(), (-1,), (16,), (-1, 3), (2**62, 4)]))
    elements = min(prod(shape[:8]), 300)
    return Model(draw(datatypes), wanted, max_batch_size), shape, max(0, elements + draw(damage))


def is_taken(model: Model, read: Callable[[], InferenceRequest], sent_bytes: int) -> bool:
    """Whether the request is accepted. Asserts that memory and texts are bounded in both cases."""
    checker = RequestChecker(model.config)
    error: InferenceError | None = None
    tracemalloc.start()
    try:
        request = read()
        checked = checker.check(request)
        checker.check_framing(request)
    except InferenceError as refused:
        error = refused
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= BASE_BYTES + PER_SENT_BYTE * sent_bytes
    if error is not None:
        assert error.code is ErrorCode.INVALID_ARG
        assert 0 < len(error.message.encode()) <= LONGEST_ERROR
        return False
    (tensor,) = request.inputs
    assert checked.size_bytes == len(tensor.data)
    assert checked.batch_size == (tensor.shape[0] if model.max_batch_size else 1)
    if model.datatype != "BYTES":
        assert len(tensor.data) == model.least_bytes(tensor.shape)
    assert tensor.array().shape == tensor.shape
    return True


def http_taken(model: Model, document: dict[str, object], tail: bytes | None) -> bool:
    text = json.dumps(document).encode()
    length = None if tail is None else len(text)
    body = text + (tail or b"")
    return is_taken(model, lambda: http_request.decode_infer(model.view, body, length).request, len(body))


@many
@given(asked())
@example((Model("FP32", (-1,), 0), (2**63 - 1,) * 100_000, 1))
@example((Model("FP32", (-1,), 0), (1,) * 100_000, 1))
@example((Model("BYTES", (-1, -1), 0), (0, 2**60), 0))
def test_json_is_accepted_exactly_when_the_shape_has_as_many_elements(case: tuple[Model, tuple[int, ...], int]) -> None:
    model, shape, elements = case
    element: object = {"BYTES": "ab", "BOOL": True}.get(model.datatype, 1)
    tensor = {"name": "IN", "datatype": model.datatype, "shape": shape, "data": [element] * elements}
    has_json = model.datatype not in {"FP16", "BF16"}
    # A JSON number of 2^64 or more is not valid in a shape.
    right = has_json and max(shape, default=0) < 2**64 and model.takes(shape) and elements == prod(shape)
    assert http_taken(model, {"inputs": [tensor]}, None) == right


@many
@given(case=asked(), declared=st.none() | st.integers(-1, 1) | edges, missing=damage)
@example(case=(Model("FP32", (-1,), 0), (2**62,), 0), declared=2**64, missing=0)
@example(case=(Model("FP32", (-1, -1), 0), (2**32, 2**32), 0), declared=0, missing=0)
@example(case=(Model("FP64", (-1,), 0), (2**61,), 0), declared=0, missing=0)
@example(case=(Model("BYTES", (-1, -1), 0), (0, 2**60), 0), declared=0, missing=0)
def test_binary_data_is_accepted_exactly_when_all_sizes_are_equal(
    case: tuple[Model, tuple[int, ...], int], declared: int | None, missing: int
) -> None:
    """The size of the shape, the declared size, and the number of bytes."""
    model, shape, elements = case
    tail = model.payload(elements)[: -missing or None] if missing >= 0 else model.payload(elements) + b"\1"
    size = len(tail) if declared is None else declared
    tensor = {"name": "IN", "datatype": model.datatype, "shape": shape, "parameters": {"binary_data_size": size}}
    right = max(shape, default=0) < 2**64 and model.takes(shape) and size == len(tail)
    assert http_taken(model, {"inputs": [tensor]}, tail) == (right and tail == exact(model, shape))


def exact(model: Model, shape: Sequence[int]) -> bytes | None:
    """The one payload made by `Model.payload` that fits; None if it would be too large for this test."""
    return model.payload(prod(shape)) if model.takes(shape) and model.least_bytes(shape) < 1 << 20 else None


@many
@given(case=asked(), missing=damage)
@example(case=(Model("FP32", (-1,), 0), (2**63 - 1,) * 100_000, 1), missing=0)
def test_raw_contents_are_accepted_exactly_when_their_size_fits(
    case: tuple[Model, tuple[int, ...], int], missing: int
) -> None:
    model, shape, elements = case
    shape = tuple(min(dim, 2**63 - 1) for dim in shape)  # more has no place in the message
    raw = model.payload(elements)[: -missing or None] if missing >= 0 else model.payload(elements) + b"\1"
    message = ModelInferRequest(model_name="m", raw_input_contents=[raw])
    message.inputs.add(name="IN", datatype=model.datatype, shape=shape)
    assert grpc_taken(model, message.SerializeToString()) == (raw == exact(model, shape))


@many
@given(case=asked())
def test_typed_contents_are_accepted_exactly_when_the_shape_has_as_many(
    case: tuple[Model, tuple[int, ...], int],
) -> None:
    model, shape, elements = case
    shape = tuple(min(dim, 2**63 - 1) for dim in shape)
    message = ModelInferRequest(model_name="m")
    tensor = message.inputs.add(name="IN", datatype=model.datatype, shape=shape)
    tensor.contents.SetInParent()
    field, value = CONTENTS.get(model.datatype, ("fp32_contents", 1.0))
    getattr(tensor.contents, field).extend([value] * elements)
    has_contents = model.datatype in CONTENTS or not elements
    right = has_contents and model.takes(shape) and elements == prod(shape)
    assert grpc_taken(model, message.SerializeToString()) == right


@many
@given(case=asked(), dim=st.integers(-(2**63), -1), place=st.integers(0, 5))
def test_negative_dimension_is_never_accepted(case: tuple[Model, tuple[int, ...], int], dim: int, place: int) -> None:
    model, shape, elements = case
    shape = tuple(min(dim, 2**63 - 1) for dim in shape)
    shape = (*shape[:place], dim, *shape[place:])
    message = ModelInferRequest(model_name="m", raw_input_contents=[model.payload(elements)])
    message.inputs.add(name="IN", datatype=model.datatype, shape=shape)
    assert not grpc_taken(model, message.SerializeToString())
    tensor = {"name": "IN", "datatype": model.datatype, "shape": shape, "data": [1] * elements}
    assert not http_taken(model, {"inputs": [tensor]}, None)


def grpc_taken(model: Model, raw: bytes) -> bool:
    return is_taken(model, lambda: read_infer(raw).decode().request, len(raw))


@many
@given(
    datatype=datatypes,
    wanted=st.lists(st.just(-1) | st.integers(1, 4) | edges.filter(bool), max_size=4).map(tuple),
    max_batch_size=st.sampled_from([0, 8]),
    body=st.integers(0, 300).map(bytes),
)
def test_raw_request_is_accepted_exactly_when_a_shape_of_its_size_is_known(
    datatype: str, wanted: tuple[int, ...], max_batch_size: int, body: bytes
) -> None:
    """The client sends no shape: at most one dimension is variable, and follows from the bytes."""
    model = Model(datatype, wanted, max_batch_size)
    fixed = [dim for dim in wanted if dim != -1]
    is_open = len(fixed) < len(wanted)
    row_bytes = model.least_bytes(fixed)
    if datatype == "BYTES":
        right = not is_open and prod(fixed) == 1
    elif is_open:
        right = len(wanted) - len(fixed) == 1 and row_bytes <= LARGEST_TENSOR and len(body) % row_bytes == 0
    else:
        right = len(body) == row_bytes
    taken = is_taken(model, lambda: http_request.decode_infer(model.view, body, 0).request, len(body))
    assert taken == right


@pytest.mark.parametrize("datatype", sorted(FROM_WIRE))
def test_each_form_accepts_some_request(datatype: str) -> None:
    """A reader that refuses everything would pass the other tests; this one requires that each form is accepted."""
    model = Model(datatype, (-1, 3), 4)
    raw = model.payload(12)
    message = ModelInferRequest(model_name="m", raw_input_contents=[raw])
    message.inputs.add(name="IN", datatype=datatype, shape=(2, 2, 3))
    assert grpc_taken(model, message.SerializeToString())
    tensor = {"name": "IN", "datatype": datatype, "shape": (2, 2, 3), "parameters": {"binary_data_size": len(raw)}}
    assert http_taken(model, {"inputs": [tensor]}, raw)
