"""The defaults that complete a configuration."""

from dataclasses import replace

from halimede.core.config.defaults import apply_defaults
from halimede.core.config.instances import completed_groups
from halimede.core.config.model_config import (
    AllVersions,
    InputFormat,
    InstanceKind,
    LatestVersions,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelSequenceBatching,
    ModelVersionPolicy,
    PinnedMemoryBuffer,
    StrategyOldest,
)
from halimede.core.inventory import Inventory
from halimede.core.types import DataType
from support.valid_config import GOOD


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
    config = replace(
        GOOD,
        version_policy=ModelVersionPolicy(all=AllVersions()),
        default_model_filename="net.py",
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(2,)),
        optimization=ModelOptimizationPolicy(
            input_pinned_memory=PinnedMemoryBuffer(enable=False), output_pinned_memory=PinnedMemoryBuffer(enable=True)
        ),
    )

    assert apply_defaults(config, "m", "model.py") == config
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
        oldest=StrategyOldest(preferred_batch_size=(8,)),
        max_sequence_idle_microseconds=1_000_000,
    )
    assert defaults(0, ModelSequenceBatching(oldest=StrategyOldest(), max_sequence_idle_microseconds=5)) == (
        ModelSequenceBatching(oldest=StrategyOldest(), max_sequence_idle_microseconds=5)
    )
