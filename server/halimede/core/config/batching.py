"""The rules for dynamic batching and sequence batching in a model configuration."""

from collections.abc import Iterable, Iterator, Sequence

from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
    ModelSequenceBatching,
    SequenceControl,
    SequenceInitialState,
    SequenceState,
    TimeoutAction,
)
from halimede.core.config.names import path_problem
from halimede.core.config.process_options import MAX_CONCURRENCY, max_concurrency
from halimede.core.config.shapes import dims_problems, fixed_dims_problems
from halimede.core.sequences.plan import ControlKind
from halimede.core.types import DataType, InferenceError, Problem
from halimede.core.types.error import clip

_CORRELATION_TYPES = (DataType.UINT64, DataType.INT64, DataType.UINT32, DataType.INT32, DataType.BYTES)


def dynamic_batching_problems(config: ModelConfig, batching: ModelDynamicBatching) -> Iterator[Problem]:
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
    for level in batching.priority_queue_policy:
        if levels > 0 and not 1 <= level <= levels:
            text = f"priority queue policy must have priority level in range [1, {levels}] for {name}"
            yield Problem(text, f"{path}.priority_queue_policy[{level}]")
    if batching.preserve_ordering and levels > 1:
        yield Problem(
            f"Only one priority level is allowed when 'preserve_ordering' is true for {name}", f"{path}.priority_levels"
        )
    yield from _queue_policy(config, batching, batching.default_queue_policy, f"{path}.default_queue_policy")
    for level, policy in batching.priority_queue_policy.items():
        yield from _queue_policy(config, batching, policy, f"{path}.priority_queue_policy[{level}]")


def _queue_policy(
    config: ModelConfig, batching: ModelDynamicBatching, policy: ModelQueuePolicy | None, path: str
) -> Iterator[Problem]:
    if policy is None or policy.timeout_action is not TimeoutAction.DELAY or not batching.preserve_ordering:
        return
    # Without a timeout no request is delayed, and Triton loads the model.
    if policy.default_timeout_microseconds or policy.allow_timeout_override:
        yield Problem(
            f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for "
            f"{clip(config.name)}",
            f"{path}.timeout_action",
        )


def sequence_batching_problems(config: ModelConfig, batching: ModelSequenceBatching) -> Iterator[Problem]:
    name = clip(config.name)
    path = "sequence_batching"
    yield from _control_inputs(config, batching)
    if batching.oldest is not None:
        yield from _preferred_sizes(
            batching.oldest.preferred_batch_size,
            config.max_batch_size,
            "sequence batching preferred batch size",
            name,
            f"{path}.oldest.preferred_batch_size",
        )
    if batching.direct is not None:
        utilization = batching.direct.minimum_slot_utilization
        if not 0.0 <= utilization <= 1.0:
            yield Problem(
                f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}",
                f"{path}.direct.minimum_slot_utilization",
            )
    try:
        concurrency = max_concurrency(config)
    except InferenceError:
        concurrency = 1  # `process_options` has an error of its own for this
    if concurrency > 1:
        # The requests of a sequence would run in any order, and batches would share the sequence slots' state.
        yield Problem(
            f"parameter '{MAX_CONCURRENCY}' must be 1 for {name}: an instance of a model with sequence batching "
            f"executes one batch at a time, got {concurrency}",
            f'parameters["{MAX_CONCURRENCY}"]',
        )
    state_names: set[str] = set()
    for i, state in enumerate(batching.state):
        yield from _sequence_state(state, f"{path}.state[{i}]")
        yield from _state_names(config, batching, state, f"{path}.state[{i}]")
        for field, used in (("input_name", state.input_name), ("output_name", state.output_name)):
            key = f"{field} {used}"
            if used and key in state_names:
                yield Problem(f"sequence state '{field}' '{clip(used)}' is used twice", f"{path}.state[{i}].{field}")
            state_names.add(key)


def _control_inputs(config: ModelConfig, batching: ModelSequenceBatching) -> Iterator[Problem]:
    """Triton's texts, where Triton has one."""
    name = clip(config.name)
    inputs = {tensor.name for tensor in config.input}
    seen: set[str] = set()
    kinds: set[ControlKind] = set()
    for i, control_input in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{i}]"
        called = f"sequence batching control tensor '{clip(control_input.name)}'"
        if not control_input.name:
            yield Problem(f"sequence batching control tensor must have a name for {name}", f"{path}.name")
        elif control_input.name in inputs:
            yield Problem(f"{called} has the name of another input", f"{path}.name")
        elif control_input.name in seen:
            yield Problem(f"{called} is specified for multiple control kinds for {name}", f"{path}.name")
        seen.add(control_input.name)
        if not control_input.control:
            yield Problem(f"{called} must carry exactly one control, got 0", path)
        elif len(control_input.control) > 1:
            yield Problem(f"{called} is specified for multiple control kinds for {name}", path)
        for j, control in enumerate(control_input.control):
            where = f"{path}.control[{j}]"
            if control.kind in kinds:
                text = f"sequence batching specifies multiple {control.kind.name} tensors for {name}"
                yield Problem(text, f"{where}.kind")
            kinds.add(control.kind)
            if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
                yield from _correlation(control, name, called, where, is_iterative=batching.iterative_sequence)
            else:
                yield from _boolean(control, name, where)


def _given(control: SequenceControl) -> list[tuple[str, int]]:
    """The names of the lists of values that a control has, and their lengths."""
    lists: tuple[tuple[str, Sequence[object]], ...] = (
        ("int32_false_true", control.int32_false_true),
        ("fp32_false_true", control.fp32_false_true),
        ("bool_false_true", control.bool_false_true),
    )
    return [(field, len(values)) for field, values in lists if values]


def _correlation(
    control: SequenceControl, name: str, called: str, path: str, *, is_iterative: bool
) -> Iterator[Problem]:
    if control.data_type not in _CORRELATION_TYPES:
        yield Problem(
            f"unexpected data type for control {control.kind.name} for {name}. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
            f"{path}.data_type",
        )
    elif control.data_type is DataType.BYTES and is_iterative:
        yield Problem(
            f"{called} must have a numeric data type: the correlation ids of iterative sequences are numbers, "
            f"got {control.data_type.config_name}",
            f"{path}.data_type",
        )
    if given := _given(control):
        yield Problem(
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{control.kind.name} for {name}",
            f"{path}.{given[0][0]}",
        )


def _boolean(control: SequenceControl, name: str, path: str) -> Iterator[Problem]:
    given = _given(control)
    of = f"for {control.kind.name} for {name}"
    if not given:
        yield Problem(
            f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' {of}",
            path,
        )
    elif len(given) > 1:
        yield Problem(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' {of}",
            path,
        )
    elif given[0][1] != 2:
        field, _ = given[0]
        text = f"sequence batching control '{field}' must have exactly 2 entries {of}"
        yield Problem(text, f"{path}.{field}")


def _state_names(
    config: ModelConfig, batching: ModelSequenceBatching, state: SequenceState, path: str
) -> Iterator[Problem]:
    """Problems with tensors of the same names: clients do not send states, and see one only as it is."""
    called = f"sequence state '{clip(state.input_name)}'"
    others = {each.name: "an input" for each in config.input}
    others |= {each.name: "a control input" for each in batching.control_input}
    if state.input_name in others:
        yield Problem(f"{called} has the name of {others[state.input_name]}", f"{path}.input_name")
    for output in config.output:
        if output.name != state.output_name:
            continue
        shown = f"{called} is also the output '{clip(output.name)}', which has"
        if output.data_type not in (DataType.INVALID, state.data_type):
            yield Problem(
                f"{shown} data type {output.data_type.config_name}, expected {state.data_type.config_name}",
                f"{path}.data_type",
            )
        if output.reshape is not None:
            yield Problem(f"{shown} 'reshape': a state is sent as it is", f"{path}.output_name")
        elif output.dims and output.dims != state.dims:
            yield Problem(f"{shown} dims {list(output.dims)}, expected {list(state.dims)}", f"{path}.dims")


def _sequence_state(state: SequenceState, path: str) -> Iterator[Problem]:
    for field, used in (("input_name", state.input_name), ("output_name", state.output_name)):
        if not used:
            yield Problem(f"sequence state must specify '{field}'", f"{path}.{field}")
    called = f"sequence state '{clip(state.input_name)}'"
    if state.data_type is DataType.INVALID:
        yield Problem(f"{called} must specify 'data_type'", f"{path}.data_type")
    if not state.dims:
        yield Problem(f"{called} must specify 'dims'", f"{path}.dims")
    yield from dims_problems(state.dims, f"{called} dimension", "", f"{path}.dims")
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield Problem(
            f"{called} needs 'use_same_buffer_for_input_output' for 'use_growable_memory'",
            f"{path}.use_growable_memory",
        )
    elif state.use_growable_memory:
        yield Problem(
            f"{called} cannot have 'use_growable_memory': it needs CUDA's virtual memory, and states are in the "
            "host's memory here; leave it out",
            f"{path}.use_growable_memory",
        )
    if len(state.initial_state) > 1:
        yield Problem(
            f"initial_state field for state input '{clip(state.input_name)}' must contain exactly one or zero element. "
            f"Found '{len(state.initial_state)}' elements.",
            f"{path}.initial_state",
        )
    for i, initial in enumerate(state.initial_state):
        yield from _initial_state(state, initial, f"{path}.initial_state[{i}]")


def _initial_state(state: SequenceState, initial: SequenceInitialState, path: str) -> Iterator[Problem]:
    """Triton's texts, where Triton has one."""
    name = clip(state.input_name)
    called = f"sequence state '{name}'"
    if initial.data_type is not state.data_type:
        text = f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        yield Problem(text, f"{path}.data_type")
    if not initial.name:
        text = f"Field 'name' must be set when using initial_state for state input '{name}'."
        yield Problem(text, f"{path}.name")
    if len(initial.dims) != len(state.dims):
        yield Problem(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}",
            f"{path}.dims",
        )
    elif -1 in initial.dims:
        text = f"'initial_state' field for state input name '{name}' contains variable dimensions."
        yield Problem(text, f"{path}.dims[{initial.dims.index(-1)}]")
    elif invalid := tuple(fixed_dims_problems(initial.dims, f"initial state of {called}", f"{path}.dims")):
        yield from invalid
    else:
        for i, (size, wanted) in enumerate(zip(initial.dims, state.dims, strict=True)):
            if wanted not in (-1, size):
                yield Problem(
                    f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. "
                    f"{size} != {wanted}",
                    f"{path}.dims[{i}]",
                )
    if initial.zero_data is None and initial.data_file is None:
        # The missing space is Triton's.
        yield Problem(f"initial_state setting expects state'{name}' to have state_data set", path)
    if initial.data_file is not None and (problem := path_problem(initial.data_file)):
        yield Problem(f"'data_file' of {called} {problem}", f"{path}.data_file")


def _preferred_sizes(sizes: Iterable[int], max_batch_size: int, what: str, name: str, path: str) -> Iterator[Problem]:
    for i, size in enumerate(sizes):
        if size <= 0:
            yield Problem(f"{what} must be positive for {name}", f"{path}[{i}]")
        elif size > max_batch_size:
            yield Problem(f"{what} must be <= max batch size for {name}", f"{path}[{i}]")
