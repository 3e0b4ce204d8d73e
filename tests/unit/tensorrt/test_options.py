import pytest

from halimede.backends.tensorrt.options import BackendOptions, ModelOptions, read_backend_options, read_model_options
from halimede.core.config.model_config import (
    ModelConfig,
    ModelOptimizationPolicy,
    ModelParameter,
    ModelPriority,
    OptimizationCuda,
    PinnedMemoryBuffer,
)
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of


def test_backend_settings():
    assert read_backend_options({"other": "1"}) == BackendOptions()
    found = read_backend_options(
        {
            "plugins": "/a.so;/b.so;",
            "version-compatible": "TRUE",
            "default-max-batch-size": "0",
            "coalesce-request-input": "true",
            "execution-policy": "DEVICE_BLOCKING",
        }
    )
    assert (found.plugins, found.version_compatible, found.default_max_batch_size) == (("/a.so", "/b.so"), True, 0)
    assert [note.partition(" ")[0] for note in found.notes] == [
        "coalesce-request-input",
        "execution-policy=DEVICE_BLOCKING",
    ]


@pytest.mark.parametrize(
    ("settings", "opens"),
    [({}, False), ({"plugins": ";"}, False), ({"plugins": "/a.so"}, True), ({"version-compatible": "1"}, True)],
)
def test_native_code_is_opened_with_plugins_and_compatible_plans(settings, opens):
    assert read_backend_options(settings).opens_libraries is opens


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("coalesce-request-input", "yes", "true or false"),
        ("version-compatible", "2", "true or false"),
        ("execution-policy", "FAST", "one of BLOCKING, DEVICE_BLOCKING"),
        ("default-max-batch-size", "many", "a number, at least 0"),
        ("default-max-batch-size", "-1", "a number, at least 0"),
        ("default-max-batch-size", "9" * 5000, "a number, at least 0"),
    ],
)
def test_a_wrong_setting_is_named(key, text, expected):
    error = error_of(read_backend_options, {key: text})
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith(f"--backend-config tensorrt,{key}={text[:200]}")
    assert error.message.endswith(f"it must be {expected}")


def config(optimization: ModelOptimizationPolicy | None = None, **parameters: str) -> ModelConfig:
    given = {key: ModelParameter(text) for key, text in parameters.items()}
    return ModelConfig(name="m", optimization=optimization, parameters=given)


def test_model_options():
    assert read_model_options(config(), "m") == ModelOptions()
    assert read_model_options(config(ModelOptimizationPolicy(cuda=OptimizationCuda())), "m") == ModelOptions()
    optimization = ModelOptimizationPolicy(
        priority=ModelPriority.PRIORITY_MAX,
        cuda=OptimizationCuda(graphs=True, busy_wait_events=True),
        input_pinned_memory=PinnedMemoryBuffer(enable=False),
        output_pinned_memory=PinnedMemoryBuffer(enable=False),
    )
    found = read_model_options(config(optimization, execution_context_allocation_strategy="ON_PROFILE_CHANGE"), "m")
    assert found == ModelOptions("ON_PROFILE_CHANGE", True, True, False, False, ModelPriority.PRIORITY_MAX)


def test_an_unknown_allocation_strategy_is_named():
    assert error_of(
        read_model_options, config(execution_context_allocation_strategy="USER_MANAGED"), "m"
    ) == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': parameter 'execution_context_allocation_strategy' is 'USER_MANAGED'; it must be one of STATIC, "
        "ON_PROFILE_CHANGE",
    )


@pytest.mark.parametrize("text", ["true", "1", "anything"])
def test_several_devices_for_one_engine_are_refused_by_name(text):
    with pytest.raises(InferenceError, match="parameter 'enable_multi_device' is not supported") as caught:
        read_model_options(config(enable_multi_device=text), "m")
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert read_model_options(config(enable_multi_device="false"), "m") == ModelOptions()
