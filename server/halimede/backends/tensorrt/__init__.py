"""The TensorRT backend: engines that were built for the GPUs of this server."""

from halimede.backends.tensorrt.backend import TensorRtBackend

__all__ = ["TensorRtBackend"]
