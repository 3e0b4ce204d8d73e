"""The rules for dynamic and sequence batching."""

from dataclasses import replace

import pytest

from halimede.core.config.model_config import (
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelQueuePolicy,
    ModelSequenceBatching,
    ModelTensorReshape,
    SequenceControl,
    SequenceControlInput,
    SequenceInitialState,
    SequenceState,
    StrategyDirect,
    StrategyOldest,
    TimeoutAction,
)
from halimede.core.sequences.plan import ControlKind
from halimede.core.types import DataType
from support.valid_config import problems


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (ModelDynamicBatching(preferred_batch_size=(4, 8)), {}),
        (
            ModelDynamicBatching(preferred_batch_size=(0, 4, 9)),
            {
                "preferred_batch_size[0]": "dynamic batching preferred size must be positive for m",
                "preferred_batch_size[2]": "dynamic batching preferred size must be <= max batch size for m",
            },
        ),
        (ModelDynamicBatching(priority_levels=2, default_priority_level=2), {}),
        (
            ModelDynamicBatching(priority_levels=2),
            {"default_priority_level": "default priority level must be in range [1, 2] for m"},
        ),
        (
            ModelDynamicBatching(priority_levels=2, default_priority_level=3),
            {"default_priority_level": "default priority level must be in range [1, 2] for m"},
        ),
        (ModelDynamicBatching(default_priority_level=1), {}),
        (ModelDynamicBatching(priority_queue_policy={1: ModelQueuePolicy()}), {}),
        (
            ModelDynamicBatching(
                preserve_ordering=True, default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY, max_queue_size=8)
            ),
            {},
        ),
        (ModelDynamicBatching(preserve_ordering=True, priority_levels=1, default_priority_level=1), {}),
        (
            ModelDynamicBatching(preserve_ordering=True, priority_levels=2, default_priority_level=1),
            {"priority_levels": "Only one priority level is allowed when 'preserve_ordering' is true for m"},
        ),
        (ModelDynamicBatching(default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY)), {}),
        (
            ModelDynamicBatching(
                preserve_ordering=True,
                priority_levels=1,
                default_priority_level=1,
                default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY, 1000),
                priority_queue_policy={
                    1: ModelQueuePolicy(TimeoutAction.DELAY, allow_timeout_override=True),
                    2: ModelQueuePolicy(),
                },
            ),
            {
                "priority_queue_policy[2]": "priority queue policy must have priority level in range [1, 1] for m",
                "default_queue_policy.timeout_action": "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
                "priority_queue_policy[1].timeout_action": "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
            },
        ),
    ],
)
def test_dynamic_batching_rules(batching: ModelDynamicBatching, expected: dict[str, str]):
    assert problems(dynamic_batching=batching) == [
        (f"dynamic_batching.{path}", message) for path, message in expected.items()
    ]


def control(name: str, *controls: SequenceControl) -> SequenceControlInput:
    return SequenceControlInput(name, controls)


START = SequenceControl(ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1))


END = SequenceControl(ControlKind.CONTROL_SEQUENCE_END, fp32_false_true=(0.0, 1.0))


CORRID = SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=DataType.UINT64)


def sequence(*inputs: SequenceControlInput) -> list[tuple[str, str]]:
    return [
        (path.removeprefix("sequence_batching.control_input"), message)
        for path, message in problems(sequence_batching=ModelSequenceBatching(control_input=inputs))
    ]


def test_sequence_controls_that_keep_the_rules():
    assert sequence(control("START", START), control("END", END), control("ID", CORRID)) == []


def test_sequence_control_rules():
    assert sequence(control("x", START)) == [
        ("[0].name", "sequence batching control tensor 'x' has the name of another input")
    ]
    assert sequence(control("", START), control("S", START)) == [
        ("[0].name", "sequence batching control tensor must have a name for m"),
        ("[1].control[0].kind", "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"),
    ]
    twice = "sequence batching control tensor 'S' is specified for multiple control kinds for m"
    assert sequence(control("S", START), control("S", END)) == [("[1].name", twice)]
    assert sequence(control("S", START, END), control("N")) == [
        ("[0]", twice),
        ("[1]", "sequence batching control tensor 'N' must carry exactly one control, got 0"),
    ]


def test_values_of_sequence_controls():
    of = "for CONTROL_SEQUENCE_START for m"
    none = f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' {of}"
    assert sequence(control("S", replace(START, int32_false_true=()))) == [("[0].control[0]", none)]
    two = f"sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' {of}"
    assert sequence(control("S", replace(START, bool_false_true=(False, True)))) == [("[0].control[0]", two)]
    short = f"sequence batching control 'int32_false_true' must have exactly 2 entries {of}"
    path = "[0].control[0].int32_false_true"
    assert sequence(control("S", replace(START, int32_false_true=(1,)))) == [(path, short)]
    assert sequence(control("I", replace(CORRID, data_type=DataType.FP32, int32_false_true=(0, 1)))) == [
        (
            "[0].control[0].data_type",
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
            "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        (
            "[0].control[0].int32_false_true",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            "CONTROL_SEQUENCE_CORRID for m",
        ),
    ]


@pytest.mark.parametrize("utilization", [-0.1, 1.1, float("nan")])
def test_slot_utilization_is_a_share(utilization: float):
    direct = ModelSequenceBatching(direct=StrategyDirect(minimum_slot_utilization=utilization))

    assert problems(sequence_batching=direct) == [
        (
            "sequence_batching.direct.minimum_slot_utilization",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        )
    ]


def test_oldest_strategy_rules():
    oldest = StrategyOldest(max_candidate_sequences=-1, preferred_batch_size=(0, 9))

    assert problems(sequence_batching=ModelSequenceBatching(oldest=oldest)) == [
        (
            "sequence_batching.oldest.preferred_batch_size[0]",
            "sequence batching preferred batch size must be positive for m",
        ),
        (
            "sequence_batching.oldest.preferred_batch_size[1]",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
    ]


def test_sequence_state_rules():
    initial = SequenceInitialState(DataType.FP32, (1,), zero_data=True, name="zero")
    good = SequenceState("in", "out", DataType.FP32, (1,), (initial,))
    bad = SequenceState(
        "in",
        "",
        dims=(0,),
        initial_state=(SequenceInitialState(DataType.FP32, (-1,), data_file="../x"), SequenceInitialState()),
        use_growable_memory=True,
    )

    assert problems(sequence_batching=ModelSequenceBatching(state=(good,))) == []
    found = problems(sequence_batching=ModelSequenceBatching(state=(good, bad)))
    assert [(path.removeprefix("sequence_batching.state[1]"), message) for path, message in found] == [
        (".output_name", "sequence state must specify 'output_name'"),
        (".data_type", "sequence state 'in' must specify 'data_type'"),
        (
            ".dims[0]",
            "sequence state 'in' dimension must be integer >= 1, or -1 to indicate a variable-size dimension",
        ),
        (
            ".use_growable_memory",
            "sequence state 'in' needs 'use_same_buffer_for_input_output' for 'use_growable_memory'",
        ),
        (
            ".initial_state",
            "initial_state field for state input 'in' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            ".initial_state[0].data_type",
            "The data type used for 'initial_state' field of state 'in' does not match the state data type.",
        ),
        (".initial_state[0].name", "Field 'name' must be set when using initial_state for state input 'in'."),
        (
            ".initial_state[0].dims[0]",
            "'initial_state' field for state input name 'in' contains variable dimensions.",
        ),
        (".initial_state[0].data_file", "'data_file' of sequence state 'in' must not contain '..'"),
        (".initial_state[1].name", "Field 'name' must be set when using initial_state for state input 'in'."),
        (
            ".initial_state[1].dims",
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'in'. "
            "0 != 1",
        ),
        (".initial_state[1]", "initial_state setting expects state'in' to have state_data set"),
        (".input_name", "sequence state 'input_name' 'in' is used twice"),
    ]


def test_an_initial_state_has_the_dims_of_its_state():
    def found(*dims: int) -> list[tuple[str, str]]:
        initial = SequenceInitialState(DataType.FP32, dims, zero_data=True, name="zero")
        state = SequenceState("in", "out", DataType.FP32, (-1, 4), (initial,))
        return problems(sequence_batching=ModelSequenceBatching(state=(state,)))

    path = "sequence_batching.state[0].initial_state[0].dims[1]"
    assert found(7, 4) == []
    assert found(7, 5) == [
        (path, "'initial_state' dim for input name 'in' doesn't match 'state' dim description. 5 != 4")
    ]
    assert found(7, 0) == [(path, "initial state of sequence state 'in' must have fixed dims of at least 1, got 0")]


def test_sequence_states_do_not_collide_with_tensors_of_clients():
    inputs = (ModelInput("in", DataType.FP32, dims=(1,)),)
    outputs = (ModelOutput("out", DataType.INT32, dims=(2,)), ModelOutput("same", DataType.FP32, dims=(1,)))
    control = SequenceControl(ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1))
    batching = ModelSequenceBatching(
        control_input=(SequenceControlInput("START", (control,)),),
        state=(
            SequenceState("in", "out", DataType.FP32, (1,)),
            SequenceState("START", "same", DataType.FP32, (1,)),
            SequenceState("s", "out", DataType.INT32, (2,)),
        ),
    )
    found = problems(input=inputs, output=outputs, sequence_batching=batching)
    assert [(path.removeprefix("sequence_batching.state"), message) for path, message in found] == [
        ("[0].input_name", "sequence state 'in' has the name of an input"),
        (
            "[0].data_type",
            "sequence state 'in' is also the output 'out', which has data type TYPE_INT32, expected TYPE_FP32",
        ),
        ("[0].dims", "sequence state 'in' is also the output 'out', which has dims [2], expected [1]"),
        ("[1].input_name", "sequence state 'START' has the name of a control input"),
        ("[2].output_name", "sequence state 'output_name' 'out' is used twice"),
    ]


def test_a_sequence_state_that_is_an_output_has_no_reshape():
    outputs = (ModelOutput("out", DataType.FP32, dims=(4,), reshape=ModelTensorReshape((2, 2))),)
    batching = ModelSequenceBatching(state=(SequenceState("in", "out", DataType.FP32, (2, 2)),))
    assert problems(output=outputs, sequence_batching=batching) == [
        (
            "sequence_batching.state[0].output_name",
            "sequence state 'in' is also the output 'out', which has 'reshape': a state is sent as it is",
        )
    ]


def test_growable_memory_of_states_is_refused():
    state = SequenceState(
        "in", "out", DataType.FP32, (1,), use_same_buffer_for_input_output=True, use_growable_memory=True
    )
    assert problems(sequence_batching=ModelSequenceBatching(state=(state,))) == [
        (
            "sequence_batching.state[0].use_growable_memory",
            "sequence state 'in' cannot have 'use_growable_memory': it needs CUDA's virtual memory, and states are in "
            "the host's memory here; leave it out",
        )
    ]


def test_an_instance_of_a_sequence_model_has_one_batch_at_a_time():
    two = {"MAX_CONCURRENCY": ModelParameter("2")}
    assert problems(parameters=two) == []
    assert problems(parameters=two, sequence_batching=ModelSequenceBatching()) == [
        (
            'parameters["MAX_CONCURRENCY"]',
            "parameter 'MAX_CONCURRENCY' must be 1 for m: an instance of a model with sequence batching executes one "
            "batch at a time, got 2",
        )
    ]


def test_correlation_ids_of_iterative_sequences_are_numbers():
    text = control("ID", replace(CORRID, data_type=DataType.BYTES))
    assert sequence(text) == []
    assert problems(sequence_batching=ModelSequenceBatching(control_input=(text,), iterative_sequence=True)) == [
        (
            "sequence_batching.control_input[0].control[0].data_type",
            "sequence batching control tensor 'ID' must have a numeric data type: the correlation ids of iterative "
            "sequences are numbers, got TYPE_STRING",
        )
    ]
