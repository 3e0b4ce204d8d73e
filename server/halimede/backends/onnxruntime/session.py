"""Open ONNX Runtime sessions, and convert between them and the server: providers, signatures, errors."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from halimede.backends.extras import install_extra
from halimede.backends.onnxruntime.options import CPU, CUDA, OPENVINO, OnnxOptions, Provider
from halimede.backends.onnxruntime.threads import ThreadPlan
from halimede.core.types import DataType, internal, unsupported

ERROR_SEVERITY = 3
"""Log level for ONNX Runtime's own log: errors and above."""

TEXT_LIMIT = 1024

DATATYPES = {
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(uint16)": DataType.UINT16,
    "tensor(uint32)": DataType.UINT32,
    "tensor(uint64)": DataType.UINT64,
    "tensor(int8)": DataType.INT8,
    "tensor(int16)": DataType.INT16,
    "tensor(int32)": DataType.INT32,
    "tensor(int64)": DataType.INT64,
    "tensor(float16)": DataType.FP16,
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(string)": DataType.BYTES,
    "tensor(bfloat16)": DataType.BF16,
}
"""Datatype by ONNX Runtime's type name. Other types (sequences, maps, 8-bit floats) have no wire datatype."""

_NEWER_OPSET = re.compile(
    r"Opset (\d+) is under development.* Current official support for domain (\S+) is till opset (\d+)"
)
_NEWER_FORMAT = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_ERROR = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)


@cache
def runtime() -> Any:  # Any: onnxruntime has no types
    """The onnxruntime module; UNSUPPORTED if it is not installed."""
    # ONNX Runtime sends telemetry unless this is set before it is loaded. A server that runs other people's models must
    # not do that without consent; set the variable to 0 to allow it.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime  # type: ignore[import-untyped]  # the package has no types
    except ImportError as error:
        raise unsupported(
            f"onnxruntime cannot be imported ({error}); {install_extra('onnx')}, or the extra 'gpu'"
        ) from error
    onnxruntime.set_default_logger_severity(ERROR_SEVERITY)
    return onnxruntime


@cache
def start_global_pool(intra: int, inter: int) -> None:
    """Make all sessions share one thread pool; 0 is ONNX Runtime's default. Call only before the first session."""
    runtime().set_global_thread_pool_sizes(intra, inter)


def check_available(providers: tuple[Provider, ...], model: str) -> None:
    """UNSUPPORTED, with a list of the available providers, unless the runtime has all of `providers`."""
    available = runtime().get_available_providers()
    missing = [name for name, _ in providers if name not in available]
    if missing:
        other = '; to run it with OpenVINO, set backend: "openvino" and remove the platform and this accelerator'
        raise unsupported(
            f"model '{model}' is configured for {', '.join(missing)}, which the installed onnxruntime does not have; "
            f"it has {', '.join(available)}{other if OPENVINO in missing else ''}"
        )


def open_session(
    path: Path, model: str, options: OnnxOptions, threads: ThreadPlan | None, providers: tuple[Provider, ...]
) -> Any:
    """A session that runs on all of `providers`. `threads` None means the global pool."""
    ort = runtime()
    settings = ort.SessionOptions()
    settings.log_severity_level = ERROR_SEVERITY
    settings.graph_optimization_level = getattr(ort.GraphOptimizationLevel, options.graph_level)
    settings.execution_mode = ort.ExecutionMode.ORT_PARALLEL if options.parallel else ort.ExecutionMode.ORT_SEQUENTIAL
    settings.enable_cpu_mem_arena = options.cpu_mem_arena
    settings.enable_mem_pattern = options.mem_pattern
    if options.device_allocator_for_initializers:
        settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if threads is None:
        settings.use_per_session_threads = False
    else:
        settings.intra_op_num_threads = threads.intra
        settings.inter_op_num_threads = threads.inter
        if not threads.spin:
            settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
            settings.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if any(name == CUDA for name, _ in providers):
        # Finds CUDA and cuDNN libraries installed by pip.
        ort.preload_dlls()
    session = _create(path, settings, list(providers))
    # If a provider's libraries or device are missing, the runtime only warns, and continues without the provider.
    lost = [name for name, _ in providers if name not in session.get_providers()]
    if lost:
        raise internal(
            f"model '{model}': {', '.join(lost)} could not be started: the driver or its libraries are missing, or the "
            f"device cannot be opened; without it there would be {', '.join(session.get_providers())}"
        )
    return session


def probe_session(path: Path, global_pool: bool) -> Any:
    """A session for reading the signature: on the CPU, one thread, no optimization."""
    ort = runtime()
    settings = ort.SessionOptions()
    settings.log_severity_level = ERROR_SEVERITY
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.add_session_config_entry("session.disable_prepacking", "1")
    settings.use_per_session_threads = not global_pool
    if not global_pool:
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    return _create(path, settings, [(CPU, {})])


def onnx_error(error: Exception) -> Exception:
    """ONNX Runtime's error as an InferenceError in Triton's words; other errors unchanged."""
    match = _ERROR.match(str(error))
    if match is None:
        return error
    text = _newer(" ".join(match[2].split()))
    text = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
    return internal(f"onnx runtime error {match[1]}: {text}")


def _newer(text: str) -> str:
    """The text of an error, in plain words if the model is newer than the runtime."""
    advice = "export the model with a lower opset, or install a newer onnxruntime"
    if found := _NEWER_OPSET.search(text):
        opset, domain, most = found.groups()
        return (
            f"the model uses opset {opset} of the operators of {domain}, and the installed onnxruntime "
            f"{runtime().__version__} supports up to {most}; {advice}"
        )
    if found := _NEWER_FORMAT.search(text):
        return (
            f"the model has version {found[1]} of the ONNX format, and the installed onnxruntime "
            f"{runtime().__version__} supports up to {found[2]}; {advice}"
        )
    return text


def _create(path: Path, settings: Any, providers: list[Provider]) -> Any:
    try:
        # The runtime's fallback prints to stdout and retries with other providers than those requested.
        return runtime().InferenceSession(str(path), settings, providers=providers, enable_fallback=0)
    except Exception as error:
        raise onnx_error(error) from error
