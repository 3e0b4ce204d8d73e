from dataclasses import replace

import pytest

from halimede.backends.pytorch.form import Form
from halimede.backends.pytorch.options import TorchOptions, plan_threads, read_options
from halimede.core.config.model_config import (
    Accelerator,
    ExecutionAccelerators,
    ModelConfig,
    ModelOptimizationPolicy,
    ModelParameter,
)
from halimede.core.types import ErrorCode
from support.refusals import error_of


def parameters(**values: str) -> ModelConfig:
    return ModelConfig(parameters={key: ModelParameter(value) for key, value in values.items()})


def refused(config: ModelConfig, form: Form = Form.SCRIPT) -> str:
    error = error_of(read_options, config, "m", form)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


@pytest.mark.parametrize("form", Form)
def test_unset_parameters_have_pytorchs_defaults(form):
    assert read_options(parameters(somebody_elses="x"), "m", form) == TorchOptions()


def test_every_parameter_of_torchscript_is_read():
    config = parameters(
        DISABLE_OPTIMIZED_EXECUTION="true",
        INFERENCE_MODE="false",
        DISABLE_CUDNN="1",
        ENABLE_CACHE_CLEANING="TRUE",
        INTER_OP_THREAD_COUNT="2",
        INTRA_OP_THREAD_COUNT="3",
        ENABLE_TENSOR_FUSER="0",
        ENABLE_JIT_EXECUTOR="true",
        ENABLE_JIT_PROFILING="false",
    )
    assert read_options(config, "m", Form.SCRIPT) == TorchOptions(
        intra_op_threads=3,
        inter_op_threads=2,
        inference_mode=False,
        optimized_execution=False,
        cudnn=False,
        cache_cleaning=True,
        jit_executor=True,
        jit_profiling=False,
        tensor_fuser=False,
    )


def test_a_modules_thread_counts_have_names_of_their_own():
    options = read_options(parameters(NUM_THREADS="5", NUM_INTEROP_THREADS="4"), "m", Form.MODULE)
    assert (options.intra_op_threads, options.inter_op_threads) == (5, 4)


def test_weight_sharing_is_accepted_with_a_note_that_says_what_helps():
    (note,) = read_options(parameters(ENABLE_WEIGHT_SHARING="true"), "m", Form.SCRIPT).notes
    assert "'ENABLE_WEIGHT_SHARING' has no effect" in note
    assert read_options(parameters(ENABLE_WEIGHT_SHARING="false"), "m", Form.SCRIPT).notes == ()


def test_all_invalid_values_are_named_in_one_error():
    message = refused(parameters(INFERENCE_MODE="yes", INTRA_OP_THREAD_COUNT="0", INTER_OP_THREAD_COUNT="٣"))
    assert message == (
        "model 'm': parameter 'INTRA_OP_THREAD_COUNT' is '0'; it must be a number from 1 to 1024; "
        "parameter 'INTER_OP_THREAD_COUNT' is '٣'; it must be a number from 1 to 1024; "
        "parameter 'INFERENCE_MODE' is 'yes'; it must be 'true' or 'false'"
    )


@pytest.mark.parametrize("key", ["ENABLE_JIT_EXECUTOR", "ENABLE_TENSOR_FUSER", "DISABLE_OPTIMIZED_EXECUTION"])
def test_settings_of_torchscript_are_refused_for_other_files(key):
    assert f"'{key}' cannot be used: it is for TorchScript" in refused(parameters(**{key: "true"}), Form.EXPORTED)


def test_compilation_is_refused_for_files_that_are_compiled_already():
    assert "'TORCH_COMPILE' cannot be used" in refused(parameters(TORCH_COMPILE="true"), Form.SCRIPT)
    assert "aoti_compile_and_package" in refused(parameters(TORCH_COMPILE="true"), Form.EXPORTED)


def test_nvfuser_and_accelerators_are_refused_by_name():
    assert "'ENABLE_NVFUSER' cannot be used" in refused(parameters(ENABLE_NVFUSER="true"))
    accelerators = ExecutionAccelerators(gpu_execution_accelerator=(Accelerator("tensorrt"),))
    config = ModelConfig(optimization=ModelOptimizationPolicy(execution_accelerators=accelerators))
    assert "execution accelerator 'tensorrt'" in refused(config)


@pytest.mark.parametrize(
    ("values", "arguments"),
    [
        ({}, None),
        ({"TORCH_COMPILE": "true"}, {}),
        ({"TORCH_COMPILE": "false", "TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}"}, None),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"dynamic": true, "mode": null}'}, {"dynamic": True, "mode": None}),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"fullgraph": "False"}'}, {"fullgraph": False}),
        ({"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"disable": "true"}'}, None),
    ],
)
def test_a_module_is_compiled_only_where_it_is_asked_for(values, arguments):
    assert read_options(parameters(**values), "m", Form.MODULE).compile == arguments


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a JSON object"),
        ('{"model": 1}', "has 'model'; it may have backend, disable"),
        ('{"mode": 3}', "'mode' must be str or null"),
    ],
)
def test_invalid_compile_arguments_are_named(text, problem):
    assert problem in refused(parameters(TORCH_COMPILE_OPTIONAL_PARAMETERS=text), Form.MODULE)


def test_instances_share_the_cores_unless_threads_are_configured():
    default = TorchOptions()
    assert plan_threads(default, cores=8, instances=2, limit=None) == (4, 4)
    assert plan_threads(default, cores=2, instances=8, limit=None) == (1, 1)
    assert plan_threads(default, cores=8, instances=1, limit=3) == (3, 3)
    assert plan_threads(default, cores=8, instances=1, limit=64) == (8, 8)
    configured = replace(default, intra_op_threads=6, inter_op_threads=2)
    assert plan_threads(configured, cores=4, instances=4, limit=1) == (6, 2)
