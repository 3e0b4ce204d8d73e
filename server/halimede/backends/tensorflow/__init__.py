"""The TensorFlow backend: SavedModels and frozen graphs, each instance in a process of its own."""

from halimede.backends.tensorflow.backend import TensorFlowBackend

__all__ = ["TensorFlowBackend"]
