"""Open ONNX Runtime sessions on forests."""

from typing import Any

from halimede.backends.extras import install_extra
from halimede.backends.onnxruntime.session import onnx_error, runtime
from halimede.backends.onnxruntime.threads import ThreadPlan
from halimede.backends.trees.forest import Forest
from halimede.backends.trees.onnx_file import onnx_bytes
from halimede.core.types import InferenceError, unsupported

FATAL_SEVERITY = 4
MOST_BYTES = (1 << 31) - 1
"""The limit of protobuf messages."""


def open_session(forest: Forest, model: str, threads: ThreadPlan) -> Any:  # Any: onnxruntime has no types
    """A session that computes the sums of the forest; its runs may overlap. UNSUPPORTED without ONNX Runtime."""
    try:
        ort = runtime()
    except InferenceError as error:
        raise InferenceError(
            error.code, f"model '{model}': onnxruntime cannot be imported; {install_extra('trees')}"
        ) from error
    settings = ort.SessionOptions()
    settings.log_severity_level = FATAL_SEVERITY
    settings.intra_op_num_threads = threads.intra
    settings.inter_op_num_threads = threads.inter
    if not threads.spin:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    content = onnx_bytes(forest)
    if len(content) > MOST_BYTES:
        raise unsupported(
            f"model '{model}': the forest has {len(forest.nodes.left)} nodes; ONNX Runtime takes at most 2 GiB of them"
        )
    try:
        return ort.InferenceSession(content, settings, providers=["CPUExecutionProvider"], enable_fallback=0)
    except Exception as error:
        raise onnx_error(error) from error
