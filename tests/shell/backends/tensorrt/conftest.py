"""The played machine of the tests of TensorRT models."""

import pytest

from support.played_gpu import cudart, trt
from support.played_gpu.cudart import MACHINE


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine that nothing is left on."""
    monkeypatch.setenv("PLAYED_GPUS", "2")
    MACHINE.error, MACHINE.limit_bytes = cudart.cudaError_t.cudaSuccess, 1 << 30
    for each in (MACHINE.memory, MACHINE.pinned, MACHINE.streams, MACHINE.events, MACHINE.graphs):
        each.clear()  # of a test that failed
    MACHINE.event_flags.clear()
    cudart.launches.clear()
    trt.strategies.clear()
    yield MACHINE
    assert MACHINE.live() == {}
