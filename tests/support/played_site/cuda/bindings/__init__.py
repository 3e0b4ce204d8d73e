"""The played CUDA under the real name."""

__version__ = "13.5.0"
