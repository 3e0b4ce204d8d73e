"""Options for ONNX Runtime from a model's configuration: parameters, optimization level, accelerators. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from halimede.core.config.model_config import Accelerator, ModelConfig
from halimede.core.config.parameters import BOOLEANS, ValueReader, parameters_of

Provider = tuple[str, dict[str, str]]
"""An execution provider's name and its options."""

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
OPENVINO, TENSORRT = "OpenVINOExecutionProvider", "TensorrtExecutionProvider"

# Triton's numbers for ONNX Runtime's levels: 0 and unset mean all, and 2 means none.
GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 0: "ORT_ENABLE_ALL", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}

# Parameters of the CUDA provider: Triton's numbers (ONNX Runtime's names are accepted too) and the provider's values.
CUDA_CHOICES: Mapping[str, Mapping[str, str]] = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "do_copy_in_default_stream": {"0": "0", "1": "1"},
}

# Triton's names for the TensorRT accelerator's parameters; others are passed on unchanged (trt_…).
TENSORRT_NAMES = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
TENSORRT_PRECISIONS = {"FP32": {}, "FP16": {"trt_fp16_enable": "1"}, "INT8": {"trt_int8_enable": "1"}}

PARAMETERS = (
    "intra_op_thread_count",
    "inter_op_thread_count",
    "execution_mode",
    "enable_mem_arena",
    "enable_mem_pattern",
    "memory.enable_memory_arena_shrinkage",
    "session.use_device_allocator_for_initializers",
    *CUDA_CHOICES,
    "gpu_mem_limit",
)
"""All parameters of a model that are read here."""


@dataclass(frozen=True, slots=True)
class OnnxOptions:
    """Thread counts are 0 if not configured. `cpu` and `gpu` are lists of providers, by descending preference."""

    intra_op_threads: int = 0
    inter_op_threads: int = 0
    parallel: bool = False
    cpu_mem_arena: bool = True
    mem_pattern: bool = True
    arena_shrinkage: str = ""
    device_allocator_for_initializers: bool = False
    graph_level: str = "ORT_ENABLE_ALL"
    cpu: tuple[Provider, ...] = field(default=((CPU, {}),))
    gpu: tuple[Provider, ...] = field(default=((CUDA, {}), (CPU, {})))


def read_options(config: ModelConfig, model: str, *, on_gpu: bool) -> OnnxOptions:
    """The options in `config`; INVALID_ARG names every invalid parameter.

    Options for GPUs are read only if an instance runs `on_gpu`.
    """
    reader = ValueReader(parameters_of(config))
    level = config.optimization.graph.level if config.optimization and config.optimization.graph else 0
    if level not in GRAPH_LEVELS:
        reader.problems.append(f"optimization.graph.level is {level}; it must be -1, 0, 1 or 2")
    accelerators = config.optimization.execution_accelerators if config.optimization else None
    options = OnnxOptions(
        intra_op_threads=reader.count("intra_op_thread_count", 1024),
        inter_op_threads=reader.count("inter_op_thread_count", 1024),
        parallel=reader.choice("execution_mode", {"0": False, "1": True}, default=False),
        cpu_mem_arena=reader.choice("enable_mem_arena", BOOLEANS, default=True),
        mem_pattern=reader.choice("enable_mem_pattern", BOOLEANS, default=True),
        arena_shrinkage=reader.text("memory.enable_memory_arena_shrinkage"),
        device_allocator_for_initializers=reader.choice(
            "session.use_device_allocator_for_initializers", BOOLEANS, default=False
        ),
        graph_level=GRAPH_LEVELS.get(level, ""),
        cpu=(*_cpu_providers(reader, accelerators.cpu_execution_accelerator if accelerators else ()), (CPU, {})),
    )
    if on_gpu:
        gpu = _gpu_providers(reader, accelerators.gpu_execution_accelerator if accelerators else ())
        options = replace(options, gpu=(*gpu, (CPU, {})))
    reader.finish(model)
    return options


def _cpu_providers(reader: ValueReader, accelerators: Iterable[Accelerator]) -> list[Provider]:
    providers: list[Provider] = []
    for each in accelerators:
        if each.name == "openvino":
            providers.append((OPENVINO, dict(each.parameters)))
        else:
            reader.problems.append(_unknown(each, "cpu", "openvino"))
    return providers


def _gpu_providers(reader: ValueReader, accelerators: Iterable[Accelerator]) -> list[Provider]:
    tensorrt: list[Provider] = []
    cuda = _cuda_parameters(reader)
    for each in accelerators:
        match each.name:
            case "tensorrt":
                tensorrt.append((TENSORRT, _tensorrt_options(reader, each.parameters)))
            case "cuda":
                cuda |= each.parameters
            case "gpu_io":
                # It asks to keep tensors on the GPU, but here they always come from the host and return to it.
                pass
            case _:
                reader.problems.append(_unknown(each, "gpu", "tensorrt, cuda, gpu_io"))
    return [*tensorrt, (CUDA, cuda)]


def _cuda_parameters(reader: ValueReader) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, names in CUDA_CHOICES.items():
        text = reader.text(key)
        if not text:
            continue
        if text not in names and text not in names.values():
            reader.wrong(key, f"one of {', '.join(f'{number} ({name})' for number, name in names.items())}")
        options[key] = names.get(text, text)
    if limit := reader.count("gpu_mem_limit", 2**64 - 1):
        options["gpu_mem_limit"] = str(limit)
    return options


def _tensorrt_options(reader: ValueReader, parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key != "precision_mode":
            options[TENSORRT_NAMES.get(key, key)] = value
        elif value in TENSORRT_PRECISIONS:
            options |= TENSORRT_PRECISIONS[value]
        else:
            reader.problems.append(
                f"accelerator 'tensorrt': precision_mode is '{value}'; "
                f"it must be one of {', '.join(TENSORRT_PRECISIONS)}"
            )
    return options


def _unknown(accelerator: Accelerator, kind: str, known: str) -> str:
    return f"unknown {kind}_execution_accelerator '{accelerator.name}' is requested; it must be one of {known}"
