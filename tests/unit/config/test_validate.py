from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.model_config import (
    AllVersions,
    EnsembleStep,
    InputFormat,
    InstanceKind,
    LatestVersions,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelRateLimiter,
    ModelResponseCache,
    ModelSequenceBatching,
    ModelTensorReshape,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    RateLimiterResource,
    SpecificVersions,
    WarmupInput,
)
from halimede.core.config.names import model_name_problem
from halimede.core.config.shapes import reshape_problem
from halimede.core.config.validate import validate
from halimede.core.types import DataType, Problem
from support.valid_config import GOOD, X, Y, problems


def test_a_good_configuration_has_no_problems():
    assert validate(GOOD, "m") == ()
    assert validate(apply_defaults(GOOD, "m", "model.py"), "m") == ()


def test_all_problems_are_found_at_once():
    config = ModelConfig(name="other", max_batch_size=-1, input=(ModelInput(),), default_model_filename="/etc/passwd")

    assert validate(config, "m") == (
        Problem("unexpected directory name 'm' for model 'other', directory name must equal model name", "name"),
        Problem("'max_batch_size' must be non-negative value for other", "max_batch_size"),
        Problem("model input must specify 'name' for other", "input[0].name"),
        Problem("model input must specify 'data_type' for other", "input[0].data_type"),
        Problem("model input must specify 'dims' for other", "input[0].dims"),
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
        ("input[2].name", "model input 'x' is specified more than once for m"),
        ("output[1].name", "model output 'y' is specified more than once for m"),
    ]
    assert problems(input=(replace(X, name="a\nb"),)) == [
        ("input[0].name", "model input 'a\nb' must have a name without control characters for m")
    ]


@pytest.mark.parametrize("dims", [(1,), (-1,), (2, -1, 3), (2**62, 2**62)])
def test_dims_are_positive_or_variable(dims: tuple[int, ...]):
    assert problems(input=(replace(X, dims=dims),)) == []


def test_the_first_dimension_that_is_neither_is_located():
    rule = "must be integer >= 1, or -1 to indicate a variable-size dimension for m"
    assert problems(input=(replace(X, dims=(4, 0, -2)),)) == [("input[0].dims[1]", f"model input 'x' dimension {rule}")]
    assert problems(output=(replace(Y, reshape=ModelTensorReshape((4, 0))),)) == [
        ("output[0].reshape.shape[1]", f"model output 'y' reshape dimensions {rule}")
    ]


def test_more_dims_than_numpy_has_are_refused():
    assert problems(input=(replace(X, dims=(1,) * 63),)) == []
    assert problems(input=(replace(X, dims=(1,) * 64),)) == [
        ("input[0].dims", "model input 'x' dimension count must be <= 63, got 64 for m")
    ]


def test_dims_are_needed_with_a_reshape_too():
    expected = [("input[0].dims", "model input 'x' must specify 'dims' for m")]

    assert problems(input=(replace(X, dims=(), reshape=ModelTensorReshape((1, 1))),)) == expected
    assert problems(input=(replace(X, dims=()),)) == expected


@pytest.mark.parametrize(
    ("dims", "shape", "problem"),
    [
        ((1,), (), None),
        ((1,), (1, 1), None),
        ((4, 6), (24,), None),
        ((-1,), (1, -1), None),
        ((2, -1, 3), (1, 2, -1, 1, 3), None),
        ((-1, -1), (-1, 1, -1), None),
        ((2,), (), "has different size for dims and reshape"),
        ((4,), (2, 3), "has different size for dims and reshape"),
        ((2, -1, 3), (3, -1, 2), "has different size for dims and reshape"),
        ((2, -1), (-1, 2), "has different size for dims and reshape"),
        ((-1,), (4,), "has different size for dims and reshape"),
        ((4,), (-1,), "has different size for dims and reshape"),
        ((-1,), (-1, -1), "has different number of variable-size dimensions for dims and reshape"),
    ],
)
def test_reshape_keeps_the_elements_and_the_order_of_variable_dims(
    dims: tuple[int, ...], shape: tuple[int, ...], problem: str | None
):
    expected = [("input[0].reshape", f"model input 'x' {problem} for m")] if problem else []

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
    assert problems(input=(image,)) == [("input[0].format", "model input NHWC/NCHW require 3 dims for m")]


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
        ("ensemble_scheduling", "ensemble scheduling must be set for ensemble m whose platform is ensemble")
    ]
    assert problems(ensemble_scheduling=ModelEnsembling((STEP,))) == [
        ("ensemble_scheduling", "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble")
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


@pytest.mark.parametrize("name", ["m", "resnet-50.onnx", "a b", "a..b", "..data", "モデル", "-", "x" * 255])
def test_names_that_a_model_may_have(name: str):
    assert model_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "a model name must not be empty"),
        ("a/b", "model name 'a/b' must not contain '/'"),
        (".", "model name '.' must not be '.' or '..'"),
        ("..", "model name '..' must not be '.' or '..'"),
        ("a\0b", "model name 'a\\x00b' must be valid UTF-8 without control characters"),
        ("a\x85", "model name 'a\\x85' must be valid UTF-8 without control characters"),
        ("\udcff", "model name '\\udcff' must be valid UTF-8 without control characters"),
        ("é" * 128, f"model name {'é' * 128!a} must be at most 255 bytes long"),
    ],
)
def test_names_that_a_model_may_not_have(name: str, problem: str):
    assert model_name_problem(name) == problem


def test_messages_clip_long_names():
    long = "n" * 10_000

    found = validate(replace(GOOD, name=long, input=(replace(X, name=long, dims=(0,)),), max_batch_size=-1), "m")

    assert len(found) == 4
    assert max(len(problem.message) for problem in found) < 1000
