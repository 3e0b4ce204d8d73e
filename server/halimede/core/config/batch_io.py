"""The rules for batches that are not only rows after rows: `batch_input`, `batch_output`, PADDING and BATCH_SIZES.

They also check a configuration that its model file will complete: tensors and dims that are still missing are not
compared.
"""

from collections.abc import Iterator

from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import BatchInputKind, ModelConfig, ModelInput, ModelOutput
from halimede.core.config.padding import (
    BATCH_SIZES,
    PADDING,
    Padding,
    entry_text,
    pad_element,
    parameter_path,
    read_batch_sizes,
    read_padding,
)
from halimede.core.types import DataType, Problem
from halimede.core.types.error import clip

ANY_SIZE = 2**31 - 1
"""`max_batch_size` of a configuration that its model file will complete."""

_ITEM_SHAPES = (BatchInputKind.BATCH_ITEM_SHAPE, BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN)


def batch_io_problems(config: ModelConfig) -> Iterator[Problem]:
    """Problems of `batch_input` and `batch_output`. Triton's texts where Triton has one."""
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    of = f"for {clip(config.name)}"
    for i, batch_input in enumerate(config.batch_input):
        path = f"batch_input[{i}]"
        if not batch_input.target_name:
            yield Problem("batch input must specify 'target_name'", f"{path}.target_name")
        yield from _source_count("batch input", batch_input.kind.name, batch_input.source_input, of, path)
        if batch_input.data_type not in (DataType.INT32, DataType.FP32):
            yield Problem(f"batch input data type must be TYPE_INT32 or TYPE_FP32 {of}", f"{path}.data_type")
        yield from _unknown_sources(batch_input.source_input, inputs, of, path)
        if batch_input.kind in _ITEM_SHAPES and config.max_batch_size == 0:
            text = f"batch input kind '{batch_input.kind.name}' needs a model that batches: 'max_batch_size' is 0"
            yield Problem(text, f"{path}.kind")
    seen: set[str] = set()
    for made in made_inputs(config):
        called = f"input '{clip(made.name)}', which the server computes,"
        if made.name in inputs:
            yield Problem(f"{called} must not be in 'input': no client sends it", made.path)
        if made.name in seen:
            yield Problem(f"{called} is specified more than once", made.path)
        seen.add(made.name)
    targets: set[str] = set()
    for i, batch_output in enumerate(config.batch_output):
        path = f"batch_output[{i}]"
        if not batch_output.target_name:
            yield Problem("batch output must specify 'target_name'", f"{path}.target_name")
        yield from _source_count("batch output", batch_output.kind.name, batch_output.source_input, of, path)
        yield from _unknown_sources(batch_output.source_input, inputs, of, path)
        for j, name in enumerate(batch_output.target_name):
            if outputs and name not in outputs:
                yield Problem(f"unknown target output name '{clip(name)}' {of}", f"{path}.target_name[{j}]")
            if name in targets:
                text = f"target output name '{clip(name)}' can only be specified once {of}"
                yield Problem(text, f"{path}.target_name[{j}]")
            targets.add(name)


def _source_count(what: str, kind: str, sources: tuple[str, ...], of: str, path: str) -> Iterator[Problem]:
    if len(sources) != 1:
        text = f"{what} kind '{kind}' expects 1 source input, got {len(sources)} {of}"
        # A missing list has no position of its own.
        yield Problem(text, f"{path}.source_input" if sources else path)


def _unknown_sources(sources: tuple[str, ...], inputs: set[str], of: str, path: str) -> Iterator[Problem]:
    for j, name in enumerate(sources):
        if inputs and name not in inputs:
            yield Problem(f"unknown source input name '{clip(name)}' {of}", f"{path}.source_input[{j}]")


def padding_problems(config: ModelConfig) -> Iterator[Problem]:
    """Problems of the parameters PADDING and BATCH_SIZES."""
    paddings, malformed = read_padding(config)
    yield from malformed
    path = parameter_path(PADDING)
    if paddings and config.max_batch_size == 0:
        yield Problem(f"parameter '{PADDING}' needs a model that batches: 'max_batch_size' is 0", path)
    padded: set[str] = set()
    cut: set[tuple[str, int]] = set()
    for i, padding in enumerate(paddings):
        for text in (*_padded_input(config, padding, padded), *_cut_outputs(config, padding, cut)):
            yield Problem(f"parameter '{PADDING}' {entry_text(i)} {text}", path)
        padded.add(padding.input)
        cut.update(padding.outputs.items())
    yield from _batch_sizes(config)


def _padded_input(config: ModelConfig, padding: Padding, padded: set[str]) -> Iterator[str]:
    called = f"input '{clip(padding.input)}'"
    if padding.input in padded:
        yield f"{called} is padded more than once"
    tensor = next((each for each in config.input if each.name == padding.input), None)
    if tensor is None:
        if config.input:
            yield f"{called} is not an input of the model"
        return
    if tensor.allow_ragged_batch:
        yield f"{called} has 'allow_ragged_batch', so it cannot be padded"
    if tensor.optional and (padding.lengths or padding.outputs):
        yield f"{called} is optional, so it cannot have 'lengths' or 'outputs': requests without it have no length"
    yield from _axis(called, tensor, padding.axis)
    if tensor.data_type is not DataType.INVALID:
        try:
            pad_element(padding.value, tensor.data_type)
        except ValueError as error:
            yield f"'value' of {called} does not fit {tensor.data_type.config_name}: {error}"


def _cut_outputs(config: ModelConfig, padding: Padding, cut: set[tuple[str, int]]) -> Iterator[str]:
    outputs = {each.name: each for each in config.output}
    scattered = {name for batch_output in config.batch_output for name in batch_output.target_name}
    for name, axis in padding.outputs.items():
        called = f"output '{clip(name)}'"
        if (name, axis) in cut:
            yield f"{called} is cut more than once in dimension {axis}"
        if name in scattered:
            yield f"{called} is a target of 'batch_output', so it cannot be cut"
        if name in outputs:
            yield from _axis(called, outputs[name], axis)
        elif outputs:
            yield f"{called} is not an output of the model"


def _axis(called: str, tensor: ModelInput | ModelOutput, axis: int) -> Iterator[str]:
    if tensor.reshape is not None:
        yield f"{called} has a 'reshape', so its dimensions are not those of the model"
    elif tensor.dims and axis > len(tensor.dims):
        yield f"{called} has no dimension {axis}: its shape has {1 + len(tensor.dims)} dimensions, with the rows"
    elif tensor.dims and tensor.dims[axis - 1] != -1:
        yield f"dimension {axis} of {called} is {tensor.dims[axis - 1]} in 'dims'; it must be -1"


def _batch_sizes(config: ModelConfig) -> Iterator[Problem]:
    sizes, malformed = read_batch_sizes(config)
    yield from malformed
    if not sizes:
        return
    path = parameter_path(BATCH_SIZES)
    if config.max_batch_size not in (sizes[-1], ANY_SIZE):
        yield Problem(
            f"parameter '{BATCH_SIZES}' ends with {sizes[-1]}; the last size must be 'max_batch_size', which is "
            f"{config.max_batch_size}",
            path,
        )
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    if ragged or config.batch_input or config.batch_output:
        field = "allow_ragged_batch" if ragged else "batch_input" if config.batch_input else "batch_output"
        yield Problem(
            f"parameter '{BATCH_SIZES}' cannot be combined with '{field}': a batch would need rows that no request has",
            path,
        )


def ignored_batch_settings(config: ModelConfig, why: str) -> tuple[Problem, ...]:
    """Notes on the settings for arrays, for a model whose instances take requests."""
    fields = [
        name for name, value in (("batch_input", config.batch_input), ("batch_output", config.batch_output)) if value
    ]
    notes = [Problem(f"'{name}' has no effect: {why}", name) for name in fields]
    notes += (
        Problem(f"parameter '{name}' has no effect on batches: {why}", parameter_path(name))
        for name in (PADDING, BATCH_SIZES)
        if name in config.parameters
    )
    return tuple(notes)
