"""The OpenVINO backend: IR, ONNX, PaddlePaddle, TensorFlow and TensorFlow Lite models on Intel CPUs, GPUs and NPUs."""

from halimede.backends.openvino.backend import OpenVinoBackend

__all__ = ["OpenVinoBackend"]
