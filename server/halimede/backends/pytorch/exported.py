"""The signature of a program of torch.export: a JSON document in its archive, read without PyTorch. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halimede.backends.pytorch.tree import argument_paths, result_paths
from halimede.core.config.autocomplete import TensorSignature
from halimede.core.types import DataType
from halimede.core.types.error import clip, invalid

DATATYPES: Mapping[int, DataType] = {
    1: DataType.UINT8,
    2: DataType.INT8,
    3: DataType.INT16,
    4: DataType.INT32,
    5: DataType.INT64,
    6: DataType.FP16,
    7: DataType.FP32,
    8: DataType.FP64,
    12: DataType.BOOL,
    13: DataType.BF16,
    28: DataType.UINT16,
    34: DataType.UINT32,
    35: DataType.UINT64,
}
"""Datatype by the number of torch.export's schema. Others (complex numbers, 8-bit floats) have no wire datatype."""

_SYMBOL = re.compile(r"Symbol\('(\w+)'[^()]*\)")


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: `size` is -1 for a dynamic one, which has a `symbol` unless it is computed from others.

    `least` and `most` bound a dynamic size; None for no bound.
    """

    size: int
    symbol: str = ""
    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor of the program: its `path` in the arguments or results, and the `name` of an argument in the program."""

    path: str
    datatype: DataType
    dimensions: tuple[Dimension, ...]
    name: str = ""

    def signature(self, name: str) -> TensorSignature:
        return TensorSignature(name, self.datatype, tuple(each.size for each in self.dimensions))


@dataclass(frozen=True, slots=True)
class ExportedSignature:
    """The tensors that callers pass and get, in the order of the flat lists; arguments that are no tensors are not in
    it."""

    inputs: tuple[ExportedTensor, ...]
    outputs: tuple[ExportedTensor, ...]


def read_exported(document: bytes, model: str) -> ExportedSignature:
    """The signature in `models/*.json`. INVALID_ARG for a type that no request can carry, or an unknown format."""
    try:
        # Not by orjson, which ends the process if memory runs out.
        return _read(json.loads(document), model)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        text = f"model '{clip(model)}': the signature of the exported program cannot be read: {type(error).__name__}: "
        hint = "; export it again with the PyTorch that is installed here"
        raise invalid(f"{text}{clip(str(error))}{hint}") from error


def _read(program: Any, model: str) -> ExportedSignature:  # Any: JSON
    module = program["graph_module"]
    (whole,) = (each for each in module["module_call_graph"] if each["fqn"] == "")
    spec = whole["signature"]
    values = module["graph"]["tensor_values"]
    ranges = program["range_constraints"]
    inputs = [each["user_input"]["arg"] for each in module["signature"]["input_specs"] if "user_input" in each]
    outputs = [each["user_output"]["arg"] for each in module["signature"]["output_specs"] if "user_output" in each]
    arguments = _tensors(inputs, argument_paths(spec["in_spec"]), values, ranges, model)
    results = _tensors(outputs, result_paths(spec["out_spec"]), values, ranges, model)
    # The names of results are those of the operations that compute them, and say nothing to clients.
    return ExportedSignature(arguments, tuple(replace(each, name="") for each in results))


def _tensors(
    arguments: Sequence[Mapping[str, Any]], paths: Sequence[str], values: Any, ranges: Any, model: str
) -> tuple[ExportedTensor, ...]:  # Any: JSON
    found: list[ExportedTensor] = []
    for argument, path in zip(arguments, paths, strict=True):
        if "as_tensor" in argument:
            name = argument["as_tensor"]["name"]
            found.append(_tensor(values[name], path, name, ranges, model))
        elif any(key.startswith("as_sym") or key == "as_custom_obj" for key in argument):
            (kind,) = argument
            text = f"model '{clip(model)}': {path} is {kind.removeprefix('as_')}, and only tensors can be passed"
            raise invalid(f"{text}; make it a tensor or a constant, and export again")
    return tuple(found)


def _tensor(value: Any, path: str, name: str, ranges: Any, model: str) -> ExportedTensor:  # Any: JSON
    datatype = DATATYPES.get(value["dtype"])
    if datatype is None:
        text = f"model '{clip(model)}': {path} has a datatype of PyTorch ({value['dtype']}) that no request can carry"
        raise invalid(f"{text}; convert it inside the model")
    return ExportedTensor(path, datatype, tuple(_dimension(size, ranges) for size in value["sizes"]), name)


def _dimension(size: Any, ranges: Any) -> Dimension:  # Any: JSON
    if "as_int" in size:
        return Dimension(int(size["as_int"]))
    symbol = _SYMBOL.fullmatch(size["as_expr"]["expr_str"])
    if symbol is None:
        return Dimension(-1)
    bounds = ranges.get(symbol[1], {})
    least, most = bounds.get("min_val"), bounds.get("max_val")
    return Dimension(-1, symbol[1], least if isinstance(least, int) else None, most if isinstance(most, int) else None)


def batch_bounds(signature: ExportedSignature) -> tuple[int, int | None]:
    """The least and the greatest first dimension that all inputs accept; None for no limit."""
    firsts = [each.dimensions[0] for each in signature.inputs if each.dimensions and each.dimensions[0].size == -1]
    least = max((each.least for each in firsts if each.least is not None), default=0)
    most = min((each.most for each in firsts if each.most is not None), default=None)
    return least, most


def batch_problem(signature: ExportedSignature, model: str, max_batch_size: int) -> str | None:
    """Why batches of up to `max_batch_size` rows do not fit the program."""
    if max_batch_size == 0:
        return None
    least, most = batch_bounds(signature)
    called = f"model '{clip(model)}'"
    if most is not None and max_batch_size > most:
        return (
            f"{called}: max_batch_size is {max_batch_size}, but the program was exported for at most {most} rows; "
            f"write max_batch_size: {most}, or export it with a larger Dim"
        )
    if least > 1:
        return (
            f"{called}: the program was exported for at least {least} rows, and a batch may have one; export it with "
            "Dim(..., min=1), or write max_batch_size: 0"
        )
    return None
