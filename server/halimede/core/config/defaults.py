"""The defaults that complete a model configuration."""

from dataclasses import replace

from halimede.core.config.model_config import (
    LatestVersions,
    ModelConfig,
    ModelDynamicBatching,
    ModelOptimizationPolicy,
    ModelSequenceBatching,
    ModelVersionPolicy,
    PinnedMemoryBuffer,
)

DEFAULT_SEQUENCE_IDLE_MICROSECONDS = 1_000_000


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
        # As in Triton `max_candidate_sequences` stays 0: the scheduler then takes the maximum batch size.
        sizes = (config.max_batch_size,) if config.max_batch_size > 0 else ()
        oldest = replace(oldest, preferred_batch_size=oldest.preferred_batch_size or sizes)
    return replace(batching, max_sequence_idle_microseconds=idle, oldest=oldest)
