"""The inputs, outputs and optimization profiles of an engine, and a configuration compared with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halimede.backends.tensorrt.profiles import Profile, Range, Shape, batch_problem
from halimede.core.config.autocomplete import ModelSignature, TensorSignature, check_signature, complete
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.shape_tensors import MAX_VALUES, can_have_rows
from halimede.core.types import DataType, InferenceError
from halimede.core.types.error import clip, invalid, unsupported

DATATYPES = {
    "FLOAT": DataType.FP32,
    "HALF": DataType.FP16,
    "BF16": DataType.BF16,
    "INT8": DataType.INT8,
    "INT32": DataType.INT32,
    "INT64": DataType.INT64,
    "UINT8": DataType.UINT8,
    "BOOL": DataType.BOOL,
}
"""Datatype by the name in TensorRT. Others (FP8, INT4, FP4, E8M0) have no wire datatype."""


@dataclass(frozen=True, slots=True)
class EngineTensor:
    """An input or output. `shape` has -1 for any size. `on_host`: its elements are read or written on the CPU."""

    name: str
    datatype: DataType
    shape: Shape
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class EngineSignature:
    """All tensors, in the engine's order, and all profiles."""

    inputs: tuple[EngineTensor, ...]
    outputs: tuple[EngineTensor, ...]
    profiles: tuple[Profile, ...]

    def as_model(self) -> ModelSignature:
        """The tensors as every backend describes them."""
        return ModelSignature(tuple(map(_as_tensor, self.inputs)), tuple(map(_as_tensor, self.outputs)))

    @property
    def has_shape_tensors(self) -> bool:
        return any(each.on_host for each in (*self.inputs, *self.outputs))

    def max_batch(self) -> int:
        """The largest batch that every profile takes; 0 if the engine does not batch."""
        if not (self.inputs and self.as_model().can_batch()):
            return 0
        return min(each.batches[1] for each in self.profiles)


def _as_tensor(each: EngineTensor) -> TensorSignature:
    return TensorSignature(each.name, each.datatype, each.shape, is_values=each.on_host)


def read_signature(trt: Any, engine: Any, model: str) -> EngineSignature:  # Any: tensorrt has no types
    """The engine's tensors. UNSUPPORTED names a tensor with a datatype or a layout that requests cannot have."""
    inputs: list[EngineTensor] = []
    outputs: list[EngineTensor] = []
    profiles = range(engine.num_optimization_profiles)
    shapes: list[dict[str, Range]] = [{} for _ in profiles]
    values: list[dict[str, Range]] = [{} for _ in profiles]
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        kind = "input" if is_input else "output"
        given = engine.get_tensor_dtype(name).name
        if given not in DATATYPES:
            raise _unsupported(model, kind, name, f"has datatype {given}, expected one of {', '.join(DATATYPES)}")
        for profile in profiles:
            if engine.get_tensor_format(name, profile) != trt.TensorFormat.LINEAR:
                layout = clip(engine.get_tensor_format_desc(name, profile))
                text = f"has the layout '{layout}', expected a linear one: build the engine with the format LINEAR"
                raise _unsupported(model, kind, name, text)
        if not is_input and (aliased := _aliased(engine, name)):
            raise _unsupported(model, kind, name, f"shares the memory of input '{clip(aliased)}'")
        on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
        tensor = EngineTensor(name, DATATYPES[given], tuple(engine.get_tensor_shape(name)), on_host)
        (inputs if is_input else outputs).append(tensor)
        if not is_input:
            continue
        for profile in profiles:
            # Only tensors of variable shape are sure to have ranges.
            is_fixed = -1 not in tensor.shape
            fixed = [tensor.shape] * 3
            shapes[profile][name] = _range(fixed if is_fixed else engine.get_tensor_profile_shape(name, profile))
            if on_host and engine.is_shape_inference_io(name):
                # The binding takes the profile first, whatever its names for the arguments say.
                values[profile][name] = _range(engine.get_tensor_profile_values(profile, name))
    found = tuple(Profile(profile, shapes[profile], values[profile]) for profile in profiles)
    return EngineSignature(tuple(inputs), tuple(outputs), found)


def _range(three: Sequence[Sequence[int]]) -> Range:
    """A profile's minimum, optimum and maximum."""
    minimum, optimum, maximum = (tuple(each) for each in three)
    return Range(minimum, optimum, maximum)


def _unsupported(model: str, kind: str, name: str, what: str) -> InferenceError:
    return unsupported(f"model '{clip(model)}': {kind} '{clip(name)}' of the engine {what}")


def _aliased(engine: Any, name: str) -> str:
    """The input whose memory the output shares; "" for none. Only newer versions have such engines."""
    find = getattr(engine, "get_aliased_input_tensor", None)
    return (find(name) or "") if find is not None else ""


def complete_config(
    config: ModelConfig, signature: EngineSignature, limit: int | None
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration completed from the engine, and notes for the log.

    `max_batch_size` becomes the engine's own, at most `limit` if it is given. INVALID_ARG if the configuration asks for
    more than the engine takes.
    """
    most = signature.max_batch()
    if 0 < most < config.max_batch_size:
        raise invalid(
            f"autofill failed for model '{clip(config.name)}': configuration specified max-batch "
            f"{config.max_batch_size} but TensorRT engine only supports max-batch {most}"
        )
    # Whether the first value of a shape tensor is the number of rows, only the author of the engine knows.
    usual = 0 if signature.has_shape_tensors else most
    filled = usual if limit is None else min(usual, limit)
    completed, notes = complete(config, signature.as_model(), default_max_batch_size=filled)
    # A note on a batch size that was filled in would ask for a larger one, which the engine does not take.
    return completed, notes if completed.max_batch_size == config.max_batch_size else ()


def check_engine(config: ModelConfig, signature: EngineSignature) -> None:
    """INVALID_ARG with every disagreement between the configuration and the engine."""
    problems = [problem.message for problem in check_signature(config, signature.as_model())]
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    hosts = {each.name for each in (*signature.inputs, *signature.outputs) if each.on_host}
    problems += [
        f"model '{clip(config.name)}', tensor '{clip(each.name)}': the model configuration says is_shape_tensor, and "
        "the engine has no shape tensor of this name"
        for each in tensors
        if each.is_shape_tensor and each.name not in hosts
    ]
    if config.max_batch_size > 0:
        problems += [
            f"model '{clip(config.name)}', tensor '{clip(name)}': it is a shape tensor of the engine: set "
            "is_shape_tensor, because the number of rows is then its first value"
            for name in sorted(hosts - {each.name for each in tensors if each.is_shape_tensor})
            if any(each.name == name for each in tensors)
        ]
    problems += [
        f"model '{clip(config.name)}', tensor '{clip(each.name)}': a shape tensor of a model that batches must have "
        f"one dimension from 1 to {MAX_VALUES}, the number of its values without the rows, got {list(each.dims)}"
        for each in tensors
        if each.is_shape_tensor and config.max_batch_size > 0 and not can_have_rows(each.dims)
    ]
    if problems:
        raise invalid("; ".join(problems))


def usable_profiles(config: ModelConfig, signature: EngineSignature, indices: tuple[int, ...]) -> tuple[Profile, ...]:
    """The profiles of an instance. INVALID_ARG if a batch of the configuration would fit none of them."""
    profiles = tuple(signature.profiles[index] for index in indices)
    if config.max_batch_size > 0 and signature.inputs and (problem := batch_problem(profiles, config.max_batch_size)):
        raise invalid(f"model '{clip(config.name)}': max_batch_size is {config.max_batch_size}, but {problem}")
    return profiles
