"""TensorFlow's options and threads from a configuration. Needs no TensorFlow."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from halimede.backends.tensorflow.options import TensorFlowOptions, read_options
from halimede.backends.tensorflow.threads import SessionThreads, plan_threads
from halimede.core.config.model_config import (
    Accelerator,
    ExecutionAccelerators,
    InstanceKind,
    ModelConfig,
    ModelInstanceGroup,
    ModelOperations,
    ModelOptimizationPolicy,
    ModelParameter,
    OptimizationGraph,
)
from halimede.core.types import ErrorCode, InferenceError


def parameters(**values: str) -> ModelConfig:
    return ModelConfig(parameters={key: ModelParameter(value) for key, value in values.items()})


def accelerators(*gpu: str, cpu: tuple[str, ...] = ()) -> ModelConfig:
    wanted = ExecutionAccelerators(tuple(map(Accelerator, gpu)), tuple(map(Accelerator, cpu)))
    return ModelConfig(optimization=ModelOptimizationPolicy(execution_accelerators=wanted))


def level(number: int) -> ModelConfig:
    return ModelConfig(optimization=ModelOptimizationPolicy(graph=OptimizationGraph(number)))


def test_unset_options_have_defaults():
    assert read_options(ModelConfig(), "m", {}, on_gpu=True) == TensorFlowOptions()


def test_every_setting_is_read():
    config = parameters(
        TF_NUM_INTRA_THREADS="3",
        TF_NUM_INTER_THREADS="2",
        TF_USE_PER_SESSION_THREADS="yes",
        TF_GRAPH_TAG="gpu",
        TF_SIGNATURE_DEF="features",
        TF_INIT_OPS_FILE="init_ops.json",
        somebody_elses="x",
    )
    config = replace(
        config,
        model_operations=ModelOperations(("libmine.so",)),
        optimization=replace(accelerators("auto_mixed_precision").optimization, graph=OptimizationGraph(1)),
    )
    options = {"allow-soft-placement": "false", "gpu-memory-fraction": "0.5", "version": "2"}
    expected = TensorFlowOptions(
        3, 2, True, "gpu", "features", "init_ops.json", False, 0.5, 1, True, ("libmine.so",), ()
    )
    assert read_options(config, "m", options, on_gpu=True) == expected


@pytest.mark.parametrize(("number", "jit"), [(-1, -1), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_graph_levels_are_levels_of_xla(number, jit):
    assert read_options(level(number), "m", {}, on_gpu=True).jit_level == jit


@pytest.mark.parametrize(
    ("config", "on_gpu", "text"),
    [
        (parameters(MAX_SESSION_SHARE_COUNT="2"), False, "'MAX_SESSION_SHARE_COUNT' 2 has no effect"),
        (accelerators("gpu_io"), True, "'gpu_io' has no effect"),
        (level(1), False, "optimization.graph.level 1 has no effect on CPUs"),
    ],
    ids=range(3),
)
def test_setting_without_effect_gives_one_note(config, on_gpu, text):
    (note,) = read_options(config, "m", {}, on_gpu=on_gpu).notes
    assert text in note


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (
            parameters(TF_NUM_INTRA_THREADS="-1", TF_NUM_INTER_THREADS="9" * 5000),
            {},
            "parameter 'TF_NUM_INTRA_THREADS' is '-1'; it must be a number from 0 to 1024; "
            f"parameter 'TF_NUM_INTER_THREADS' is '{'9' * 256}...'; it must be a number from 0 to 1024",
        ),
        (
            parameters(TF_USE_PER_SESSION_THREADS="maybe"),
            {},
            "parameter 'TF_USE_PER_SESSION_THREADS' is 'maybe'; it must be one of true, on, yes, 1, false, off, no, 0",
        ),
        (
            parameters(MAX_SESSION_SHARE_COUNT="0"),
            {},
            "parameter 'MAX_SESSION_SHARE_COUNT' is '0'; it must be a number, at least 1",
        ),
        (level(-2), {}, "optimization.graph.level is -2; it must be -1, 0, 1 or 2"),
        (accelerators(cpu=("openvino",)), {}, "CPU Execution Accelerator is not supported in TensorFlow backend"),
        (
            accelerators("cuda"),
            {},
            "unknown Execution Accelerator 'cuda' is requested; it must be one of auto_mixed_precision, gpu_io",
        ),
        (
            accelerators("tensorrt"),
            {},
            "gpu_execution_accelerator 'tensorrt' is requested; TensorFlow 2.18 and later have no TensorRT: remove it, or "
            "convert the model to ONNX or to a TensorRT plan",
        ),
        (
            ModelConfig(),
            {"version": "1", "gpu-memory-fraction": "2", "allow-soft-placement": "perhaps"},
            "--backend-config tensorflow,version is '1'; only TensorFlow 2 is supported, which also runs graphs and "
            "SavedModels of TensorFlow 1; "
            "--backend-config tensorflow,allow-soft-placement is 'perhaps'; it must be one of true, on, yes, 1, false, "
            "off, no, 0; --backend-config tensorflow,gpu-memory-fraction is '2'; it must be a number from 0 to 1",
        ),
        (
            ModelConfig(),
            {"gpu-memory-fraction": "nan"},
            "--backend-config tensorflow,gpu-memory-fraction is 'nan'; it must be a number from 0 to 1",
        ),
    ],
    ids=range(9),
)
def test_invalid_setting_is_named_with_the_valid_values(config, options, text):
    with pytest.raises(InferenceError) as caught:
        read_options(config, "m", options, on_gpu=True)
    assert caught.value == InferenceError(ErrorCode.INVALID_ARG, f"model 'm': {text}")


def test_accelerators_of_gpus_are_ignored_without_gpu_instances():
    assert read_options(accelerators("tensorrt", "cuda"), "m", {}, on_gpu=False) == TensorFlowOptions()


def grouped(*groups: ModelInstanceGroup, **values: str) -> ModelConfig:
    return replace(parameters(**values), instance_group=groups)


CPU, GPU = InstanceKind.KIND_CPU, InstanceKind.KIND_GPU


@pytest.mark.parametrize(
    ("config", "threads"),
    [
        (grouped(), SessionThreads(8, 1)),
        (grouped(ModelInstanceGroup("m", CPU, 2)), SessionThreads(4, 1)),
        (grouped(ModelInstanceGroup("m", CPU, 1), ModelInstanceGroup("m", GPU, 1, gpus=(0, 1))), SessionThreads(2, 1)),
        (grouped(ModelInstanceGroup("m", CPU, 20)), SessionThreads(1, 1)),
        (grouped(ModelInstanceGroup("m", CPU, 2), INTRA_OP_THREAD_COUNT="3"), SessionThreads(3, 1)),
        (
            grouped(
                ModelInstanceGroup("m", CPU, 2),
                INTRA_OP_THREAD_COUNT="3",
                TF_NUM_INTRA_THREADS="5",
                TF_NUM_INTER_THREADS="2",
            ),
            SessionThreads(5, 2),
        ),
    ],
    ids=range(6),
)
def test_instances_share_the_cores(config, threads):
    options = read_options(config, "m", {}, on_gpu=True)
    assert plan_threads(config, options, cores=8) == threads


def test_one_operation_at_a_time_runs_in_the_thread_that_calls():
    assert [SessionThreads(4, inter).runs_in_caller for inter in (1, 2)] == [True, False]


def beside(tmp_path: Path, code: str, build: str = "") -> str:
    """What the code prints where an empty package `tensorflow` is installed."""
    package = tmp_path / "tensorflow"
    (package / "python" / "platform").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "python" / "platform" / "build_info.py").write_text(build)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)


@pytest.mark.parametrize("is_cuda", [True, False])
def test_build_for_cuda_is_found_without_an_import(tmp_path, is_cuda):
    code = "import sys; from halimede.backends.tensorflow import TensorFlowBackend as B; print(B().supports_gpu(), 'tensorflow' in sys.modules)"
    build = f"build_info = collections.OrderedDict([('is_cuda_build', {is_cuda}), ('is_rocm_build', False)])"
    assert beside(tmp_path, code, build) == f"{is_cuda} False\n"


def test_missing_tensorflow_is_an_error_that_names_the_extra(tmp_path):
    code = (
        "from halimede.backends.tensorflow.session import runtime\n"
        "from halimede.core.types import InferenceError\n"
        "try: runtime()\n"
        "except InferenceError as error: print(error.code.name, error.message)"
    )
    printed = beside(tmp_path, code)
    assert printed.startswith("UNSUPPORTED tensorflow cannot be imported (No module named 'tensorflow.")
    assert "pip install 'PATH[tensorflow]'" in printed
    assert printed.endswith("; for GPUs install tensorflow[and-cuda]\n")
