"""The rules for a complete model configuration, and the defaults that complete one.

`validate` returns every problem, not only the first; texts are Triton's where Triton has one. Two other checks are
elsewhere: whether this server supports what the configuration asks for (`support`), and whether the configuration
agrees with the model file (`autocomplete.check_signature`).
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

from halimede.core.config.dataflow import check_dataflow
from halimede.core.config.model_config import (
    ControlKind,
    InputFormat,
    InstanceKind,
    LatestVersions,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelVersionPolicy,
    ModelWarmup,
    PinnedMemoryBuffer,
    SequenceControl,
    SequenceState,
    TimeoutAction,
)
from halimede.core.types import DataType, Problem
from halimede.core.types.error import clip

MAX_INSTANCES = 256
"""Maximum number of instances of one model, over all groups and devices."""

MAX_RANK = 63
"""Maximum number of dimensions of one tensor without the batch dimension; numpy's limit is 64."""

DEFAULT_SEQUENCE_IDLE_MICROSECONDS = 1_000_000

_CORRELATION_TYPES = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)
_DIMS_RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def validate(config: ModelConfig, directory_name: str | None = None) -> tuple[Problem, ...]:
    """Every problem of a complete configuration, in the order of its fields; empty if there is none.

    `directory_name` is the name of the model's directory, None if there is none to compare with.
    """
    problems = [
        *_names(config, directory_name),
        *_version_policy(config),
        *_batch_size(config),
        *_tensors(config),
    ]
    if config.dynamic_batching is not None:
        problems += _dynamic_batching(config, config.dynamic_batching)
    if config.sequence_batching is not None:
        problems += _sequence_batching(config, config.sequence_batching)
    problems += _ensemble(config)
    problems += _instance_groups(config)
    problems += _files(config)
    problems += (p for i, sample in enumerate(config.model_warmup) for p in _warmup(sample, f"model_warmup[{i}]"))
    problems += _response_cache(config)
    return tuple(problems)


def apply_defaults(config: ModelConfig, directory_name: str, default_model_filename: str = "") -> ModelConfig:
    """The configuration with Triton's defaults written out, as `GET /v2/models/<m>/config` shows them.

    `default_model_filename` is the backend's. `instances.completed_groups` completes instance groups, which depend on
    the machine.
    """
    version_policy = config.version_policy
    if version_policy is None or version_policy == ModelVersionPolicy():
        version_policy = ModelVersionPolicy(latest=LatestVersions(num_versions=1))
    completed = replace(
        config,
        name=config.name or directory_name,
        version_policy=version_policy,
        dynamic_batching=_dynamic_batching_defaults(config),
        sequence_batching=_sequence_batching_defaults(config),
    )
    if config.ensemble_scheduling is not None:
        return completed  # an ensemble has no model of its own: neither a file nor buffers
    optimization = config.optimization or ModelOptimizationPolicy()
    return replace(
        completed,
        optimization=replace(
            optimization,
            input_pinned_memory=optimization.input_pinned_memory or PinnedMemoryBuffer(enable=True),
            output_pinned_memory=optimization.output_pinned_memory or PinnedMemoryBuffer(enable=True),
        ),
        default_model_filename=config.default_model_filename or default_model_filename,
    )


def _dynamic_batching_defaults(config: ModelConfig) -> ModelDynamicBatching | None:
    batching = config.dynamic_batching
    if batching is None or batching.preferred_batch_size or config.max_batch_size <= 0:
        return batching
    return replace(batching, preferred_batch_size=(config.max_batch_size,))


def _sequence_batching_defaults(config: ModelConfig) -> ModelSequenceBatching | None:
    batching = config.sequence_batching
    if batching is None:
        return None
    idle = batching.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_MICROSECONDS
    oldest = batching.oldest
    if oldest is not None:
        sizes = (config.max_batch_size,) if config.max_batch_size > 0 else ()
        oldest = replace(
            oldest,
            preferred_batch_size=oldest.preferred_batch_size or sizes,
            max_candidate_sequences=oldest.max_candidate_sequences or max(1, config.max_batch_size),
        )
    return replace(batching, max_sequence_idle_microseconds=idle, oldest=oldest)


def model_name_problem(name: str) -> str | None:
    """Why this cannot be a model name, or None: a name must be one safe path component and one line of text."""
    if not name:
        return "a model name must not be empty"
    problem = None
    if "/" in name:
        problem = "must not contain '/'"
    elif name == "." or ".." in name:
        problem = "must not be '.' or contain '..'"
    elif _unprintable(name):
        problem = "must be valid UTF-8 without control characters"
    elif len(name.encode()) > 255:
        problem = "must be at most 255 bytes long"
    return f"model name {clip(name)!a} {problem}" if problem else None


def _unprintable(text: str) -> bool:
    """Whether the text contains a control character or a lone surrogate (from a file name that is not UTF-8)."""
    return any(unicodedata.category(c) in ("Cc", "Cs") for c in text)


def _path_problem(path: str) -> str | None:
    """Why a model's files may not have this path, or None. Links are checked when the file is read."""
    if path.startswith("/"):
        return "must not be an absolute path"
    if ".." in path.split("/"):
        return "must not contain '..'"
    if _unprintable(path):
        return "must be valid UTF-8 without control characters"
    if len(path.encode()) > 4095:
        return "must be at most 4095 bytes long"
    return None


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
                yield Problem(f"model {kind} '{clip(tensor.name)}' is specified more than once", f"{path}.name")
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
    if not tensor.name:
        yield Problem(f"{called} must specify 'name'", f"{path}.name")
    elif _unprintable(tensor.name):
        yield Problem(f"{called} must have a name without control characters", f"{path}.name")
    if tensor.data_type is DataType.INVALID:
        yield Problem(f"{called} must specify 'data_type'", f"{path}.data_type")
    if not tensor.dims and tensor.reshape is None:
        yield Problem(f"{called} must specify 'dims'", f"{path}.dims")
    yield from _dims(tensor.dims, f"{called} dimension", f"{path}.dims")
    if tensor.reshape is not None:
        shape = tensor.reshape.shape
        shape_problems = tuple(_dims(shape, f"{called} reshape dimension", f"{path}.reshape.shape"))
        yield from shape_problems
        if not shape_problems and (problem := reshape_problem(tensor.dims, shape)):
            yield Problem(f"{called} {problem}", f"{path}.reshape")
    if isinstance(tensor, ModelInput):
        if tensor.format is not InputFormat.FORMAT_NONE and len(tensor.dims) != 3:
            yield Problem(f"{called} NHWC/NCHW require 3 dims, got {len(tensor.dims)}", f"{path}.format")
        if tensor.allow_ragged_batch and config.max_batch_size == 0:
            yield Problem(f"{called} can't be ragged: the model does not batch", f"{path}.allow_ragged_batch")
    elif problem := _path_problem(tensor.label_filename):
        yield Problem(f"'label_filename' of {called} {problem}", f"{path}.label_filename")


def _dims(dims: Sequence[int], called: str, path: str) -> Iterator[Problem]:
    for i, dim in enumerate(dims):
        if dim < 1 and dim != -1:
            yield Problem(f"{called} {_DIMS_RULE}, got {dim}", f"{path}[{i}]")
    if len(dims) > MAX_RANK:
        yield Problem(f"{called} count must be <= {MAX_RANK}, got {len(dims)}", path)


def reshape_problem(dims: Sequence[int], shape: Sequence[int]) -> str | None:
    """Why a tensor of shape `dims` cannot be reshaped to `shape`, None if it can.

    Variable dimensions correspond in order, and the fixed dimensions between them must have equal element counts.
    """
    ours, theirs = _runs(dims), _runs(shape)
    if len(ours) != len(theirs):
        return "has different number of variable-size dimensions for dims and reshape"
    if ours != theirs:
        return "has different size for dims and reshape"
    return None


def _runs(dims: Sequence[int]) -> list[int]:
    """Element counts of the fixed dimensions before, between and after the variable ones."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _preferred_sizes(sizes: Iterable[int], max_batch_size: int, what: str, name: str, path: str) -> Iterator[Problem]:
    for i, size in enumerate(sizes):
        if size <= 0:
            yield Problem(f"{what} must be positive for {name}", f"{path}[{i}]")
        elif size > max_batch_size:
            yield Problem(f"{what} must be <= max batch size for {name}", f"{path}[{i}]")


def _dynamic_batching(config: ModelConfig, batching: ModelDynamicBatching) -> Iterator[Problem]:
    name = clip(config.name)
    path = "dynamic_batching"
    yield from _preferred_sizes(
        batching.preferred_batch_size,
        config.max_batch_size,
        "dynamic batching preferred size",
        name,
        f"{path}.preferred_batch_size",
    )
    levels = batching.priority_levels
    if levels > 0 and not 1 <= batching.default_priority_level <= levels:
        yield Problem(
            f"default priority level must be in range [1, {levels}] for {name}", f"{path}.default_priority_level"
        )
    if batching.preserve_ordering and levels > 1:
        yield Problem(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}",
            f"{path}.priority_levels",
        )
    yield from _queue_policy(config, batching, batching.default_queue_policy, f"{path}.default_queue_policy")
    for level, policy in batching.priority_queue_policy.items():
        where = f"{path}.priority_queue_policy[{level}]"
        if not 1 <= level <= levels:
            yield Problem(f"priority queue policy must have priority level in range [1, {levels}] for {name}", where)
        yield from _queue_policy(config, batching, policy, where)


def _queue_policy(
    config: ModelConfig, batching: ModelDynamicBatching, policy: ModelQueuePolicy | None, path: str
) -> Iterator[Problem]:
    if policy is not None and batching.preserve_ordering and policy.timeout_action is TimeoutAction.DELAY:
        yield Problem(
            f"Queue policy can not have DELAY as 'timeout_action' when 'preserve_ordering' is true for "
            f"{clip(config.name)}",
            f"{path}.timeout_action",
        )


def _sequence_batching(config: ModelConfig, batching: ModelSequenceBatching) -> Iterator[Problem]:
    name = clip(config.name)
    path = "sequence_batching"
    if batching.direct is not None:
        utilization = batching.direct.minimum_slot_utilization
        if not 0.0 <= utilization <= 1.0:
            yield Problem(
                f"'minimum_slot_utilization' must be in range [0, 1] for {name}, got {utilization}",
                f"{path}.direct.minimum_slot_utilization",
            )
    if batching.oldest is not None:
        if batching.oldest.max_candidate_sequences < 0:
            yield Problem(
                f"'max_candidate_sequences' must be non-negative value for {name}",
                f"{path}.oldest.max_candidate_sequences",
            )
        yield from _preferred_sizes(
            batching.oldest.preferred_batch_size,
            config.max_batch_size,
            "sequence batching preferred batch size",
            name,
            f"{path}.oldest.preferred_batch_size",
        )
    yield from _control_inputs(config, batching)
    state_names: set[str] = set()
    for i, state in enumerate(batching.state):
        yield from _sequence_state(state, f"{path}.state[{i}]")
        for field, used in (("input_name", state.input_name), ("output_name", state.output_name)):
            key = f"{field} {used}"
            if used and key in state_names:
                yield Problem(f"sequence state '{field}' '{clip(used)}' is used twice", f"{path}.state[{i}].{field}")
            state_names.add(key)


def _control_inputs(config: ModelConfig, batching: ModelSequenceBatching) -> Iterator[Problem]:
    names = {tensor.name for tensor in config.input}
    kinds: set[ControlKind] = set()
    for i, control_input in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{i}]"
        called = f"sequence batching control tensor '{clip(control_input.name)}'"
        if not control_input.name:
            yield Problem("sequence batching control tensor must specify 'name'", f"{path}.name")
        elif control_input.name in names:
            yield Problem(f"{called} has the name of another input", f"{path}.name")
        names.add(control_input.name)
        if len(control_input.control) != 1:
            yield Problem(f"{called} must carry exactly one control, got {len(control_input.control)}", path)
        for j, control in enumerate(control_input.control):
            where = f"{path}.control[{j}]"
            if control.kind in kinds:
                yield Problem(f"sequence batching specifies multiple {control.kind.name} tensors", f"{where}.kind")
            kinds.add(control.kind)
            yield from _control(control, called, where)


def _control(control: SequenceControl, called: str, path: str) -> Iterator[Problem]:
    given = [
        (field, len(values))
        for field, values in (
            ("int32_false_true", control.int32_false_true),
            ("fp32_false_true", control.fp32_false_true),
            ("bool_false_true", control.bool_false_true),
        )
        if values
    ]
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        if control.data_type not in _CORRELATION_TYPES:
            yield Problem(
                f"{called} has unexpected data type {control.data_type.config_name} for CONTROL_SEQUENCE_CORRID, "
                f"expected one of {', '.join(t.config_name for t in _CORRELATION_TYPES)}",
                f"{path}.data_type",
            )
        for field, _ in given:
            yield Problem(f"{called} must not specify '{field}' for CONTROL_SEQUENCE_CORRID", f"{path}.{field}")
    elif len(given) != 1:
        yield Problem(
            f"{called} must specify exactly one of 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name}",
            path,
        )
    elif given[0][1] != 2:
        field, count = given[0]
        yield Problem(f"{called} must have exactly 2 entries in '{field}', got {count}", f"{path}.{field}")


def _sequence_state(state: SequenceState, path: str) -> Iterator[Problem]:
    for field, used in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not used:
            yield Problem(f"sequence state must specify '{field}'", f"{path}.{field}")
    called = f"sequence state '{clip(state.input_name)}'"
    if state.data_type is DataType.INVALID:
        yield Problem(f"{called} must specify 'data_type'", f"{path}.data_type")
    if not state.dims:
        yield Problem(f"{called} must specify 'dims'", f"{path}.dims")
    yield from _dims(state.dims, f"{called} dimension", f"{path}.dims")
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield Problem(
            f"{called} needs 'use_same_buffer_for_input_output' for 'use_growable_memory'",
            f"{path}.use_growable_memory",
        )
    for i, initial in enumerate(state.initial_state):
        where = f"{path}.initial_state[{i}]"
        if not initial.name:
            yield Problem(f"initial state of {called} must specify 'name'", f"{where}.name")
        if initial.data_type is not state.data_type:
            yield Problem(
                f"initial state of {called} has data type {initial.data_type.config_name}, expected "
                f"{state.data_type.config_name}",
                f"{where}.data_type",
            )
        yield from _fixed_dims(initial.dims, f"initial state of {called}", f"{where}.dims")
        if initial.zero_data is None and initial.data_file is None:
            yield Problem(f"initial state of {called} must specify 'zero_data' or 'data_file'", where)
        if initial.data_file is not None and (problem := _path_problem(initial.data_file)):
            yield Problem(f"'data_file' of {called} {problem}", f"{where}.data_file")


def _fixed_dims(dims: Sequence[int], called: str, path: str) -> Iterator[Problem]:
    for i, dim in enumerate(dims):
        if dim < 1:
            yield Problem(f"{called} must have fixed dims of at least 1, got {dim}", f"{path}[{i}]")


def _ensemble(config: ModelConfig) -> Iterator[Problem]:
    name = clip(config.name)
    ensemble = config.ensemble_scheduling
    if ensemble is None:
        if config.platform == "ensemble":
            yield Problem(
                f"ensemble scheduling must be set for ensemble '{name}' whose platform is ensemble",
                "ensemble_scheduling",
            )
        return
    path = "ensemble_scheduling"
    if config.platform != "ensemble":
        yield Problem(f"ensemble scheduling cannot be set for '{name}' whose platform is not ensemble", path)
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
    if problem := _path_problem(config.default_model_filename):
        yield Problem(f"'default_model_filename' {problem}", "default_model_filename")
    for capability, filename in config.cc_model_filenames.items():
        if problem := _path_problem(filename):
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
        if tensor.input_data_file is not None and (problem := _path_problem(tensor.input_data_file)):
            yield Problem(f"'input_data_file' of warmup {called} {problem}", f"{where}.input_data_file")


def _response_cache(config: ModelConfig) -> Iterator[Problem]:
    if config.response_cache is None or not config.response_cache.enable:
        return
    policy = config.model_transaction_policy
    reasons = []
    if config.sequence_batching is not None:
        reasons.append("sequence batching scheduler")
    if policy is not None and policy.decoupled:
        reasons.append("'decoupled' transaction policy")
    for reason in reasons:
        yield Problem(
            f"Response Cache does not currently support model {clip(config.name)} with {reason}. Please disable the "
            "response cache.",
            "response_cache.enable",
        )
