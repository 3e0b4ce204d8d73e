"""Complete a configuration from the tensors of a model file, and check at load that both agree.

A backend reads a `ModelSignature` from the file; the rules here are the same for every format that has names,
datatypes and shapes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from halimede.core.config.made_inputs import MadeInput, made_inputs
from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelTensorReshape,
    inner_dims,
)
from halimede.core.config.parameters import number_setting
from halimede.core.config.sequence_tensors import (
    LocatedTensor,
    added_inputs,
    hidden_outputs,
    model_inputs,
    model_outputs,
)
from halimede.core.config.shape_tensors import with_rows, without_rows
from halimede.core.types import DataType, Problem
from halimede.core.types.error import clip, invalid

DEFAULT_MAX_BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One tensor of a model file. `shape` includes the batch dimension, -1 for any size; None for an unknown rank.

    `is_values` is set for a shape tensor of TensorRT, whose elements are dimensions of others.
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...] | None
    is_values: bool = False


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """All tensors of a model file, in the file's order."""

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]

    def can_batch(self) -> bool:
        """Whether the first dimension of every input and output has any size, so that it can be the batch dimension."""
        tensors = [tensor for tensor in (*self.inputs, *self.outputs) if not tensor.is_values]
        return bool(tensors) and all(tensor.shape is not None and tensor.shape[:1] == (-1,) for tensor in tensors)


_Tensor = TypeVar("_Tensor", ModelInput, ModelOutput)


def is_complete(config: ModelConfig) -> bool:
    """Whether all inputs and outputs have a datatype and dims: a model file adds nothing to them."""
    has_both = bool(config.input and config.output)
    return has_both and all(map(is_given, config.input)) and all(map(is_given, config.output))


def is_given(tensor: ModelInput | ModelOutput) -> bool:
    """Whether the configuration has its datatype and shape."""
    return tensor.data_type is not DataType.INVALID and (bool(tensor.dims) or tensor.reshape is not None)


def batch_size_setting(backend: str, settings: Mapping[str, str], default: int = DEFAULT_MAX_BATCH_SIZE) -> int:
    """The maximum batch size that a backend's settings have for models without one. INVALID_ARG."""
    return number_setting(backend, settings, "default-max-batch-size", default)


def complete(
    config: ModelConfig, signature: ModelSignature, *, default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
) -> tuple[ModelConfig, tuple[str, ...]]:
    """The configuration completed from the model file, and notes for the log. `config.name` may be empty.

    A configuration with all inputs and outputs is left unchanged: only then can a `max_batch_size` of 0 mean that the
    model must not batch. INVALID_ARG if the configuration asks for batching and the model cannot batch.
    """
    name = clip(config.name)
    computed = {made.name for made in made_inputs(config)}
    signature = replace(signature, inputs=tuple(each for each in signature.inputs if each.name not in computed))
    if is_complete(config):
        return config, (
            f"skipping model configuration auto-complete for '{name}': inputs and outputs already specified",
        )
    notes: list[str] = []
    max_batch_size = config.max_batch_size
    if not signature.can_batch():
        if max_batch_size > 0:
            raise invalid(
                f"autofill failed for model '{name}': model does not support batching while non-zero max_batch_size is "
                "specified"
            )
    elif max_batch_size == 0 and _spells_out_batch(config, signature):
        notes.append(
            f"no max_batch_size was filled in for model '{name}': its configuration gives dims with the batch dimension"
        )
    elif max_batch_size == 0 and default_max_batch_size > 0:
        max_batch_size = default_max_batch_size
        notes.append(
            f"autofilled max_batch_size to {max_batch_size} for model '{name}' since batching is supported but no "
            "max_batch_size is specified in model configuration. Must specify max_batch_size to utilize autofill with "
            "a larger max batch size"
        )
    has_scheduler = (config.dynamic_batching, config.sequence_batching, config.ensemble_scheduling) != (
        None,
        None,
        None,
    )
    batching = config.dynamic_batching
    if max_batch_size > 1 and not has_scheduler:
        batching = ModelDynamicBatching()
    # Clients neither send nor see these, except a state that the configuration has as an output.
    added = {each.tensor.name for each in added_inputs(config)}
    states = {each.tensor.name for each in hidden_outputs(config)}
    file_inputs = tuple(each for each in signature.inputs if each.name not in added)
    file_outputs = tuple(each for each in signature.outputs if each.name not in states)
    inputs = _completed_tensors(config.input, file_inputs, ModelInput, max_batch_size > 0)
    outputs = _completed_tensors(config.output, file_outputs, ModelOutput, max_batch_size > 0)
    completed = replace(
        config,
        max_batch_size=max_batch_size,
        dynamic_batching=batching,
        input=inputs,
        output=tuple(_scattered_output(config, inputs, each) for each in outputs),
    )
    return completed, tuple(notes)


def _spells_out_batch(config: ModelConfig, signature: ModelSignature) -> bool:
    """Whether a tensor in the configuration has as many dims as in the file: then its first dim is the batch."""
    ranks = {tensor.name: len(tensor.shape) for tensor in signature.inputs + signature.outputs if tensor.shape}
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    return any(tensor.dims and len(inner_dims(tensor)) == ranks.get(tensor.name) for tensor in tensors)


def _completed_tensors(
    given: tuple[_Tensor, ...], signatures: Sequence[TensorSignature], kind: type[_Tensor], batches: bool
) -> tuple[_Tensor, ...]:
    if not given:
        return tuple(_completed_tensor(kind(name=file_tensor.name), file_tensor, batches) for file_tensor in signatures)
    by_name = {file_tensor.name: file_tensor for file_tensor in signatures}
    # A tensor that the file does not have is kept, and the check at load reports it.
    return tuple(
        _completed_tensor(tensor, by_name[tensor.name], batches) if tensor.name in by_name else tensor
        for tensor in given
    )


def _completed_tensor(tensor: _Tensor, file_tensor: TensorSignature, batches: bool) -> _Tensor:
    if tensor.data_type is DataType.INVALID:
        tensor = replace(tensor, data_type=file_tensor.datatype)
    if tensor.dims or tensor.reshape is not None or file_tensor.shape is None:
        return tensor
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch:
        # The file has only the flat shape of a batch.
        return tensor
    if file_tensor.is_values:
        # A model that batches has the number of rows as a further value.
        own = without_rows(file_tensor.shape) if batches else file_tensor.shape
        return replace(tensor, dims=own, is_shape_tensor=True)
    dims = file_tensor.shape[1:] if batches else file_tensor.shape
    if dims:
        return replace(tensor, dims=dims)
    # A configuration cannot have a tensor without dims: clients see one element if the model has a scalar.
    return replace(tensor, dims=(1,), reshape=ModelTensorReshape() if batches else None)


def _scattered_output(config: ModelConfig, inputs: Sequence[ModelInput], output: ModelOutput) -> ModelOutput:
    """The completed output; a target of `batch_output` has the dims of its source, because the file's shape is flat."""
    sources = [name for each in config.batch_output if output.name in each.target_name for name in each.source_input]
    is_given = any(each.name == output.name and (each.dims or each.reshape) for each in config.output)
    source = next((each for each in inputs if each.name in sources), None)
    if is_given or source is None:
        return output
    return replace(output, dims=source.dims, reshape=source.reshape)


def check_signature(config: ModelConfig, signature: ModelSignature) -> tuple[Problem, ...]:
    """Every disagreement between a complete configuration and the model file.

    All inputs of the file must be configured, because the model needs them to run; outputs may be omitted. Control
    inputs and states are inputs and outputs like others.
    """
    return tuple(_signature_problems(config, signature))


def _signature_problems(config: ModelConfig, signature: ModelSignature) -> Iterator[Problem]:
    added, computed = added_inputs(config), made_inputs(config)
    expected = len(config.input) + len(added) + len(computed)
    if expected != len(signature.inputs):
        yield Problem(
            f"unable to load model '{clip(config.name)}', configuration expects {expected} inputs, model "
            f"provides {len(signature.inputs)}",
            "input",
        )
    sides: tuple[tuple[str, Sequence[LocatedTensor[ModelInput | ModelOutput]], Sequence[TensorSignature]], ...] = (
        ("input", (*_located("input", config.input), *added), signature.inputs),
        ("output", (*_located("output", config.output), *hidden_outputs(config)), signature.outputs),
    )
    for kind, tensors, signatures in sides:
        by_name = {file_tensor.name: file_tensor for file_tensor in signatures}
        for located in tensors:
            tensor = located.tensor
            if tensor.name in by_name:
                yield from _disagreements(config, tensor, by_name[tensor.name], kind, located.path)
            else:
                yield _unknown(config, kind, tensor.name, by_name, located.name_path)
    inputs = {file_tensor.name: file_tensor for file_tensor in signature.inputs}
    for made in computed:
        if made.name not in inputs:
            yield _unknown(config, "input", made.name, inputs, made.path)
        elif problem := _made_problem(made, inputs[made.name]):
            text = f"unable to load model '{clip(config.name)}', input '{clip(made.name)}' is made by the server"
            yield Problem(f"{text}: {problem}", made.path)


@dataclass(frozen=True, slots=True)
class Scalars:
    """The scalars of a model that does not batch: its inputs, and the configured dims, all 1, of its outputs."""

    inputs: frozenset[str] = frozenset()
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def find_scalars(config: ModelConfig, signature: ModelSignature) -> Scalars:
    """The tensors that clients see with dims and the model as scalars; the configuration must fit the signature."""
    if config.max_batch_size > 0:
        return Scalars()  # the dims of a tensor are then [1], and `reshape` removes them
    inputs = {each.name for each in signature.inputs if each.shape == ()}
    outputs = {each.name for each in signature.outputs if each.shape == ()}
    return Scalars(
        frozenset(each.name for each in model_inputs(config) if each.name in inputs),
        {each.name: inner_dims(each) for each in model_outputs(config) if each.name in outputs},
    )


def _unknown(config: ModelConfig, kind: str, name: str, allowed: Iterable[str], path: str) -> Problem:
    return Problem(
        f"unable to load model '{clip(config.name)}', unexpected inference {kind} '{clip(name)}', allowed {kind}s are: "
        f"{clip(', '.join(allowed))}",
        path,
    )


def _made_problem(made: MadeInput, file_tensor: TensorSignature) -> str | None:
    if file_tensor.datatype not in made.datatypes:
        given = " or ".join(datatype.config_name for datatype in made.datatypes)
        return f"it has datatype {given}, model provides {file_tensor.datatype.config_name}"
    if file_tensor.shape is not None and len(file_tensor.shape) != made.rank:
        shape = _shape_text(file_tensor.shape)
        return f"it has {made.rank} dimension{'s' * (made.rank > 1)}, model provides shape {shape}"
    return None


def _located(kind: str, tensors: Sequence[_Tensor]) -> list[LocatedTensor[_Tensor]]:
    return [LocatedTensor(tensor, f"{kind}[{i}]", f"{kind}[{i}].name") for i, tensor in enumerate(tensors)]


def _disagreements(
    config: ModelConfig, tensor: ModelInput | ModelOutput, file_tensor: TensorSignature, kind: str, path: str
) -> Iterator[Problem]:
    if tensor.data_type is not file_tensor.datatype:
        yield Problem(
            f"unable to load model '{clip(config.name)}', configuration expects datatype "
            f"{tensor.data_type.config_name} for {kind} '{clip(tensor.name)}', model provides "
            f"{file_tensor.datatype.config_name}",
            f"{path}.data_type",
        )
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch:
        if file_tensor.shape is not None and file_tensor.shape != (-1,):
            # Two spaces, as in Triton.
            text = (
                f"unable to load model '{clip(config.name)}', configuration expects model provides input with shape "
                f"[-1]  for ragged input '{clip(tensor.name)}', model provides {_shape_text(file_tensor.shape)}"
            )
            yield Problem(text, f"{path}.allow_ragged_batch")
        return
    if kind == "output" and any(tensor.name in each.target_name for each in config.batch_output):
        # Clients see the shape of an input, whatever the model's own is.
        return
    text = ""
    if file_tensor.shape == () and config.max_batch_size == 0:
        if set(dims := inner_dims(tensor)) - {1}:
            text = (
                f"unable to load model '{clip(config.name)}', scalar tensor '{clip(tensor.name)}', should only provide "
                "1 in the model configuration when the model doesn't support batching. Model configuration provided: "
                f"{_shape_text(dims)}."
            )
    elif file_tensor.shape is not None and (problem := _dims_problem(config, tensor, file_tensor.shape)):
        text = f"model '{clip(config.name)}', tensor '{clip(tensor.name)}': {problem}"
    if text:
        yield Problem(text, f"{path}.dims" if tensor.reshape is None else f"{path}.reshape")


def _dims_problem(config: ModelConfig, tensor: ModelInput | ModelOutput, shape: tuple[int, ...]) -> str | None:
    inner = inner_dims(tensor)
    if config.max_batch_size == 0:
        if _agree(inner, shape):
            return None
        return (
            f"the model expects {len(shape)} dimensions (shape {_shape_text(shape)}) but the model configuration "
            f"specifies {len(inner)} dimensions (shape {_shape_text(inner)})"
        )
    if tensor.is_shape_tensor:
        if with_rows(inner) == shape:
            return None
        wanted = f"shape {_shape_text(with_rows(inner))}, with the number of rows as the first value"
        return f"the model expects shape {_shape_text(shape)} but the model configuration specifies {wanted}"
    if shape[:1] != (-1,):
        return (
            "for the model to support batching the shape should have at least 1 dimension and the first dimension must "
            f"be -1; but shape expected by the model is {_shape_text(shape)}"
        )
    full = (-1, *inner)
    if _agree(full, shape):
        return None
    return (
        f"the model expects {len(shape)} dimensions (shape {_shape_text(shape)}) but the model configuration specifies "
        f"{len(full)} dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
        f"tensor shape, making complete shape {_shape_text(full)})"
    )


def _agree(configured: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the model accepts every size that the configuration accepts."""
    return len(configured) == len(shape) and all(want in (-1, dim) for dim, want in zip(configured, shape, strict=True))


def _shape_text(shape: Sequence[int]) -> str:
    return clip(f"[{','.join(map(str, shape))}]")
