from dataclasses import replace

import pytest

from halimede.backends.onnxruntime.options import OnnxOptions, read_options
from halimede.core.config.model_config import (
    Accelerator,
    ExecutionAccelerators,
    ModelConfig,
    ModelOptimizationPolicy,
    ModelParameter,
    OptimizationGraph,
)
from halimede.core.types import ErrorCode, InferenceError

CPU, CUDA = ("CPUExecutionProvider", {}), ("CUDAExecutionProvider", {})


def parameters(**values: str) -> ModelConfig:
    return ModelConfig(parameters={key: ModelParameter(value) for key, value in values.items()})


def accelerators(cpu: tuple[Accelerator, ...] = (), gpu: tuple[Accelerator, ...] = ()) -> ModelConfig:
    wanted = ExecutionAccelerators(cpu_execution_accelerator=cpu, gpu_execution_accelerator=gpu)
    return ModelConfig(optimization=ModelOptimizationPolicy(execution_accelerators=wanted))


def test_unset_options_have_defaults():
    options = read_options(ModelConfig(), "m", on_gpu=True)
    assert options == OnnxOptions()
    assert (options.cpu, options.gpu) == ((CPU,), (CUDA, CPU))


def test_every_session_parameter_is_read():
    config = ModelConfig(
        optimization=ModelOptimizationPolicy(graph=OptimizationGraph(level=1)),
        parameters={
            "intra_op_thread_count": ModelParameter("3"),
            "inter_op_thread_count": ModelParameter("2"),
            "execution_mode": ModelParameter("1"),
            "enable_mem_arena": ModelParameter("0"),
            "enable_mem_pattern": ModelParameter("false"),
            "memory.enable_memory_arena_shrinkage": ModelParameter("cpu:0;gpu:0"),
            "session.use_device_allocator_for_initializers": ModelParameter("1"),
            "somebody_elses": ModelParameter("x"),
        },
    )
    assert read_options(config, "m", on_gpu=True) == OnnxOptions(
        3, 2, True, False, False, "cpu:0;gpu:0", True, "ORT_ENABLE_EXTENDED"
    )


@pytest.mark.parametrize(
    ("level", "name"),
    [(-1, "ORT_ENABLE_BASIC"), (0, "ORT_ENABLE_ALL"), (1, "ORT_ENABLE_EXTENDED"), (2, "ORT_DISABLE_ALL")],
)
def test_graph_levels_are_tritons(level, name):
    config = ModelConfig(optimization=ModelOptimizationPolicy(graph=OptimizationGraph(level)))
    assert read_options(config, "m", on_gpu=True).graph_level == name


def test_cuda_parameters_are_provider_options_under_both_spellings():
    numbers = parameters(
        cudnn_conv_algo_search="1", arena_extend_strategy="1", do_copy_in_default_stream="0", gpu_mem_limit="4294967200"
    )
    assert read_options(numbers, "m", on_gpu=True).gpu == (
        (
            "CUDAExecutionProvider",
            {
                "cudnn_conv_algo_search": "HEURISTIC",
                "arena_extend_strategy": "kSameAsRequested",
                "do_copy_in_default_stream": "0",
                "gpu_mem_limit": "4294967200",
            },
        ),
        CPU,
    )
    names = read_options(parameters(cudnn_conv_algo_search="DEFAULT"), "m", on_gpu=True)
    assert names.gpu[0] == ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "DEFAULT"})


def test_accelerators_come_before_the_devices_own_provider():
    tensorrt = Accelerator(
        "tensorrt",
        {"precision_mode": "FP16", "max_workspace_size_bytes": "1024", "trt_engine_cache_enable": "1"},
    )
    options = read_options(
        accelerators((Accelerator("openvino", {"num_streams": "2"}),), (Accelerator("gpu_io"), tensorrt)),
        "m",
        on_gpu=True,
    )
    assert options.cpu == (("OpenVINOExecutionProvider", {"num_streams": "2"}), CPU)
    assert options.gpu == (
        (
            "TensorrtExecutionProvider",
            {"trt_fp16_enable": "1", "trt_max_workspace_size": "1024", "trt_engine_cache_enable": "1"},
        ),
        CUDA,
        CPU,
    )
    cuda = read_options(
        accelerators(gpu=(Accelerator("cuda", {"cudnn_conv_use_max_workspace": "1"}),)), "m", on_gpu=True
    )
    assert cuda.gpu == (("CUDAExecutionProvider", {"cudnn_conv_use_max_workspace": "1"}), CPU)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            parameters(intra_op_thread_count="-1", execution_mode="fast"),
            "parameter 'intra_op_thread_count' is '-1'; it must be a number from 0 to 1024; "
            "parameter 'execution_mode' is 'fast'; it must be one of 0, 1",
        ),
        (
            # More digits than int() takes, and digits that are none here.
            parameters(intra_op_thread_count="9" * 5000, inter_op_thread_count="\u0663"),
            f"parameter 'intra_op_thread_count' is '{'9' * 256}...'; it must be a number from 0 to 1024; "
            "parameter 'inter_op_thread_count' is '\u0663'; it must be a number from 0 to 1024",
        ),
        (
            parameters(enable_mem_arena="no"),
            "parameter 'enable_mem_arena' is 'no'; it must be one of 0, 1, false, true",
        ),
        (
            parameters(arena_extend_strategy="2"),
            "parameter 'arena_extend_strategy' is '2'; it must be one of 0 (kNextPowerOfTwo), 1 (kSameAsRequested)",
        ),
        (
            ModelConfig(optimization=ModelOptimizationPolicy(graph=OptimizationGraph(3))),
            "optimization.graph.level is 3; it must be -1, 0, 1 or 2",
        ),
        (
            accelerators(gpu=(Accelerator("auto_mixed"), Accelerator("tensorrt", {"precision_mode": "FP8"}))),
            "unknown gpu_execution_accelerator 'auto_mixed' is requested; it must be one of tensorrt, cuda, gpu_io; "
            "accelerator 'tensorrt': precision_mode is 'FP8'; it must be one of FP32, FP16, INT8",
        ),
        (
            accelerators(cpu=(Accelerator("tensorrt"),)),
            "unknown cpu_execution_accelerator 'tensorrt' is requested; it must be one of openvino",
        ),
    ],
    ids=range(7),
)
def test_invalid_parameter_is_named_with_the_valid_values(config, text):
    with pytest.raises(InferenceError) as caught:
        read_options(config, "m", on_gpu=True)
    assert caught.value == InferenceError(ErrorCode.INVALID_ARG, f"model 'm': {text}")


def test_gpu_options_are_ignored_without_gpu_instances():
    config = accelerators(gpu=(Accelerator("auto_mixed"), Accelerator("tensorrt", {"precision_mode": "FP8"})))
    config = replace(config, parameters={"arena_extend_strategy": ModelParameter("7")})

    assert read_options(config, "m", on_gpu=False) == OnnxOptions()
