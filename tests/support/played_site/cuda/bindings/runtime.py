"""The played CUDA runtime under the real name, for processes with this folder and `tests` on their PYTHONPATH."""

from support.played_gpu.cudart import *  # noqa: F403
