"""The played TensorRT under the real name, for processes with this folder and `tests` on their PYTHONPATH."""

from support.played_gpu.trt import *  # noqa: F403
from support.played_gpu.trt import __version__  # noqa: F401
