"""The ONNX Runtime backend: ONNX models on CPUs, GPUs and the accelerators that the installed runtime has."""

from halimede.backends.onnxruntime.backend import OnnxRuntimeBackend

__all__ = ["OnnxRuntimeBackend"]
