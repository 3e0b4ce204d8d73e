from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.instances import completed_groups
from halimede.core.config.model_config import (
    AllVersions,
    ControlKind,
    EnsembleStep,
    InputFormat,
    InstanceKind,
    LatestVersions,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelResponseCache,
    ModelSequenceBatching,
    ModelTensorReshape,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    PinnedMemoryBuffer,
    RateLimiterResource,
    SequenceControl,
    SequenceControlInput,
    SequenceInitialState,
    SequenceState,
    SpecificVersions,
    StrategyDirect,
    StrategyOldest,
    TimeoutAction,
    WarmupInput,
)
from halimede.core.config.names import model_name_problem
from halimede.core.config.shapes import reshape_problem
from halimede.core.config.validate import validate
from halimede.core.inventory import Inventory
from halimede.core.types import DataType, Problem

X = ModelInput("x", DataType.FP32, dims=(4,))
Y = ModelOutput("y", DataType.FP32, dims=(4,))
GOOD = ModelConfig(name="m", backend="python", max_batch_size=8, input=(X,), output=(Y,))


def problems(**changes: object) -> list[tuple[str, str]]:
    """(path, message) of every problem that a good configuration gets by these changes."""
    return [(problem.path, problem.message) for problem in validate(replace(GOOD, **changes), "m")]  # type: ignore[arg-type]


def test_a_good_configuration_has_no_problems():
    assert validate(GOOD, "m") == ()
    assert validate(apply_defaults(GOOD, "m", "model.py"), "m") == ()


def test_all_problems_are_found_at_once_in_the_order_of_the_fields():
    config = ModelConfig(name="other", max_batch_size=-1, input=(ModelInput(),), default_model_filename="/etc/passwd")

    assert validate(config, "m") == (
        Problem("unexpected directory name 'm' for model 'other', directory name must equal model name", "name"),
        Problem("'max_batch_size' must be non-negative value for other", "max_batch_size"),
        Problem("model input must specify 'name'", "input[0].name"),
        Problem("model input must specify 'data_type'", "input[0].data_type"),
        Problem("model input must specify 'dims'", "input[0].dims"),
        Problem("model configuration must contain at least one output, none were specified", "output"),
        Problem("'default_model_filename' must not be an absolute path", "default_model_filename"),
    )


def test_a_python_model_needs_no_tensors():
    bare = replace(GOOD, backend="python", input=(), output=())
    assert validate(bare, "m") == ()
    assert len(validate(replace(bare, backend="identity"), "m")) == 2


def test_name_is_optional_and_comparison_needs_a_directory():
    assert problems(name="") == []
    assert validate(replace(GOOD, name="elsewhere")) == ()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (ModelVersionPolicy(all=AllVersions()), []),
        (ModelVersionPolicy(latest=LatestVersions(3)), []),
        (
            ModelVersionPolicy(latest=LatestVersions(0)),
            [("version_policy.latest.num_versions", "'num_versions' must be >= 1")],
        ),
        (
            ModelVersionPolicy(specific=SpecificVersions()),
            [("version_policy.specific.versions", "must name at least one version")],
        ),
        (
            ModelVersionPolicy(specific=SpecificVersions((1, 0, -3))),
            [
                ("version_policy.specific.versions[1]", "version 0 must be >= 1"),
                ("version_policy.specific.versions[2]", "version -3 must be >= 1"),
            ],
        ),
    ],
)
def test_version_numbers(policy: ModelVersionPolicy, expected: list[tuple[str, str]]):
    assert problems(version_policy=policy) == expected


def test_inputs_and_outputs_need_names_of_their_own():
    assert problems(input=(X, replace(X, name="x2"), X), output=(Y, Y)) == [
        ("input[2].name", "model input 'x' is specified more than once"),
        ("output[1].name", "model output 'y' is specified more than once"),
    ]
    assert problems(input=(replace(X, name="a\nb"),)) == [
        ("input[0].name", "model input 'a\nb' must have a name without control characters")
    ]


@pytest.mark.parametrize("dims", [(1,), (-1,), (2, -1, 3), (2**62, 2**62)])
def test_dims_are_positive_or_variable(dims: tuple[int, ...]):
    assert problems(input=(replace(X, dims=dims),)) == []


def test_dims_that_are_neither_are_named_one_by_one():
    rule = "must be integer >= 1, or -1 to indicate a variable-size dimension"
    assert problems(input=(replace(X, dims=(0, 4, -2)),)) == [
        ("input[0].dims[0]", f"model input 'x' dimension {rule}, got 0"),
        ("input[0].dims[2]", f"model input 'x' dimension {rule}, got -2"),
    ]
    assert problems(output=(replace(Y, reshape=ModelTensorReshape((0,))),)) == [
        ("output[0].reshape.shape[0]", f"model output 'y' reshape dimension {rule}, got 0")
    ]


def test_more_dims_than_numpy_has_are_refused():
    assert problems(input=(replace(X, dims=(1,) * 63),)) == []
    assert problems(input=(replace(X, dims=(1,) * 64),)) == [
        ("input[0].dims", "model input 'x' dimension count must be <= 63, got 64")
    ]


def test_dims_may_be_empty_only_with_a_reshape():
    assert problems(input=(replace(X, dims=(), reshape=ModelTensorReshape((1, 1))),)) == []
    assert problems(input=(replace(X, dims=()),)) == [("input[0].dims", "model input 'x' must specify 'dims'")]


@pytest.mark.parametrize(
    ("dims", "shape", "problem"),
    [
        ((1,), (), None),
        ((), (1, 1), None),
        ((4, 6), (24,), None),
        ((-1,), (1, -1), None),
        ((2, -1, 3), (1, 2, -1, 1, 3), None),
        ((-1, -1), (-1, 1, -1), None),
        ((2,), (), "has different size for dims and reshape"),
        ((4,), (2, 3), "has different size for dims and reshape"),
        ((2, -1, 3), (3, -1, 2), "has different size for dims and reshape"),
        ((2, -1), (-1, 2), "has different size for dims and reshape"),
        ((-1,), (4,), "has different number of variable-size dimensions for dims and reshape"),
        ((-1,), (-1, -1), "has different number of variable-size dimensions for dims and reshape"),
    ],
)
def test_reshape_keeps_the_elements_and_the_order_of_variable_dims(
    dims: tuple[int, ...], shape: tuple[int, ...], problem: str | None
):
    expected = [("input[0].reshape", f"model input 'x' {problem}")] if problem else []

    assert problems(input=(replace(X, dims=dims, reshape=ModelTensorReshape(shape)),)) == expected


@given(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=4), st.data())
def test_a_reshape_that_only_regroups_fixed_dims_is_accepted(runs: list[list[int]], data: st.DataObject):
    def flat(parts: list[list[int]]) -> list[int]:
        return [dim for i, part in enumerate(parts) for dim in ([-1, *part] if i else part)]

    shuffled = [[1, *data.draw(st.permutations(run))] for run in runs]

    assert reshape_problem(flat(runs), flat(shuffled)) is None
    assert reshape_problem(flat(runs), flat([[7], *shuffled])) is not None


def test_formats_need_three_dims():
    image = replace(X, format=InputFormat.FORMAT_NHWC)

    assert problems(input=(replace(image, dims=(224, 224, 3)),)) == []
    assert problems(input=(image,)) == [("input[0].format", "model input 'x' NHWC/NCHW require 3 dims, got 1")]


def test_a_model_that_does_not_batch_has_no_ragged_input():
    assert problems(max_batch_size=0, input=(replace(X, allow_ragged_batch=True),)) == [
        ("input[0].allow_ragged_batch", "model input 'x' can't be ragged: the model does not batch")
    ]


@pytest.mark.parametrize("path", ["labels.txt", "a/b.txt", "..labels", "model..onnx", "a/./b"])
def test_files_inside_the_model_directory_are_fine(path: str):
    assert problems(default_model_filename=path, cc_model_filenames={"7.5": path}) == []
    assert problems(output=(replace(Y, label_filename=path),)) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/etc/passwd", "must not be an absolute path"),
        ("..", "must not contain '..'"),
        ("a/../../b", "must not contain '..'"),
        ("a\0b", "must be valid UTF-8 without control characters"),
        ("\udcff", "must be valid UTF-8 without control characters"),
        ("a" * 4096, "must be at most 4095 bytes long"),
    ],
)
def test_no_file_lies_outside_the_model_directory(path: str, problem: str):
    assert problems(
        output=(replace(Y, label_filename=path),),
        default_model_filename=path,
        cc_model_filenames={"7.5": path},
        model_warmup=(ModelWarmup("w", 1, {"x": WarmupInput(DataType.FP32, (4,), input_data_file=path)}),),
    ) == [
        ("output[0].label_filename", f"'label_filename' of model output 'y' {problem}"),
        ("default_model_filename", f"'default_model_filename' {problem}"),
        ('cc_model_filenames["7.5"]', f"'cc_model_filenames' for '7.5' {problem}"),
        (
            'model_warmup[0].inputs["x"].input_data_file',
            f"'input_data_file' of warmup input 'x' {problem}",
        ),
    ]


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (ModelDynamicBatching(preferred_batch_size=(4, 8)), []),
        (
            ModelDynamicBatching(preferred_batch_size=(0, 4, 9)),
            [
                (
                    "dynamic_batching.preferred_batch_size[0]",
                    "dynamic batching preferred size must be positive for m",
                ),
                (
                    "dynamic_batching.preferred_batch_size[2]",
                    "dynamic batching preferred size must be <= max batch size for m",
                ),
            ],
        ),
        (ModelDynamicBatching(priority_levels=2, default_priority_level=2), []),
        (
            ModelDynamicBatching(priority_levels=2),
            [("dynamic_batching.default_priority_level", "default priority level must be in range [1, 2] for m")],
        ),
        (
            ModelDynamicBatching(priority_levels=2, default_priority_level=3),
            [("dynamic_batching.default_priority_level", "default priority level must be in range [1, 2] for m")],
        ),
        (ModelDynamicBatching(default_priority_level=1), []),
        (ModelDynamicBatching(preserve_ordering=True, priority_levels=1, default_priority_level=1), []),
        (
            ModelDynamicBatching(preserve_ordering=True, priority_levels=2, default_priority_level=1),
            [
                (
                    "dynamic_batching.priority_levels",
                    "Only one priority level is allowed when 'preserve_ordering' is true for m",
                )
            ],
        ),
        (ModelDynamicBatching(default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY)), []),
        (
            ModelDynamicBatching(
                preserve_ordering=True,
                priority_levels=1,
                default_priority_level=1,
                default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY),
                priority_queue_policy={1: ModelQueuePolicy(TimeoutAction.DELAY), 2: ModelQueuePolicy()},
            ),
            [
                (
                    "dynamic_batching.default_queue_policy.timeout_action",
                    "Queue policy can not have DELAY as 'timeout_action' when 'preserve_ordering' is true for m",
                ),
                (
                    "dynamic_batching.priority_queue_policy[1].timeout_action",
                    "Queue policy can not have DELAY as 'timeout_action' when 'preserve_ordering' is true for m",
                ),
                (
                    "dynamic_batching.priority_queue_policy[2]",
                    "priority queue policy must have priority level in range [1, 1] for m",
                ),
            ],
        ),
    ],
)
def test_dynamic_batching_rules(batching: ModelDynamicBatching, expected: list[tuple[str, str]]):
    assert problems(dynamic_batching=batching) == expected


def test_the_number_of_instances_is_bounded():
    def group(**changes: object) -> ModelInstanceGroup:
        return replace(ModelInstanceGroup(kind=InstanceKind.KIND_GPU), **changes)  # type: ignore[arg-type]

    assert problems(instance_group=(group(count=255), group())) == []
    assert problems(instance_group=(group(count=255), group(), group())) == [
        ("instance_group", "model m asks for 257 instances, at most 256 are allowed")
    ]
    assert problems(instance_group=(group(count=100_000, gpus=(0, 1)),)) == [
        ("instance_group", "model m asks for 200000 instances, at most 256 are allowed")
    ]


def test_instance_group_rules():
    groups = (
        ModelInstanceGroup(count=-1),
        ModelInstanceGroup(name="g", kind=InstanceKind.KIND_CPU, gpus=(0,)),
        ModelInstanceGroup(kind=InstanceKind.KIND_MODEL, gpus=(0,)),
        ModelInstanceGroup(kind=InstanceKind.KIND_GPU, gpus=(0, -1)),
        ModelInstanceGroup(rate_limiter=ModelRateLimiter(resources=(RateLimiterResource(count=1),))),
    )

    assert problems(instance_group=groups) == [
        ("instance_group[0].count", "instance group m_0 of model m must have a 'count' >= 1, got -1"),
        ("instance_group[1].gpus", "instance group g of model m has kind KIND_CPU but specifies one or more GPUs"),
        ("instance_group[2].gpus", "instance group m_2 of model m has kind KIND_MODEL but specifies one or more GPUs"),
        ("instance_group[3].gpus[1]", "instance group m_3 of model m has invalid GPU id -1"),
        (
            "instance_group[4].rate_limiter.resources[0].name",
            "instance group m_4 of model m must specify 'name' of each resource",
        ),
    ]


def test_some_instance_must_run_requests():
    passive = ModelInstanceGroup(passive=True)

    assert problems(instance_group=(passive, ModelInstanceGroup())) == []
    assert problems(instance_group=(passive,)) == [
        (
            "instance_group",
            "at least one instance group of model m must not be passive, or nothing runs its requests",
        )
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
        ("[0].name", "sequence batching control tensor must specify 'name'"),
        ("[1].control[0].kind", "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors"),
    ]
    assert sequence(control("S", START, END), control("N")) == [
        ("[0]", "sequence batching control tensor 'S' must carry exactly one control, got 2"),
        ("[1]", "sequence batching control tensor 'N' must carry exactly one control, got 0"),
    ]
    assert sequence(control("S", replace(START, bool_false_true=(False, True)))) == [
        (
            "[0].control[0]",
            "sequence batching control tensor 'S' must specify exactly one of 'int32_false_true', 'fp32_false_true' or "
            "'bool_false_true' for CONTROL_SEQUENCE_START",
        )
    ]
    assert sequence(control("S", replace(START, int32_false_true=(1,)))) == [
        (
            "[0].control[0].int32_false_true",
            "sequence batching control tensor 'S' must have exactly 2 entries in 'int32_false_true', got 1",
        )
    ]
    assert sequence(control("I", replace(CORRID, data_type=DataType.FP32, int32_false_true=(0, 1)))) == [
        (
            "[0].control[0].data_type",
            "sequence batching control tensor 'I' has unexpected data type TYPE_FP32 for CONTROL_SEQUENCE_CORRID, "
            "expected one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING",
        ),
        (
            "[0].control[0].int32_false_true",
            "sequence batching control tensor 'I' must not specify 'int32_false_true' for CONTROL_SEQUENCE_CORRID",
        ),
    ]


@pytest.mark.parametrize("utilization", [-0.1, 1.1, float("nan")])
def test_slot_utilization_is_a_share(utilization: float):
    direct = ModelSequenceBatching(direct=StrategyDirect(minimum_slot_utilization=utilization))

    assert problems(sequence_batching=direct) == [
        (
            "sequence_batching.direct.minimum_slot_utilization",
            f"'minimum_slot_utilization' must be in range [0, 1] for m, got {utilization}",
        )
    ]


def test_oldest_strategy_rules():
    oldest = StrategyOldest(max_candidate_sequences=-1, preferred_batch_size=(9,))

    assert problems(sequence_batching=ModelSequenceBatching(oldest=oldest)) == [
        (
            "sequence_batching.oldest.max_candidate_sequences",
            "'max_candidate_sequences' must be non-negative value for m",
        ),
        (
            "sequence_batching.oldest.preferred_batch_size[0]",
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
            "sequence state 'in' dimension must be integer >= 1, or -1 to indicate a variable-size dimension, got 0",
        ),
        (
            ".use_growable_memory",
            "sequence state 'in' needs 'use_same_buffer_for_input_output' for 'use_growable_memory'",
        ),
        (".initial_state[0].name", "initial state of sequence state 'in' must specify 'name'"),
        (
            ".initial_state[0].data_type",
            "initial state of sequence state 'in' has data type TYPE_FP32, expected TYPE_INVALID",
        ),
        (
            ".initial_state[0].dims[0]",
            "initial state of sequence state 'in' must have fixed dims of at least 1, got -1",
        ),
        (".initial_state[0].data_file", "'data_file' of sequence state 'in' must not contain '..'"),
        (".initial_state[1].name", "initial state of sequence state 'in' must specify 'name'"),
        (".initial_state[1]", "initial state of sequence state 'in' must specify 'zero_data' or 'data_file'"),
        (".input_name", "sequence state 'input_name' 'in' is used twice"),
    ]


STEP = EnsembleStep("a", -1, {"IN": "x"}, {"OUT": "y"})


def test_an_ensemble_needs_steps_and_nothing_of_its_own():
    ensemble = ModelConfig(
        name="m",
        platform="ensemble",
        input=(X,),
        output=(Y,),
        ensemble_scheduling=ModelEnsembling((STEP,)),
    )

    assert validate(ensemble, "m") == ()
    assert validate(apply_defaults(ensemble, "m"), "m") == ()
    assert validate(
        replace(
            ensemble,
            ensemble_scheduling=ModelEnsembling(),
            instance_group=(ModelInstanceGroup(),),
            optimization=ModelOptimizationPolicy(),
            model_warmup=(ModelWarmup("w", inputs={"x": WarmupInput(DataType.FP32, (4,), zero_data=True)}),),
        ),
        "m",
    ) == (
        Problem("instance group should not be specified for ensemble 'm'", "instance_group"),
        Problem("optimization should not be specified for ensemble 'm'", "optimization"),
        Problem("model_warmup can not be specified for ensemble 'm'", "model_warmup"),
        Problem("must specify 'step' for ensemble 'm'", "ensemble_scheduling.step"),
    )
    assert validate(replace(ensemble, ensemble_scheduling=ModelEnsembling((EnsembleStep("a/b"),))), "m") == (
        Problem(
            "step 0 of ensemble 'm': model name 'a/b' must not contain '/'", "ensemble_scheduling.step[0].model_name"
        ),
        Problem(
            "step 0 of ensemble 'm' must name a version >= 1, or -1 for the latest, got 0",
            "ensemble_scheduling.step[0].model_version",
        ),
        Problem("must specify 'input_map' in step 0 of ensemble 'm'", "ensemble_scheduling.step[0]"),
        Problem("must specify 'output_map' in step 0 of ensemble 'm'", "ensemble_scheduling.step[0]"),
    )
    nameless = ModelEnsembling((replace(STEP, model_name=""),))
    assert validate(replace(ensemble, ensemble_scheduling=nameless), "m") == (
        Problem("must specify 'model_name' in step 0 of ensemble 'm'", "ensemble_scheduling.step[0].model_name"),
    )


def test_platform_and_ensemble_scheduling_go_together():
    assert problems(platform="ensemble") == [
        ("ensemble_scheduling", "ensemble scheduling must be set for ensemble 'm' whose platform is ensemble")
    ]
    assert problems(ensemble_scheduling=ModelEnsembling((STEP,))) == [
        ("ensemble_scheduling", "ensemble scheduling cannot be set for 'm' whose platform is not ensemble")
    ]


def test_warmup_rules():
    assert problems(model_warmup=(ModelWarmup(batch_size=1), ModelWarmup("w", 1, {"x": WarmupInput(dims=(-1,))}))) == [
        ("model_warmup[0].inputs", "a warmup sample must specify 'inputs'"),
        ('model_warmup[1].inputs["x"].data_type', "warmup setting expects input 'x' to have data_type set"),
        (
            'model_warmup[1].inputs["x"].dims',
            "warmup setting expects all variable-size dimensions are specified for input 'x'",
        ),
        (
            'model_warmup[1].inputs["x"]',
            "warmup setting expects input 'x' to have input_data_type set: one of 'zero_data', 'random_data' and "
            "'input_data_file'",
        ),
    ]


def test_warmup_sample_without_rows_is_not_checked():
    zeros = WarmupInput(DataType.FP32, (4,), zero_data=True)

    assert problems(model_warmup=(ModelWarmup("", 1, {"x": zeros}), ModelWarmup("w", 0))) == []


def test_a_response_cache_needs_one_answer_per_request_and_no_state():
    assert problems(response_cache=ModelResponseCache(enable=True)) == []
    assert problems(
        response_cache=ModelResponseCache(enable=True),
        sequence_batching=ModelSequenceBatching(),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    ) == [
        (
            "response_cache.enable",
            "Response Cache does not currently support model m with sequence batching scheduler. Please disable the "
            "response cache.",
        ),
        (
            "response_cache.enable",
            "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable "
            "the response cache.",
        ),
    ]


@pytest.mark.parametrize("name", ["m", "resnet-50.onnx", "a b", "モデル", "-", "x" * 255])
def test_names_that_a_model_may_have(name: str):
    assert model_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "a model name must not be empty"),
        ("a/b", "model name 'a/b' must not contain '/'"),
        (".", "model name '.' must not be '.' or contain '..'"),
        ("..", "model name '..' must not be '.' or contain '..'"),
        ("..data", "model name '..data' must not be '.' or contain '..'"),
        ("a\0b", "model name 'a\\x00b' must be valid UTF-8 without control characters"),
        ("a\x85", "model name 'a\\x85' must be valid UTF-8 without control characters"),
        ("\udcff", "model name '\\udcff' must be valid UTF-8 without control characters"),
        ("é" * 128, f"model name {'é' * 128!a} must be at most 255 bytes long"),
    ],
)
def test_names_that_a_model_may_not_have(name: str, problem: str):
    assert model_name_problem(name) == problem


def test_defaults_of_a_python_model_are_tritons():
    completed = ModelConfig(
        backend="python",
        max_batch_size=4,
        input=(ModelInput("IN", DataType.FP32, dims=(4,)),),
        output=(ModelOutput("OUT", DataType.FP32, dims=(4,)),),
        dynamic_batching=ModelDynamicBatching(),
    )

    config = apply_defaults(completed, "auto", "model.py")
    groups = completed_groups(config, Inventory(), default_count={"CPU": 1}.__getitem__, backend_gpu=False)

    assert replace(config, instance_group=groups) == ModelConfig(
        name="auto",
        platform="",
        backend="python",
        runtime="",
        version_policy=ModelVersionPolicy(latest=LatestVersions(num_versions=1)),
        max_batch_size=4,
        input=(ModelInput("IN", DataType.FP32, InputFormat.FORMAT_NONE, (4,)),),
        output=(ModelOutput("OUT", DataType.FP32, (4,), label_filename=""),),
        optimization=ModelOptimizationPolicy(
            input_pinned_memory=PinnedMemoryBuffer(enable=True), output_pinned_memory=PinnedMemoryBuffer(enable=True)
        ),
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(4,)),
        instance_group=(ModelInstanceGroup(name="auto", kind=InstanceKind.KIND_CPU, count=1),),
        default_model_filename="model.py",
    )


def test_defaults_keep_set_values_and_are_idempotent():
    said = replace(
        GOOD,
        version_policy=ModelVersionPolicy(all=AllVersions()),
        default_model_filename="net.py",
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(2,)),
        optimization=ModelOptimizationPolicy(
            input_pinned_memory=PinnedMemoryBuffer(enable=False), output_pinned_memory=PinnedMemoryBuffer(enable=True)
        ),
    )

    assert apply_defaults(said, "m", "model.py") == said
    once = apply_defaults(GOOD, "m", "model.py")
    assert apply_defaults(once, "m", "other.py") == once


def test_empty_version_policy_means_latest():
    config = apply_defaults(replace(GOOD, version_policy=ModelVersionPolicy()), "m")

    assert config.version_policy == ModelVersionPolicy(latest=LatestVersions(1))


def test_defaults_of_sequence_batching():
    def defaults(max_batch_size: int, batching: ModelSequenceBatching) -> ModelSequenceBatching | None:
        config = replace(GOOD, max_batch_size=max_batch_size, sequence_batching=batching)
        return apply_defaults(config, "m").sequence_batching

    assert defaults(8, ModelSequenceBatching()) == ModelSequenceBatching(max_sequence_idle_microseconds=1_000_000)
    assert defaults(8, ModelSequenceBatching(oldest=StrategyOldest())) == ModelSequenceBatching(
        oldest=StrategyOldest(max_candidate_sequences=8, preferred_batch_size=(8,)),
        max_sequence_idle_microseconds=1_000_000,
    )
    assert defaults(0, ModelSequenceBatching(oldest=StrategyOldest(), max_sequence_idle_microseconds=5)) == (
        ModelSequenceBatching(oldest=StrategyOldest(max_candidate_sequences=1), max_sequence_idle_microseconds=5)
    )


def test_messages_clip_long_names():
    long = "n" * 10_000

    found = validate(replace(GOOD, name=long, input=(replace(X, name=long, dims=(0,)),), max_batch_size=-1), "m")

    assert len(found) == 4
    assert max(len(problem.message) for problem in found) < 1000
