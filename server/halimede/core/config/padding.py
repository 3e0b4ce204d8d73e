"""The model parameters that make batches of unequal requests: PADDING and BATCH_SIZES. Triton has neither.

PADDING is a list of JSON objects, one for each input that is padded:
`{"input": "IDS", "axis": 1, "value": 0, "buckets": [16, 32], "lengths": "LENGTHS", "outputs": {"SCORES": 1}}`.
BATCH_SIZES is a list of numbers of rows, as `1,4,8`.

Both are for instances that take one array per input. Models that take requests (python models, ensembles) may use these
names for parameters of their own, so the parameters are not read there.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isinf
from typing import Any

import numpy as np

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType, Problem
from halimede.core.types.error import clip

PADDING = "PADDING"
BATCH_SIZES = "BATCH_SIZES"

_FLOATS = (DataType.FP16, DataType.FP32, DataType.FP64)
_MOST = 2**31 - 1

PadValue = int | float | bool | str | None
"""An element as JSON has it; None for 0, false or the empty string."""


@dataclass(frozen=True, slots=True)
class Padding:
    """How an input is padded. Axes count the dimensions of the shape that a client sends: 0 is the rows, 1 the least.

    `buckets` are the allowed lengths, ascending; empty for any length. `lengths` is the input of the model file that
    gets the length of each row before padding, "" for none. `outputs` maps outputs that are as long as the padded input
    to the axis that is cut back.
    """

    input: str
    axis: int
    value: PadValue = None
    buckets: tuple[int, ...] = ()
    lengths: str = ""
    outputs: Mapping[str, int] = field(default_factory=dict)

    def padded(self, longest: int) -> int:
        """The length of a batch whose longest request has this length: that of the smallest bucket which fits."""
        return next((bucket for bucket in self.buckets if bucket >= longest), longest)


def takes_arrays(config: ModelConfig) -> bool:
    """Whether an instance of the model may take one array per input; false if it surely takes requests."""
    return config.backend != "python" and config.ensemble_scheduling is None


def padding_of(config: ModelConfig) -> tuple[Padding, ...]:
    """The paddings of a valid configuration."""
    return read_padding(config)[0]


def batch_sizes_of(config: ModelConfig) -> tuple[int, ...]:
    """The allowed numbers of rows of a valid configuration, ascending; empty for any number."""
    return read_batch_sizes(config)[0]


def read_padding(config: ModelConfig) -> tuple[tuple[Padding, ...], tuple[Problem, ...]]:
    """The value of PADDING, and the problems of its form. Names and axes are not compared with the model's tensors."""
    parameter = config.parameters.get(PADDING)
    if parameter is None or not takes_arrays(config):
        return (), ()
    try:
        entries = json.loads(parameter.string_value)
    except (ValueError, RecursionError) as error:
        return (), (_problem(f"is not JSON: {clip(str(error))}"),)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return (), (_problem('must be a list of objects, as [{"input": "IDS", "axis": 1}]'),)
    problems = [_problem(f"{entry_text(i)} {text}") for i, entry in enumerate(entries) for text in _wrong(entry)]
    if problems:
        return (), tuple(problems)
    return tuple(_padding(entry) for entry in entries), ()


def read_batch_sizes(config: ModelConfig) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """The value of BATCH_SIZES, and the problems of its form. It is not compared with max_batch_size."""
    parameter = config.parameters.get(BATCH_SIZES)
    if parameter is None or not takes_arrays(config):
        return (), ()
    texts = [text.strip() for text in parameter.string_value.split(",")]
    sizes = tuple(int(text) for text in texts if text.isascii() and text.isdecimal() and len(text) <= 10)
    if len(sizes) != len(texts) or not _is_ascending(sizes):
        text = f"is '{clip(parameter.string_value)}'; it must be ascending numbers from 1 on, as '1,4,8'"
        return (), (_problem(text, BATCH_SIZES),)
    return sizes, ()


def entry_text(position: int) -> str:
    """The part of an error text that names one object of PADDING."""
    return f"entry {position}:"


def pad_element(value: PadValue, datatype: DataType) -> Any:  # Any: a numpy scalar, or bytes
    """The value as an element of a numpy array of the datatype. ValueError if the datatype does not have it."""
    if datatype is DataType.BYTES:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{json.dumps(value)} is not a string")
        return (value or "").encode()
    if value is None:
        return datatype.dtype.type(0)
    if datatype is DataType.BOOL:
        if not isinstance(value, bool):
            raise ValueError(f"{json.dumps(value)} is not true or false")
        return np.bool_(value)
    if isinstance(value, bool | str):
        raise ValueError(f"{json.dumps(value)} is not a number")
    if datatype is DataType.BF16:
        return _bfloat16(value)
    if datatype in _FLOATS:
        return _float(value, datatype)
    limits = np.iinfo(datatype.dtype)  # type: ignore[type-var]  # an integer type: all others were handled above
    if not isinstance(value, int) or not limits.min <= value <= limits.max:
        raise ValueError(f"{json.dumps(value)} is not an integer from {limits.min} to {limits.max}")
    return datatype.dtype.type(value)


def _float(value: float, datatype: DataType) -> Any:
    try:
        with np.errstate(over="ignore"):
            element = datatype.dtype.type(float(value))
    except OverflowError:
        element = np.float64("inf")
    if np.isinf(element) and not (isinstance(value, float) and isinf(value)):
        raise ValueError(f"{clip(json.dumps(value))} is too large")
    return element


def _bfloat16(value: float) -> Any:
    """The bits of the nearest bfloat16, of two equally near ones that with an even last bit."""
    bits = int(_float(value, DataType.FP32).view(np.uint32))
    if value != value:  # noqa: PLR0124  # rounding could turn a NaN into an infinity
        return np.uint16(bits >> 16)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    if rounded & 0x7FFF == 0x7F80 and not isinf(value):
        raise ValueError(f"{json.dumps(value)} is too large")
    return np.uint16(rounded)


_KEYS = ("input", "axis", "value", "buckets", "lengths", "outputs")


def _wrong(entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the form of one object."""
    for key in entry:
        if key not in _KEYS:
            yield f"has the unknown key '{clip(key)}'; the keys are {', '.join(_KEYS)}"
    if not _is_name(entry.get("input")):
        yield "must have the name of an input as 'input'"
    if not _is_count(entry.get("axis")):
        yield "must have a number from 1 on as 'axis': a dimension of a request's shape, in which 0 is the rows"
    if not isinstance(entry.get("value"), PadValue):
        yield "must have a number, a string, true or false as 'value'"
    buckets = entry.get("buckets", [1])
    if not isinstance(buckets, list) or not all(map(_is_count, buckets)) or not _is_ascending(tuple(buckets)):
        yield "must have ascending lengths from 1 on as 'buckets', as [16, 32, 64]"
    if not _is_name(entry.get("lengths", "lengths")):
        yield "must have the name of an input of the model file as 'lengths'"
    outputs = entry.get("outputs", {})
    if not isinstance(outputs, dict) or not all(map(_is_count, outputs.values())):
        yield "must have an object of output names and axes, from 1 on, as 'outputs'"


def _padding(entry: dict[str, Any]) -> Padding:
    return Padding(
        entry["input"],
        entry["axis"],
        entry.get("value"),
        tuple(entry.get("buckets", ())),
        entry.get("lengths", ""),
        entry.get("outputs", {}),
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MOST


def _is_ascending(numbers: tuple[int, ...]) -> bool:
    """Whether there is at least one number, all are at least 1, and each is greater than the one before."""
    return bool(numbers) and numbers[0] >= 1 and all(a < b for a, b in itertools.pairwise(numbers))


def _problem(text: str, parameter: str = PADDING) -> Problem:
    return Problem(f"parameter '{parameter}' {text}", parameter_path(parameter))


def parameter_path(parameter: str) -> str:
    """The path of a parameter in the configuration."""
    return f'parameters["{parameter}"]'
