"""Complete a configuration from the model file. PyTorch is imported only if the file has to be run for it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from halimede.backends.api import ModelSource
from halimede.backends.pytorch.archive import MOST_TRACED_BYTES, read_entry, traced_inputs
from halimede.backends.pytorch.exported import ExportedSignature, batch_bounds
from halimede.backends.pytorch.files import ModelFiles, find_files
from halimede.backends.pytorch.form import Form
from halimede.backends.pytorch.loading import Paths, input_names, input_order, output_names, output_order, paths_of
from halimede.backends.pytorch.module import ModuleProgram
from halimede.backends.pytorch.naming import Argument, ArgumentKind, Results
from halimede.backends.pytorch.options import read_options
from halimede.backends.pytorch.probe import ProbeError, ShapesOf, probe_outputs
from halimede.backends.pytorch.program import PackageProgram, Program
from halimede.backends.pytorch.runtime import STORAGES, runtime
from halimede.backends.pytorch.samples import ANY_SIZE, Shapes, configured_shapes, exported_shapes
from halimede.backends.pytorch.script import ScriptProgram, cause_of
from halimede.core.config.autocomplete import (
    ModelSignature,
    TensorSignature,
    batch_size_setting,
    complete,
    is_complete,
    is_given,
)
from halimede.core.config.model_config import ModelConfig, inner_dims
from halimede.core.config.sequence_tensors import model_inputs
from halimede.core.types import DataType, InferenceError
from halimede.core.types.error import clip, invalid

log = logging.getLogger(__name__)


def complete_config(config: ModelConfig, source: ModelSource) -> ModelConfig:
    """The completed configuration. INVALID_ARG with what has to be written if the file says too little."""
    if is_complete(config):
        return config
    files = find_files(config, source)
    named = replace(config, name=source.name)
    most = batch_size_setting("pytorch", source.options)
    if files.form in (Form.EXPORTED, Form.PACKAGE):
        paths = paths_of(files, source.name)
        signature = _exported_signature(named, files, paths)
        if paths.tensors is not None:
            least, limit = batch_bounds(ExportedSignature(paths.tensors, ()))
            most = 0 if least > 1 else min(most, most if limit is None else limit)
    else:
        signature = _run_signature(named, files)
    completed, notes = complete(named, signature, default_max_batch_size=most)
    for note in notes:
        log.warning("%s", note, extra={"model": source.name})
    return completed


def _exported_signature(config: ModelConfig, files: ModelFiles, paths: Paths) -> ModelSignature:
    inputs = paths.bind_inputs(config.name, input_names(config))
    inputs = _with_others(inputs, paths.input_names(), has_all=not config.input)
    outputs = paths.bind_outputs(config.name, output_names(config))
    outputs = _with_others(outputs, paths.output_names(), has_all=not config.output)
    tensors = paths.tensors
    if tensors is None:
        raise _too_little(config, files, list(inputs))
    found = tuple(tensors[at].signature(name) for name, at in inputs.items())
    if paths.results is not None:
        return ModelSignature(found, tuple(paths.results[at].signature(name) for name, at in outputs.items()))
    name = files.archive.package if files.archive is not None else ""

    def shapes(step: int) -> Shapes:
        return exported_shapes(tensors, inputs, 2 + step, ANY_SIZE + step)

    try:
        program = PackageProgram(files.path, config.name, name, None, inputs, tensors)
    except RuntimeError as error:
        raise _no_outputs(config, files, cause_of(error)) from error
    return ModelSignature(found, _outputs(config, files, program, shapes, outputs))


def _with_others(bound: Mapping[str, int], own: Sequence[str], *, has_all: bool) -> dict[str, int]:
    """The position of each configured name, and with `has_all` the other tensors under their own names."""
    taken = set(bound.values())
    rest = {name: at for at, name in enumerate(own) if has_all and at not in taken}
    return dict(sorted({**bound, **rest}.items(), key=lambda item: item[1]))


def _run_signature(config: ModelConfig, files: ModelFiles) -> ModelSignature:
    """The signature of a TorchScript file or a module: the inputs by the configuration, or by the example that the file
    was traced with, and the outputs by runs."""
    # For its errors alone: the runs need no options.
    read_options(config, config.name, files.form)
    cpu = runtime().device("cpu")
    program: ScriptProgram | ModuleProgram
    if files.form is Form.SCRIPT:
        script = ScriptProgram(files.path, config.name, cpu)
        program, results = script, script.results
    else:
        program, results = ModuleProgram(files.path, files.weights, config.name, cpu, None), Results()
    if not config.input:
        traced = _traced(files, program.arguments)
        if traced is None:
            raise _too_little(config, files, _names_of(program.arguments))
        return _traced_signature(config, files, program, results, traced)
    if not all(map(is_given, config.input)):
        raise _too_little(config, files, [each.name for each in config.input if not is_given(each)])

    def shapes(step: int) -> Shapes | None:
        return configured_shapes(config, 2 + step, ANY_SIZE + step)

    program.bind(input_order(config, config.name, program.arguments))
    first = (-1,) if config.max_batch_size > 0 else ()
    inputs = tuple(
        TensorSignature(each.name, each.data_type, (*first, *inner_dims(each))) for each in model_inputs(config)
    )
    return ModelSignature(inputs, _outputs(config, files, program, shapes, _positions(config, results)))


Traced = Sequence[tuple[str, DataType, tuple[int, ...]]]
"""Name, datatype and shape of each argument in the example of torch.jit.trace."""


def _traced(files: ModelFiles, arguments: Sequence[Argument]) -> Traced | None:
    """The example that the file was traced with; None without one, or if it does not fit `forward`."""
    if files.archive is None or not files.archive.traced:
        return None
    examples = traced_inputs(read_entry(files.path, files.archive.traced, MOST_TRACED_BYTES))
    if not examples or len(examples) != len(arguments):
        return None
    found = []
    for argument, example in zip(arguments, examples, strict=True):
        datatype = STORAGES.get(example.storage)
        if datatype is None or argument.kind is not ArgumentKind.TENSOR:
            return None
        found.append((argument.name, datatype, example.shape))
    return found


def _traced_signature(
    config: ModelConfig, files: ModelFiles, program: ScriptProgram | ModuleProgram, results: Results, traced: Traced
) -> ModelSignature:
    """The signature with the shapes of the example. Its first dimensions are a batch if one row more in each input
    makes one row more in each output."""
    program.bind({name: at for at, (name, _, _) in enumerate(traced)})
    positions = _positions(config, results)
    if len({shape[:1] for _, _, shape in traced}) == 1 and traced[0][2]:

        def rows(step: int) -> Shapes:
            return {name: (datatype, (shape[0] + step, *shape[1:])) for name, datatype, shape in traced}

        try:
            outputs = probe_outputs(config, program, rows, positions)
        except ProbeError as error:
            log.info("model '%s' takes no other number of rows than its example: %s", config.name, error)
        else:
            if all(each.shape is not None and each.shape[:1] == (-1,) for each in outputs):
                inputs = tuple(TensorSignature(name, datatype, (-1, *shape[1:])) for name, datatype, shape in traced)
                return ModelSignature(inputs, outputs)

    def same(_step: int) -> Shapes:
        return {name: (datatype, shape) for name, datatype, shape in traced}

    inputs = tuple(TensorSignature(*each) for each in traced)
    return ModelSignature(inputs, _outputs(config, files, program, same, positions))


def _positions(config: ModelConfig, results: Results) -> dict[str, int | str] | None:
    return output_order(config, config.name, results) if config.output else None


def _outputs(
    config: ModelConfig,
    files: ModelFiles,
    program: Program,
    shapes: ShapesOf,
    positions: Mapping[str, int | str] | None,
) -> tuple[TensorSignature, ...]:
    """The outputs by runs; INVALID_ARG with what has to be written."""
    try:
        return probe_outputs(config, program, shapes, positions)
    except ProbeError as error:
        raise _no_outputs(config, files, str(error)) from error


def _no_outputs(config: ModelConfig, files: ModelFiles, why: str) -> InferenceError:
    names = [each.name for each in config.output] or ["OUTPUT__0"]
    return invalid(
        f"model '{clip(config.name)}': the outputs of {files.path.name} cannot be found by a run with zeros: "
        f"{clip(why)}; write in config.pbtxt: output [ {_example(names)} ], with the right datatypes and dims"
    )


def _names_of(arguments: Sequence[Argument]) -> list[str]:
    if len(arguments) == 1 and arguments[0].kind is ArgumentKind.DICT:
        return ["KEY"]
    return [each.name for each in arguments if not each.optional]


def _too_little(config: ModelConfig, files: ModelFiles, names: Sequence[str]) -> InferenceError:
    hint = "; files of torch.jit.trace and torch.export say them" if files.form is Form.SCRIPT else ""
    return invalid(
        f"model '{clip(config.name)}': {files.path.name} does not say the datatypes and dims of its inputs; write in "
        f"config.pbtxt: input [ {_example(names)} ], with the right datatypes and dims{hint}"
    )


def _example(names: Sequence[str]) -> str:
    return ", ".join(f'{{ name: "{clip(name)}" data_type: TYPE_FP32 dims: [ ... ] }}' for name in names[:8])
