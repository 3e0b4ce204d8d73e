"""The controls and states of a model, from its complete and checked configuration.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from halimede.core.types import DataType, Tensor

_BY_CONFIG_NAME = {each.config_name: each for each in DataType}


class ControlKind(Enum):
    """Names and numbers are those of Triton's configurations."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3


@dataclass(frozen=True, slots=True)
class Control:
    """An input with START, END or READY. The tensors are shared by all requests: their memory cannot be written to."""

    kind: ControlKind
    false: Tensor
    true: Tensor


@dataclass(frozen=True, slots=True)
class CorrelationControl:
    """The input with the correlation id."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]

    @property
    def identity_type(self) -> type[int] | type[str]:
        """The type of the correlation ids that it can have."""
        return str if self.datatype is DataType.BYTES else int


@dataclass(frozen=True, slots=True)
class State:
    """A pair of tensors. `dims` have the batch dimension (1) first if the model batches; -1 is a dimension of any size.

    `initial_shape` is that of a new sequence's state. `data_file` is the file with its value, None for zeros.
    `has_one_buffer`: the state stays in the same memory, and so has the same shape in all steps.
    """

    input_name: str
    output_name: str
    datatype: DataType
    dims: tuple[int, ...]
    initial_shape: tuple[int, ...]
    data_file: str | None
    has_one_buffer: bool

    def fits(self, shape: tuple[int, ...]) -> bool:
        return len(shape) == len(self.dims) and all(
            want in (-1, size) for want, size in zip(self.dims, shape, strict=True)
        )

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """The state of this shape whose elements are 0, or empty strings, whose lengths are 0."""
        itemsize = self.datatype.itemsize or 4
        return Tensor(self.input_name, self.datatype, shape, bytes(prod(shape) * itemsize))


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """`fills_rows`: a batch has a row for each sequence slot up to the highest one, as in the direct strategy.

    `outputs` are the outputs that clients see; a state may be one of them.
    """

    controls: tuple[Control, ...]
    correlation: CorrelationControl | None
    states: tuple[State, ...]
    fills_rows: bool
    is_iterative: bool
    outputs: frozenset[str]

    @property
    def hidden_outputs(self) -> tuple[str, ...]:
        """The outputs of states that clients do not see."""
        return tuple(state.output_name for state in self.states if state.output_name not in self.outputs)


# Any: JSON.
def read_plan(config: Mapping[str, Any]) -> SequencePlan | None:
    """The plan of a complete configuration in the JSON form of the REST API; None for a model without sequences."""
    batching = config.get("sequence_batching")
    if batching is None:
        return None
    batch = (1,) if config.get("max_batch_size", 0) > 0 else ()
    is_iterative = bool(batching.get("iterative_sequence", False))
    controls: list[Control] = []
    correlation = None
    for given in batching.get("control_input", ()):
        (control,) = given["control"]
        kind = ControlKind[control.get("kind", ControlKind.CONTROL_SEQUENCE_START.name)]
        shape = (*batch, 1)
        if kind is ControlKind.CONTROL_SEQUENCE_CORRID:
            correlation = CorrelationControl(given["name"], _BY_CONFIG_NAME[control["data_type"]], shape)
        else:
            controls.append(Control(kind, *_values(given["name"], shape, control)))
    return SequencePlan(
        tuple(controls),
        correlation,
        tuple(_state(given, batch) for given in batching.get("state", ())),
        # Without a strategy it is direct, but an iterative model then has the oldest strategy (`sequence_policy`).
        "oldest" not in batching and ("direct" in batching or not is_iterative),
        is_iterative,
        frozenset(output["name"] for output in config.get("output", ())),
    )


_VALUES = (
    ("int32_false_true", DataType.INT32, "<i"),
    ("fp32_false_true", DataType.FP32, "<f"),
    ("bool_false_true", DataType.BOOL, "<?"),
)


def _values(name: str, shape: tuple[int, ...], control: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The tensors of false and true."""
    field, datatype, form = next(each for each in _VALUES if control.get(each[0]))
    false, true = (Tensor(name, datatype, shape, struct.pack(form, value)) for value in control[field])
    return false, true


def _state(given: Mapping[str, Any], batch: tuple[int, ...]) -> State:
    dims = (*batch, *given["dims"])
    initial = next(iter(given.get("initial_state", ())), None)
    return State(
        given["input_name"],
        given["output_name"],
        _BY_CONFIG_NAME[given["data_type"]],
        dims,
        tuple(1 if size == -1 else size for size in dims) if initial is None else (*batch, *initial["dims"]),
        None if initial is None else initial.get("data_file"),
        bool(given.get("use_same_buffer_for_input_output", False)),
    )
