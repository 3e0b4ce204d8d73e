"""The ONNX Runtime backend: ONNX models on CPUs, GPUs and other accelerators that the installed runtime supports."""

from halimede.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
