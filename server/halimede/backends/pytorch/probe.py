"""Find the outputs of a model by two runs with zeros of different sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from halimede.backends.api import RunContext
from halimede.backends.pytorch.program import Program
from halimede.backends.pytorch.results import names_of, pick
from halimede.backends.pytorch.runtime import datatype_of, runtime
from halimede.backends.pytorch.samples import Shapes, zeros
from halimede.backends.pytorch.script import cause_of
from halimede.backends.pytorch.transfer import Transfer
from halimede.core.config.autocomplete import TensorSignature
from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.types import DataType, InferenceError
from halimede.core.types.error import clip

ShapesOf = Callable[[int], Shapes | None]
"""The shapes of the inputs for step 0, and for step 1, where each size that may differ is greater; None if unknown."""


class ProbeError(Exception):
    """The text says why the outputs cannot be found."""


def probe_outputs(
    config: ModelConfig, program: Program, shapes: ShapesOf, positions: Mapping[str, int | str] | None
) -> tuple[TensorSignature, ...]:
    """The outputs; a dimension that differs between the runs has any size. ProbeError.

    `positions` are the outputs by name; None for all, with names of their own.
    """
    first = _run(config, program, shapes(0), positions)
    second = _run(config, program, shapes(1), positions)
    found = []
    for name, (datatype, shape) in first.items():
        other = second.get(name, (datatype, shape))[1]
        if len(other) != len(shape):
            raise ProbeError(f"output '{clip(name)}' has {len(shape)} or {len(other)} dimensions")
        dims = tuple(one if one == two else -1 for one, two in zip(shape, other, strict=True))
        found.append(TensorSignature(name, datatype, dims))
    return tuple(found)


def _run(
    config: ModelConfig, program: Program, shapes: Shapes | None, positions: Mapping[str, int | str] | None
) -> dict[str, tuple[DataType, tuple[int, ...]]]:
    arrays = zeros(shapes) if shapes is not None else None
    if shapes is None or arrays is None:
        raise ProbeError("its inputs have no fixed sizes")
    torch = runtime()
    inputs = tuple(ModelInput(name, datatype) for name, (datatype, _) in shapes.items())
    plain = replace(config, input=inputs, sequence_batching=None)
    # A package runs on the device that it was compiled for.
    transfer = Transfer(plain, getattr(program, "device", None), is_writing=False)
    try:
        with torch.inference_mode():
            result = program.call(transfer.values(arrays, RunContext([""], [1], [])))
        wanted = names_of(result) if positions is None else tuple(positions)
        everything = {name: at for at, name in enumerate(wanted)} if positions is None else positions
        found = pick(result, everything, wanted)
    except InferenceError as error:
        raise ProbeError(error.message) from error
    except Exception as error:
        raise ProbeError(clip(cause_of(error))) from error
    return {name: _type_of(name, value, batches=config.max_batch_size > 0) for name, value in found.items()}


def _type_of(name: str, value: Any, *, batches: bool) -> tuple[DataType, tuple[int, ...]]:  # Any: torch.Tensor
    if isinstance(value, runtime().Tensor):
        datatype = datatype_of(value.dtype)
        if datatype is None:
            raise ProbeError(f"output '{clip(name)}' is {value.dtype}, which no answer can carry")
        return datatype, tuple(value.shape)
    if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
        return DataType.BYTES, (len(value), 1) if batches else (len(value),)
    raise ProbeError(f"output '{clip(name)}' is a {type(value).__name__}")
