"""Requests to try a model with: random and extreme values in the shapes that its configuration allows. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.types.tensor import tensor_from_array

USUAL_SIZE = 4
"""The size of a variable dimension, unless the caller gives the input's shape."""


class Values(Enum):
    """USUAL values suit nearly every model: integers are 0 or 1, so that they are also valid as indices."""

    USUAL = auto()
    EXTREME = auto()
    NOT_TEXT = auto()
    """As USUAL, but BYTES elements are not valid UTF-8."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Makes requests for one model. `shapes` are the caller's shapes of inputs, without the batch dimension."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def batches(self) -> bool:
        return self.config.max_batch_size > 0

    @property
    def has_sequences(self) -> bool:
        return self.config.sequence_batching is not None

    def has_variable_dimensions(self) -> bool:
        """Whether some dimension of an input may have any size, and the caller did not choose it."""
        return any(-1 in each.dims and each.name not in self.shapes for each in self.config.input)

    def shape(self, tensor: ModelInput, size: int) -> tuple[int, ...]:
        """The shape of one row of an input; variable dimensions have this size."""
        given = self.shapes.get(tensor.name)
        return given if given is not None else tuple(size if dim == -1 else dim for dim in tensor.dims)

    def request(
        self,
        seed: int,
        *,
        rows: int = 1,
        size: int = USUAL_SIZE,
        values: Values = Values.USUAL,
        outputs: Sequence[str] = (),
    ) -> InferenceRequest:
        """A request whose content follows from the seed, in the shapes in which a backend gets it.

        For a model of sequences it has one row and is a whole sequence.
        """
        rows = 1 if self.has_sequences else rows
        random = np.random.default_rng(seed)
        inputs = []
        for tensor in self.config.input:
            shape = (*((rows,) if self.batches else ()), *self.shape(tensor, size))
            made = tensor_from_array(tensor.name, tensor.data_type, _array(random, tensor, shape, values))
            # Read-only, as the body of a request is.
            inputs.append(replace(made, data=bytes(made.data)))
        request = InferenceRequest(self.config.name, id=f"{seed}", inputs=inputs, outputs=tuple(outputs))
        # Reshapes inputs, as the server does, and finds a shape of the caller that does not fit.
        RequestChecker(self.config).check(request)
        if self.has_sequences:
            request.sequence_id, request.sequence_start, request.sequence_end = seed + 1, True, True
        return request

    def batch(self, seed: int, rows: int) -> list[InferenceRequest]:
        """Requests with so many rows together: two, or of a model of sequences one for each row."""
        if self.has_sequences:
            return [self.request(seed + at) for at in range(rows)]
        first = max(1, rows // 2)
        return [self.request(seed, rows=first), self.request(seed + 1, rows=rows - first)]

    def sequence(self, seed: int, steps: int) -> list[InferenceRequest]:
        """The requests of one sequence, the first with START and the last with END."""
        requests = [self.request(seed + at) for at in range(steps)]
        for at, request in enumerate(requests):
            request.sequence_id = seed
            request.sequence_start, request.sequence_end = at == 0, at == steps - 1
        return requests


def _array(random: np.random.Generator, tensor: ModelInput, shape: tuple[int, ...], values: Values) -> NDArray[Any]:
    if tensor.data_type is DataType.BYTES:
        elements = np.empty(int(np.prod(shape)), dtype=object)
        words = _WORDS[values]
        elements[:] = [words[at] for at in random.integers(0, len(words), elements.size)]
        return elements.reshape(shape)
    if values is Values.EXTREME:
        return random.choice(_extremes(tensor.data_type), size=shape)
    return _usual(random, tensor.data_type, shape)


def _usual(random: np.random.Generator, datatype: DataType, shape: tuple[int, ...]) -> NDArray[Any]:
    if datatype is DataType.BF16:
        # The upper half of an FP32 number is the BF16 number.
        return (random.random(shape, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if datatype.dtype.kind == "f":
        return random.random(shape).astype(datatype.dtype)
    return random.integers(0, 2, shape).astype(datatype.dtype)


def _extremes(datatype: DataType) -> NDArray[Any]:
    """The values that are handled wrongly first: limits, infinities, NaN, the smallest numbers, zeros."""
    if datatype is DataType.BF16:
        return np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0001], np.uint16)
    if datatype.dtype.kind == "f":
        limits = np.finfo(datatype.dtype)  # type: ignore[type-var]  # its kind was just tested
        numbers = [0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, limits.min, limits.smallest_subnormal]
        return np.array(numbers, datatype.dtype)
    if datatype is DataType.BOOL:
        return np.array([False, True])
    limit = np.iinfo(datatype.dtype)  # type: ignore[type-var]  # of the other kinds only integers are left
    return np.array([0, limit.min, limit.max], datatype.dtype)


_WORDS: Mapping[Values, tuple[bytes, ...]] = {
    Values.USUAL: (b"0", b"1", b"a word"),
    Values.EXTREME: (b"", b"\0", b"a\0b", "\N{GREEK SMALL LETTER OMEGA}".encode(), b"x" * 70_000),
    Values.NOT_TEXT: (b"\xff\xfe", b"\xc3"),
}


def rows_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The outputs of one answer as those of its rows, each with one row."""
    arrays = [tensor.array() for tensor in tensors]
    for at in range(tensors[0].shape[0] if tensors else 0):
        yield [
            tensor_from_array(tensor.name, tensor.datatype, array[at : at + 1])
            for tensor, array in zip(tensors, arrays, strict=True)
        ]


def difference(one: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> str:
    """The first difference of two answers; "" if they are equal. Floating-point numbers may differ by the tolerance,
    relative to the largest number of the output."""
    by_name = {tensor.name: tensor for tensor in other}
    if len(one) != len(other) or by_name.keys() != {tensor.name for tensor in one}:
        return f"outputs {_names(one)} instead of {_names(other)}"
    for tensor in one:
        expected = by_name[tensor.name]
        if tensor.shape != expected.shape:
            return f"output '{tensor.name}' has shape {list(tensor.shape)} instead of {list(expected.shape)}"
        got, wanted = _numbers(tensor), _numbers(expected)
        if got.dtype.kind == "f":
            finite = np.abs(wanted[np.isfinite(wanted)])
            allowed = tolerance * float(finite.max()) if finite.size else 0.0
            if np.allclose(got, wanted, rtol=tolerance, atol=allowed, equal_nan=True):
                continue
        elif np.array_equal(got, wanted):
            continue
        at = next((i for i, pair in enumerate(zip(got.flat, wanted.flat, strict=True)) if pair[0] != pair[1]), 0)
        return f"output '{tensor.name}': element {at} is {got.flat[at]} instead of {wanted.flat[at]}"
    return ""


def _numbers(tensor: Tensor) -> NDArray[Any]:
    array = tensor.array()
    if tensor.datatype is DataType.BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _names(tensors: Sequence[Tensor]) -> str:
    return ", ".join(sorted(f"'{tensor.name}'" for tensor in tensors)) or "none"
