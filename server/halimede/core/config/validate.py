"""The rules for a complete model configuration.

`validate` returns every problem, not only the first; texts are Triton's where Triton has one. Two other checks are
elsewhere: whether this server supports what the configuration asks for (`support`), and whether the configuration
agrees with the model file (`autocomplete.check_signature`).
"""

from collections.abc import Iterator, Sequence

from halimede.core.config.batch_io import batch_io_problems, padding_problems
from halimede.core.config.batching import dynamic_batching_problems, sequence_batching_problems
from halimede.core.config.dataflow import check_dataflow
from halimede.core.config.model_config import (
    InputFormat,
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelWarmup,
)
from halimede.core.config.names import is_unprintable, model_name_problem, path_problem
from halimede.core.config.shapes import dims_problems, reshape_problem
from halimede.core.types import DataType, Problem
from halimede.core.types.error import clip

MAX_INSTANCES = 256
"""Maximum number of instances of one model, over all groups and devices."""


def validate(config: ModelConfig, directory_name: str | None = None) -> tuple[Problem, ...]:
    """Every problem of a complete configuration; empty for a valid one.

    The order is Triton's, which reports only the first one. `directory_name` is the name of the model's directory; None
    for a configuration without a directory.
    """
    problems = [*_names(config, directory_name), *_batch_size(config), *_version_policy(config)]
    if config.dynamic_batching is not None:
        problems += dynamic_batching_problems(config, config.dynamic_batching)
    if config.sequence_batching is not None:
        problems += _no_cache(config, "sequence batching scheduler")
        problems += sequence_batching_problems(config, config.sequence_batching)
    problems += _ensemble(config)
    if config.is_decoupled:
        problems += _no_cache(config, "'decoupled' transaction policy")
    problems += _tensors(config)
    problems += batch_io_problems(config)
    problems += _instance_groups(config)
    problems += _files(config)
    problems += padding_problems(config)
    problems += (p for i, sample in enumerate(config.model_warmup) for p in _warmup(sample, f"model_warmup[{i}]"))
    return tuple(problems)


def _names(config: ModelConfig, directory_name: str | None) -> Iterator[Problem]:
    if config.name and (problem := model_name_problem(config.name)):
        yield Problem(problem, "name")
    if directory_name is not None and config.name not in ("", directory_name):
        yield Problem(
            f"unexpected directory name '{clip(directory_name)}' for model '{clip(config.name)}', "
            "directory name must equal model name",
            "name",
        )


def _version_policy(config: ModelConfig) -> Iterator[Problem]:
    policy = config.version_policy
    if policy is None:
        return
    if policy.latest is not None and policy.latest.num_versions < 1:
        yield Problem("'num_versions' must be >= 1", "version_policy.latest.num_versions")
    if policy.specific is not None:
        if not policy.specific.versions:
            yield Problem("must name at least one version", "version_policy.specific.versions")
        for i, version in enumerate(policy.specific.versions):
            if version < 1:
                yield Problem(f"version {version} must be >= 1", f"version_policy.specific.versions[{i}]")


def _batch_size(config: ModelConfig) -> Iterator[Problem]:
    if config.max_batch_size < 0:
        yield Problem(f"'max_batch_size' must be non-negative value for {clip(config.name)}", "max_batch_size")


def _tensors(config: ModelConfig) -> Iterator[Problem]:
    both: tuple[tuple[str, Sequence[ModelInput | ModelOutput]], ...] = (
        ("input", config.input),
        ("output", config.output),
    )
    for kind, tensors in both:
        # A python model may have no tensors: its code may only do work while it is loaded.
        if not tensors and config.ensemble_scheduling is None and config.backend != "python":
            yield Problem(f"model configuration must contain at least one {kind}, none were specified", kind)
        seen: set[str] = set()
        for i, tensor in enumerate(tensors):
            path = f"{kind}[{i}]"
            yield from _tensor(config, tensor, kind, path)
            if tensor.name in seen and tensor.name:
                text = f"model {kind} '{clip(tensor.name)}' is specified more than once for {clip(config.name)}"
                yield Problem(text, f"{path}.name")
            seen.add(tensor.name)


def undeclared(config: ModelConfig) -> Iterator[str]:
    """Yield a warning if a complete configuration of a python model has no inputs, or no outputs."""
    missing = [kind for kind, tensors in (("inputs", config.input), ("outputs", config.output)) if not tensors]
    if missing and config.ensemble_scheduling is None:
        yield (
            f"it has no {' and no '.join(missing)}: neither the configuration nor auto_complete_config in model.py "
            "declares any; requests with undeclared tensors are refused"
        )


def _tensor(config: ModelConfig, tensor: ModelInput | ModelOutput, kind: str, path: str) -> Iterator[Problem]:
    called = f"model {kind} '{clip(tensor.name)}'" if tensor.name else f"model {kind}"
    of = f" for {clip(config.name)}"
    if not tensor.name:
        yield Problem(f"{called} must specify 'name'{of}", f"{path}.name")
    elif is_unprintable(tensor.name):
        yield Problem(f"{called} must have a name without control characters{of}", f"{path}.name")
    if tensor.data_type is DataType.INVALID:
        yield Problem(f"{called} must specify 'data_type'{of}", f"{path}.data_type")
    if not tensor.dims:
        yield Problem(f"{called} must specify 'dims'{of}", f"{path}.dims")
    if tensor.reshape is not None and not tensor.reshape.shape and config.max_batch_size == 0:
        text = "cannot have empty reshape for non-batching model as scalar tensors are not supported"
        yield Problem(f"{called} {text}{of}", f"{path}.reshape")
    invalid = tuple(dims_problems(tensor.dims, f"{called} dimension", of, f"{path}.dims"))
    yield from invalid
    if tensor.reshape is not None and tensor.dims:
        shape = tensor.reshape.shape
        invalid_shape = tuple(dims_problems(shape, f"{called} reshape dimensions", of, f"{path}.reshape.shape"))
        yield from invalid_shape
        if not invalid and not invalid_shape and (problem := reshape_problem(tensor.dims, shape)):
            yield Problem(f"{called} {problem}{of}", f"{path}.reshape")
    if isinstance(tensor, ModelInput):
        if tensor.format is not InputFormat.FORMAT_NONE and len(tensor.dims) != 3:
            yield Problem(f"model input NHWC/NCHW require 3 dims{of}", f"{path}.format")
        if tensor.allow_ragged_batch and config.max_batch_size == 0:
            yield Problem(f"{called} can't be ragged: the model does not batch", f"{path}.allow_ragged_batch")
    elif problem := path_problem(tensor.label_filename):
        yield Problem(f"'label_filename' of {called} {problem}", f"{path}.label_filename")


def _ensemble(config: ModelConfig) -> Iterator[Problem]:
    name = clip(config.name)
    ensemble = config.ensemble_scheduling
    if ensemble is None:
        if config.platform == "ensemble":
            yield Problem(
                f"ensemble scheduling must be set for ensemble {name} whose platform is ensemble", "ensemble_scheduling"
            )
        return
    path = "ensemble_scheduling"
    if config.platform != "ensemble":
        yield Problem(f"ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble", path)
    if config.instance_group:
        yield Problem(f"instance group should not be specified for ensemble '{name}'", "instance_group")
    if config.optimization is not None:
        yield Problem(f"optimization should not be specified for ensemble '{name}'", "optimization")
    if config.model_warmup:
        yield Problem(f"model_warmup can not be specified for ensemble '{name}'", "model_warmup")
    if not ensemble.step:
        yield Problem(f"must specify 'step' for ensemble '{name}'", f"{path}.step")
    for i, step in enumerate(ensemble.step):
        where = f"{path}.step[{i}]"
        if not step.model_name:
            yield Problem(f"must specify 'model_name' in step {i} of ensemble '{name}'", f"{where}.model_name")
        elif problem := model_name_problem(step.model_name):
            yield Problem(f"step {i} of ensemble '{name}': {problem}", f"{where}.model_name")
        if step.model_version < 1 and step.model_version != -1:
            yield Problem(
                f"step {i} of ensemble '{name}' must name a version >= 1, or -1 for the latest, got "
                f"{step.model_version}",
                f"{where}.model_version",
            )
        for field, tensors in (("input_map", step.input_map), ("output_map", step.output_map)):
            if not tensors:
                # The position is the step's, because a missing map has none.
                yield Problem(f"must specify '{field}' in step {i} of ensemble '{name}'", where)
    if all(step.input_map and step.output_map for step in ensemble.step):
        # A missing map leaves tensors unconnected: the dataflow check would report the same problem again.
        yield from check_dataflow(config)


def _instance_groups(config: ModelConfig) -> Iterator[Problem]:
    total = 0
    for i, group in enumerate(config.instance_group):
        path = f"instance_group[{i}]"
        called = f"instance group {clip(group_name(config.name, i, group))} of model {clip(config.name)}"
        if group.count < 0:
            yield Problem(f"{called} must have a 'count' >= 1, got {group.count}", f"{path}.count")
        if group.kind in (InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL) and group.gpus:
            yield Problem(f"{called} has kind {group.kind.name} but specifies one or more GPUs", f"{path}.gpus")
        for j, gpu in enumerate(group.gpus):
            if gpu < 0:
                yield Problem(f"{called} has invalid GPU id {gpu}", f"{path}.gpus[{j}]")
        if group.rate_limiter is not None:
            for j, resource in enumerate(group.rate_limiter.resources):
                if not resource.name:
                    yield Problem(
                        f"{called} must specify 'name' of each resource", f"{path}.rate_limiter.resources[{j}].name"
                    )
        total += max(1, group.count) * max(1, len(group.gpus))
    if total > MAX_INSTANCES:
        yield Problem(too_many_instances(config.name, total), "instance_group")
    if config.instance_group and all(group.passive for group in config.instance_group):
        yield Problem(
            f"at least one instance group of model {clip(config.name)} must not be passive, or nothing runs its "
            "requests",
            "instance_group",
        )


def too_many_instances(model_name: str, total: int) -> str:
    """The error text for a model that has more instances than a server allows for one model."""
    return f"model {clip(model_name)} asks for {total} instances, at most {MAX_INSTANCES} are allowed"


def group_name(model_name: str, position: int, group: ModelInstanceGroup) -> str:
    """The display name of an instance group: its own name, else the model's name with the group's index."""
    return group.name or f"{model_name}_{position}"


def _files(config: ModelConfig) -> Iterator[Problem]:
    if problem := path_problem(config.default_model_filename):
        yield Problem(f"'default_model_filename' {problem}", "default_model_filename")
    for capability, filename in config.cc_model_filenames.items():
        if problem := path_problem(filename):
            yield Problem(
                f"'cc_model_filenames' for '{clip(capability)}' {problem}", f'cc_model_filenames["{capability}"]'
            )


def _warmup(sample: ModelWarmup, path: str) -> Iterator[Problem]:
    if sample.batch_size == 0:
        return  # Triton ignores such a sample
    if not sample.inputs:
        yield Problem("a warmup sample must specify 'inputs'", f"{path}.inputs")
    for name, tensor in sample.inputs.items():
        where = f'{path}.inputs["{name}"]'
        called = f"input '{clip(name)}'"
        if tensor.data_type is DataType.INVALID:
            yield Problem(f"warmup setting expects {called} to have data_type set", f"{where}.data_type")
        if any(dim < 1 for dim in tensor.dims):
            text = f"warmup setting expects all variable-size dimensions are specified for {called}"
            yield Problem(text, f"{where}.dims")
        if (tensor.zero_data, tensor.random_data, tensor.input_data_file) == (None, None, None):
            text = f"warmup setting expects {called} to have input_data_type set"
            yield Problem(f"{text}: one of 'zero_data', 'random_data' and 'input_data_file'", where)
        if tensor.input_data_file is not None and (problem := path_problem(tensor.input_data_file)):
            yield Problem(f"'input_data_file' of warmup {called} {problem}", f"{where}.input_data_file")


def _no_cache(config: ModelConfig, reason: str) -> Iterator[Problem]:
    if config.response_cache is not None and config.response_cache.enable:
        yield Problem(
            f"Response Cache does not currently support model {clip(config.name)} with {reason}. Please disable the "
            "response cache.",
            "response_cache.enable",
        )
