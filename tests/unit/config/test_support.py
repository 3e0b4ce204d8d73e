from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.model_config import (
    Accelerator,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    EnsembleStep,
    ExecutionAccelerators,
    InstanceKind,
    LatestVersions,
    MetricControl,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelMetrics,
    ModelOperations,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelPriority,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelRepositoryAgents,
    ModelResponseCache,
    ModelTensorReshape,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    OptimizationCuda,
    OptimizationGraph,
    PinnedMemoryBuffer,
    RateLimiterResource,
    RepositoryAgent,
    SecondaryDevice,
    TimeoutAction,
)
from halimede.core.config.support import NOT_YET, TABLE, check_devices, check_support
from halimede.core.types import DataType, Problem


def messages_of(hint: Any) -> Iterator[type]:
    """The message classes that a field of this type may hold."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from messages_of(argument)


def reachable(message: type, seen: set[type]) -> set[type]:
    if message not in seen:
        seen.add(message)
        for hint in get_type_hints(message).values():
            for inner in messages_of(hint):
                reachable(inner, seen)
    return seen


ALLOWED = {"runtime": " with another value than model.py"}
"""How the refusal of a field names the values that are allowed."""


def refused(config: ModelConfig) -> list[str]:
    """The paths that are refused; everything else must give no problem."""
    refusals, notes = check_support(config)
    assert notes == ()
    assert list(refusals) == [
        Problem(
            f"'{p.path}' is not supported yet{ALLOWED.get(p.path, '')}, remove it from the model configuration", p.path
        )
        for p in refusals
    ]
    return [problem.path for problem in refusals]


def test_every_field_of_every_message_is_in_the_table():
    messages = reachable(ModelConfig, set())

    assert len(messages) > 40
    assert {message: set(rules) for message, rules in TABLE.items()} == {
        message: {field.name for field in fields(message)} for message in messages
    }


def test_fields_at_their_default_are_not_mentioned():
    assert check_support(ModelConfig()) == ((), ())
    assert check_support(apply_defaults(ModelConfig(max_batch_size=4), "m", "model.py")) == ((), ())


def test_empty_messages_give_no_notes():
    config = ModelConfig(
        optimization=ModelOptimizationPolicy(cuda=OptimizationCuda(), graph=OptimizationGraph()),
        model_transaction_policy=ModelTransactionPolicy(),
        model_operations=ModelOperations(),
        model_repository_agents=ModelRepositoryAgents(),
        response_cache=ModelResponseCache(),
        model_metrics=ModelMetrics(),
        instance_group=(ModelInstanceGroup(rate_limiter=ModelRateLimiter()),),
    )

    assert check_support(config) == ((), ())


def test_honoured_fields_give_no_notes():
    config = ModelConfig(
        name="m",
        platform="onnxruntime_onnx",
        backend="onnxruntime",
        version_policy=ModelVersionPolicy(latest=LatestVersions(2)),
        max_batch_size=8,
        input=(
            ModelInput(name="x", data_type=DataType.FP32, dims=(4,), reshape=ModelTensorReshape((2, 2)), optional=True),
            ModelInput(name="z", data_type=DataType.FP32, dims=(-1,), allow_ragged_batch=True),
        ),
        batch_input=(BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("s",), DataType.FP32, ("z",)),),
        batch_output=(BatchOutput(("y",), source_input=("z",)),),
        output=(ModelOutput(name="y", data_type=DataType.FP32, dims=(4,), label_filename="labels.txt"),),
        optimization=ModelOptimizationPolicy(
            graph=OptimizationGraph(level=1),
            execution_accelerators=ExecutionAccelerators(
                gpu_execution_accelerator=(Accelerator("tensorrt", {"precision_mode": "FP16"}),)
            ),
        ),
        dynamic_batching=ModelDynamicBatching(
            preferred_batch_size=(4, 8),
            max_queue_delay_microseconds=100,
            preserve_ordering=True,
            default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY, 1000, True, 10),
            priority_levels=2,
            default_priority_level=1,
            priority_queue_policy={1: ModelQueuePolicy(max_queue_size=5)},
        ),
        instance_group=(ModelInstanceGroup(name="g", kind=InstanceKind.KIND_GPU, count=2, gpus=(0,)),),
        default_model_filename="net.onnx",
        metric_tags={"team": "a"},
        parameters={"intra_op_thread_count": ModelParameter("2")},
        model_transaction_policy=ModelTransactionPolicy(decoupled=True),
    )

    assert check_support(config) == ((), ())


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        (ModelConfig(runtime="other.py"), ["runtime"]),
        (
            ModelConfig(
                ensemble_scheduling=ModelEnsembling(
                    (EnsembleStep("a", -1, {"IN": "x"}, {"OUT": "y"}, "models", "x > 0"),), max_inflight_requests=2
                )
            ),
            ["ensemble_scheduling.step[0].model_namespace"],
        ),
        (
            ModelConfig(model_repository_agents=ModelRepositoryAgents((RepositoryAgent("checksum"),))),
            ["model_repository_agents.agents"],
        ),
        (
            ModelConfig(
                input=(ModelInput(name="a"), ModelInput(name="b", is_shape_tensor=True)),
                output=(ModelOutput(name="c", is_non_linear_format_io=True),),
            ),
            ["input[1].is_shape_tensor", "output[0].is_non_linear_format_io"],
        ),
    ],
)
def test_unsupported_fields_are_refused_by_name(config: ModelConfig, paths: list[str]):
    assert refused(config) == paths


@pytest.mark.parametrize(
    "model",
    [ModelConfig(backend="tensorflow"), ModelConfig(platform="tensorflow_graphdef")],
    ids=["backend", "platform"],
)
def test_libraries_with_operations_are_for_tensorflow(model: ModelConfig):
    path = "model_operations.op_library_filename"
    text = f"'{path}' is not supported yet for backends other than tensorflow, remove it from the model configuration"
    libraries = ModelOperations(("op.so",))
    assert check_support(ModelConfig(model_operations=libraries)) == ((Problem(text, path),), ())
    assert check_support(replace(model, model_operations=libraries), "tensorflow") == ((), ())


def test_fields_that_one_backend_honours_are_reported_for_the_others():
    config = ModelConfig(
        optimization=ModelOptimizationPolicy(
            priority=ModelPriority.PRIORITY_MAX,
            cuda=OptimizationCuda(graphs=True, busy_wait_events=True, output_copy_stream=True),
            input_pinned_memory=PinnedMemoryBuffer(enable=False),
        ),
        input=(ModelInput(name="b", is_shape_tensor=True, is_non_linear_format_io=True),),
        instance_group=(ModelInstanceGroup(profile=("1",)),),
    )
    layout = "input[0].is_non_linear_format_io"
    for backend, refused_paths, noted_paths in (
        ("tensorrt", [layout], ["optimization.cuda.output_copy_stream"]),
        (
            "onnxruntime",
            ["input[0].is_shape_tensor", layout],
            [
                *(f"optimization.{name}" for name in ("priority", "cuda", "input_pinned_memory")),
                "instance_group[0].profile",
            ],
        ),
    ):
        refusals, notes = check_support(config, backend)
        assert [each.path for each in refusals] == refused_paths
        assert [each.path for each in notes] == noted_paths


def test_fields_without_effect_give_one_note_each():
    config = ModelConfig(
        optimization=ModelOptimizationPolicy(
            priority=ModelPriority.PRIORITY_MAX,
            cuda=OptimizationCuda(graphs=True),
            input_pinned_memory=PinnedMemoryBuffer(enable=False),
            output_pinned_memory=PinnedMemoryBuffer(enable=True),
            gather_kernel_buffer_threshold=10,
            eager_batching=True,
        ),
        instance_group=(
            ModelInstanceGroup(
                rate_limiter=ModelRateLimiter(resources=(RateLimiterResource("R", count=1),), priority=2),
                secondary_devices=(SecondaryDevice(),),
                profile=("0",),
                host_policy="numa0",
            ),
        ),
        model_warmup=(ModelWarmup(),),
        response_cache=ModelResponseCache(enable=True),
        model_metrics=ModelMetrics((MetricControl(),)),
    )
    unlimited = "has no effect: rate limiting is not supported yet: executions start without waiting for resources"

    refusals, notes = check_support(config)

    assert refusals == ()
    assert [note.message for note in notes] == [
        "'optimization.priority' has no effect: all models run at the same priority",
        "'optimization.cuda' has no effect: only TensorRT takes CUDA graphs and events from the configuration",
        "'optimization.input_pinned_memory' has no effect: tensors are not staged in pinned memory",
        "'optimization.gather_kernel_buffer_threshold' has no effect: inputs are not gathered by a kernel",
        "'optimization.eager_batching' has no effect: it is a hint for backends that do not exist here",
        f"'instance_group[0].rate_limiter.resources' {unlimited}",
        f"'instance_group[0].rate_limiter.priority' {unlimited}",
        "'instance_group[0].secondary_devices' has no effect: no backend here uses a secondary device",
        "'instance_group[0].profile' has no effect: only TensorRT engines have optimization profiles",
        "'instance_group[0].host_policy' has no effect: instances are not bound to processors or memory",
        "'model_warmup' has no effect: warm-up is not supported yet: the first requests may take longer",
        "'response_cache.enable' has no effect: the response cache is not supported yet: the model runs for every request",
        "'model_metrics.metric_control' has no effect: settings of single metrics are not supported yet",
    ]
    assert [note.path for note in notes[:2]] == ["optimization.priority", "optimization.cuda"]


def test_protecting_fields_are_never_ignored():
    protecting = [
        (ModelQueuePolicy, "max_queue_size"),
        (ModelQueuePolicy, "default_timeout_microseconds"),
        (ModelInstanceGroup, "count"),
        (ModelTransactionPolicy, "decoupled"),
    ]

    assert all(TABLE[message][field].why == "" for message, field in protecting)
    assert TABLE[ModelRepositoryAgents]["agents"] is NOT_YET


def test_gpu_fields_without_gpu_instances_give_notes():
    path = "optimization.execution_accelerators.gpu_execution_accelerator"
    accelerators = ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("tensorrt"),))
    config = ModelConfig(optimization=ModelOptimizationPolicy(execution_accelerators=accelerators))

    assert check_devices(config, {"CPU", "GPU"}) == check_devices(ModelConfig(), {"CPU"}) == ()
    assert check_devices(config, {"CPU"}) == (Problem(f"'{path}' has no effect: no instance runs on a GPU", path),)
