"""The names, datatypes and shapes of a graph's ports. Pure: ports are records."""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.autocomplete import ModelSignature, TensorSignature, check_signature
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import DataType, Problem, invalid

log = logging.getLogger(__name__)

DATATYPES = {
    "boolean": DataType.BOOL,
    "u8": DataType.UINT8,
    "u16": DataType.UINT16,
    "u32": DataType.UINT32,
    "u64": DataType.UINT64,
    "i8": DataType.INT8,
    "i16": DataType.INT16,
    "i32": DataType.INT32,
    "i64": DataType.INT64,
    "f16": DataType.FP16,
    "f32": DataType.FP32,
    "f64": DataType.FP64,
    "string": DataType.BYTES,
    "bf16": DataType.BF16,
}
"""Datatype by OpenVINO's name. Other types (4-bit numbers, 8-bit floats) have no wire datatype."""


@dataclass(frozen=True, slots=True)
class Port:
    """An input or output of a graph. `names` has the preferred one first, and may be empty: then `node` is the name.

    `shape` has -1 for any size; None is an unknown rank.
    """

    names: tuple[str, ...]
    node: str
    type_name: str
    shape: tuple[int, ...] | None

    def all_names(self) -> tuple[str, ...]:
        return self.names or (self.node,)


@dataclass(frozen=True, slots=True)
class NamedPort:
    """A port under the name that the configuration and the clients use; `index` is its position in the graph."""

    name: str
    index: int
    port: Port


def named_ports(ports: Sequence[Port], configured: Collection[str]) -> tuple[NamedPort, ...]:
    """Every port under the configured ones of its names, or else under its first name that no other port has.

    Ports of the same tensor have the same names. One that is left without a name is left out.
    """
    found: list[NamedPort] = []
    taken: set[str] = set()
    for index, port in enumerate(ports):
        free = [name for name in port.all_names() if name not in taken]
        for name in [name for name in free if name in configured] or free[:1]:
            taken.add(name)
            found.append(NamedPort(name, index, port))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Ports:
    """The named ports of a graph."""

    inputs: tuple[NamedPort, ...]
    outputs: tuple[NamedPort, ...]

    def signature(self, *, fixed_batch: bool = False) -> ModelSignature:
        """The tensors for a configuration. Clients see a fixed batch, which is filled up, as one of any size."""
        return ModelSignature(
            tuple(_tensor(each, fixed_batch) for each in self.inputs),
            tuple(_tensor(each, fixed_batch) for each in self.outputs),
        )


def choose_ports(inputs: Sequence[Port], outputs: Sequence[Port], config: ModelConfig) -> Ports:
    """The ports with their names; INVALID_ARG for an input, or a configured output, of a type without a wire datatype.

    Other outputs of such types are left out.
    """
    fed = {each.name for each in model_inputs(config)} | {each.name for each in made_inputs(config)}
    wanted = {each.name for each in model_outputs(config)}
    chosen = []
    for each in named_ports(outputs, wanted):
        if each.port.type_name in DATATYPES or each.name in wanted:
            chosen.append(each)
        else:
            log.warning("model '%s': output '%s' is left out: it is a %s", config.name, each.name, each.port.type_name)
    ports = Ports(named_ports(inputs, fed), tuple(chosen))
    for each in (*ports.inputs, *ports.outputs):
        if each.port.type_name not in DATATYPES:
            raise invalid(
                f"model '{config.name}': unsupported OpenVINO type '{each.port.type_name}' for I/O '{each.name}', "
                "expected a datatype that the protocol has"
            )
    return ports


def check_ports(config: ModelConfig, ports: Ports, *, fixed_batch: bool, reshapes: bool) -> None:
    """INVALID_ARG with every disagreement between configuration and graph."""
    problems = check_signature(config, ports.signature(fixed_batch=fixed_batch))
    if problems:
        raise invalid("; ".join(problem.message for problem in problems) + _hint(problems, reshapes))


def first_batch(ports: Ports) -> dict[str, NDArray[Any]]:
    """A batch of one row of zeros, or of empty strings, with which to run a graph once.

    Empty for a graph in which no dimension, or any other than the batch, has any size.
    """
    inputs: dict[str, NDArray[Any]] = {}
    has_free_batch = False
    for each in ports.inputs:
        shape, datatype = each.port.shape, DATATYPES[each.port.type_name]
        if shape is None or -1 in shape[1:]:
            return {}
        if shape[:1] == (-1,):
            has_free_batch = True
            shape = (1, *shape[1:])
        is_text = datatype is DataType.BYTES
        inputs[each.name] = np.full(shape, b"", object) if is_text else np.zeros(shape, datatype.dtype)
    return inputs if has_free_batch else {}


def _hint(problems: Iterable[Problem], reshapes: bool) -> str:
    is_shape = any(each.path.startswith("input") and each.path.endswith((".dims", ".reshape")) for each in problems)
    if reshapes or not is_shape:
        return ""
    return "; with the parameter RESHAPE_IO_LAYERS set to YES the model takes the shapes of the configuration"


def _tensor(named: NamedPort, fixed_batch: bool) -> TensorSignature:
    shape = named.port.shape
    if fixed_batch and shape:
        shape = (-1, *shape[1:])
    return TensorSignature(named.name, DATATYPES[named.port.type_name], shape)
