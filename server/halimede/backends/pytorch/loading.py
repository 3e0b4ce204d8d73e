"""From a model's files to a program whose inputs and outputs have the configuration's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halimede.backends.pytorch.exported import ExportedSignature, ExportedTensor, batch_problem
from halimede.backends.pytorch.files import ModelFiles
from halimede.backends.pytorch.form import Form
from halimede.backends.pytorch.module import ModuleProgram
from halimede.backends.pytorch.naming import (
    Argument,
    ArgumentKind,
    Results,
    bind_inputs,
    bind_outputs,
    bind_paths,
    own_names,
)
from halimede.backends.pytorch.options import TorchOptions
from halimede.backends.pytorch.program import ExportedProgram, PackageProgram, Program
from halimede.backends.pytorch.script import ScriptProgram
from halimede.core.config.autocomplete import ModelSignature, Scalars, TensorSignature, check_signature, find_scalars
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import added_inputs, hidden_outputs, model_inputs, model_outputs
from halimede.core.types import DataType, InferenceError
from halimede.core.types.error import clip, invalid


@dataclass(frozen=True, slots=True)
class Bound:
    """A loaded program, the positions or keys of its outputs, and its device (None: it chooses its devices).

    `made` has the datatypes of inputs that the server makes, as far as the file says them.
    """

    program: Program
    outputs: Mapping[str, int | str]
    device: Any | None  # Any: a torch.device
    made: Mapping[str, DataType] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Paths:
    """The tensors of a `.pt2` file by structure, and their own names; `tensors` and `results` as far as the file has
    their types."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    tensors: tuple[ExportedTensor, ...] | None
    results: tuple[ExportedTensor, ...] | None
    arguments: tuple[str, ...]
    """The names of the inputs in the program, "" for none."""

    def input_names(self) -> tuple[str, ...]:
        return own_names(self.inputs, self.arguments, "input")

    def output_names(self) -> tuple[str, ...]:
        return own_names(self.outputs, ("",) * len(self.outputs), "output")

    def bind_inputs(self, model: str, names: Sequence[str], *, needed: bool = False) -> dict[str, int]:
        """The position of each name among the inputs. INVALID_ARG, also for an input without a name if `needed`."""
        return bind_paths(model, names, self.inputs, self.input_names(), "input", needed=needed)

    def bind_outputs(self, model: str, names: Sequence[str]) -> dict[str, int]:
        """The position of each name among the outputs. INVALID_ARG."""
        return bind_paths(model, names, self.outputs, self.output_names(), "output")


def input_names(config: ModelConfig) -> tuple[str, ...]:
    """All inputs that the model gets: the configured ones, and those that the server adds."""
    return (*(each.name for each in model_inputs(config)), *(made.name for made in made_inputs(config)))


def output_names(config: ModelConfig) -> tuple[str, ...]:
    return tuple(each.name for each in model_outputs(config))


def paths_of(files: ModelFiles, model: str) -> Paths:
    """The tensors of a `.pt2` file. INVALID_ARG if a package does not say them."""
    if files.exported is not None:
        exported = files.exported
        return Paths(
            tuple(each.path for each in exported.inputs),
            tuple(each.path for each in exported.outputs),
            exported.inputs,
            exported.outputs,
            tuple(each.name for each in exported.inputs),
        )
    if files.package is None:
        text = f"model '{clip(model)}': the AOTInductor package in {files.path.name} does not say its arguments"
        hint = "; compile it again with the PyTorch that is installed here"
        raise invalid(text + hint)
    package = files.package
    nameless = ("",) * len(package.input_paths)
    return Paths(package.input_paths, package.output_paths, package.inputs, None, nameless)


def check_exported(config: ModelConfig, files: ModelFiles, model: str) -> Scalars:
    """The scalars that a `.pt2` file shows. INVALID_ARG with every disagreement between it and the configuration."""
    paths = paths_of(files, model)
    inputs = paths.bind_inputs(model, input_names(config), needed=True)
    outputs = paths.bind_outputs(model, output_names(config))
    if paths.tensors is None:
        return Scalars()
    results = paths.results
    if results is not None:
        found = tuple(results[at].signature(name) for name, at in outputs.items())
    else:
        # A package does not say the types of its results; a run at load shows them.
        found = tuple(TensorSignature(each.name, each.data_type, None) for each in model_outputs(config))
    signature = ModelSignature(tuple(paths.tensors[at].signature(name) for name, at in inputs.items()), found)
    problems = [each.message for each in check_signature(config, signature)]
    bounds = batch_problem(ExportedSignature(paths.tensors, ()), model, config.max_batch_size)
    if bounds:
        problems.append(bounds)
    if problems:
        raise invalid("; ".join(problems))
    return find_scalars(config, signature)


def single_elements(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The outputs of a model that does not batch that the program may have as scalars: those of one element."""
    if config.max_batch_size > 0:
        return {}
    return {each.name: each.dims for each in model_outputs(config) if each.dims and set(each.dims) == {1}}


def open_program(
    config: ModelConfig, files: ModelFiles, model: str, device: Any | None, options: TorchOptions
) -> Bound:
    """Load the program on the device, None for one that it chooses itself. InferenceError."""
    match files.form:
        case Form.SCRIPT:
            script = ScriptProgram(files.path, model, device)
            script.bind(input_order(config, model, script.arguments))
            return Bound(script, output_order(config, model, script.results), device)
        case Form.MODULE:
            module = ModuleProgram(files.path, files.weights, model, device, options.compile)
            module.bind(input_order(config, model, module.arguments))
            return Bound(module, output_order(config, model, Results()), module.device)
    paths = paths_of(files, model)
    inputs = paths.bind_inputs(model, input_names(config), needed=True)
    outputs: Mapping[str, int | str] = dict(paths.bind_outputs(model, output_names(config)))
    tensors = paths.tensors
    made = {} if tensors is None else {each.name: tensors[inputs[each.name]].datatype for each in made_inputs(config)}
    if files.form is Form.EXPORTED:
        exported = ExportedProgram(files.path, model, device, inputs)
        return Bound(exported, outputs, exported.device, made)
    name = files.archive.package if files.archive is not None else ""
    package = PackageProgram(files.path, model, name, device, inputs, paths.tensors)
    return Bound(package, outputs, package.device, made)


def input_order(config: ModelConfig, model: str, arguments: Sequence[Argument]) -> dict[str, int] | None:
    """The position of each input among the arguments of `forward`; None: one dictionary takes all. INVALID_ARG."""
    optional = frozenset(each.name for each in config.input if each.optional)
    has_order = not added_inputs(config) and not made_inputs(config)
    positions = bind_inputs(model, input_names(config), arguments, optional=optional, has_order=has_order)
    for each in model_inputs(config):
        kind = arguments[positions[each.name]].kind if positions is not None else ArgumentKind.TENSOR
        is_text = each.data_type is DataType.BYTES
        if kind is not (ArgumentKind.STRINGS if is_text else ArgumentKind.TENSOR) and kind is not ArgumentKind.ANY:
            raise _wrong_kind(model, each.name, each.data_type, kind)
        dims = each.dims if each.reshape is None else each.reshape.shape
        if is_text and (tuple(dims) != (1,) if config.max_batch_size > 0 else len(dims) != 1):
            text = f"model '{clip(model)}': input '{clip(each.name)}' is a list of strings, which has one dimension; "
            raise invalid(text + ("write dims: [ 1 ]" if config.max_batch_size > 0 else "write dims: [ -1 ]"))
    return positions


def _wrong_kind(model: str, name: str, datatype: DataType, kind: ArgumentKind) -> InferenceError:
    text = f"model '{clip(model)}': input '{clip(name)}' is {datatype.config_name}, and the model takes {kind.value}"
    return invalid(text)


def output_order(config: ModelConfig, model: str, results: Results) -> dict[str, int | str]:
    """The position or key of each output among the results. INVALID_ARG."""
    return bind_outputs(model, output_names(config), results, has_order=not hidden_outputs(config))
