"""Small PyTorch models, and runs of batches on them in the backend."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.pytorch import PyTorchBackend
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem

BACKEND = PyTorchBackend()
CPU = Placement("m_0", 0, "CPU")
CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])
FP32, INT64, BYTES, BF16 = DataType.FP32, DataType.INT64, DataType.BYTES, DataType.BF16


def any_rows() -> Any:
    """A dimension of torch.export. To make one imports sympy, which takes a second; no import of a file of tests may."""
    return torch.export.Dim("rows", min=1, max=64)


class AddSub(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Network(nn.Module):
    """FP32[n, 8] -> scores FP32[n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.second(torch.relu(self.first(x))), dim=1)


class Whole(nn.Module):
    """Has no batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.layer = nn.Linear(inner, outer)

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return torch.softmax(self.second(torch.relu(self.first(x))), dim=1)
"""
"""The code of `Network` as a `model.py`."""


def script(module: nn.Module, path: Path) -> Path:
    """Save the module as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(module.eval()).save(str(path))
    return path


def trace(module: nn.Module, example: tuple[torch.Tensor, ...], path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(module.eval(), example).save(str(path))
    return path


def export(
    module: nn.Module,
    arguments: tuple[Any, ...],
    path: Path,
    *,
    keywords: dict[str, Any] | None = None,
    dynamic: Any = None,
) -> Path:
    """Save the module as a program of torch.export."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module.eval(), arguments, keywords, dynamic_shapes=dynamic)
        torch.export.save(program, str(path))
    return path


def config(inputs: dict[str, tuple], outputs: dict[str, tuple], **fields: Any) -> ModelConfig:
    """A complete configuration; a tensor is (datatype, *dims)."""
    return ModelConfig(
        name="m",
        backend="pytorch",
        input=tuple(ModelInput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in outputs.items()),
        **{"max_batch_size": 8} | fields,
    )


def parameters(**values: str) -> dict[str, ModelParameter]:
    return {key: ModelParameter(value) for key, value in values.items()}


def source(path: Path, **options: str) -> ModelSource:
    """The version whose artifact is `path`, in a directory of any name."""
    return ModelSource("m", 1, path.parent.parent, path, {k.replace("_", "-"): v for k, v in options.items()})


def run(path: Path, config: ModelConfig, inputs: dict[str, Any], outputs: Sequence[str] | None = None) -> Any:
    """The outputs of one batch; inputs are read-only, as the server's are."""
    loaded = BACKEND.load(config, source(path))
    instance = loaded.create_instance(CPU)
    try:
        for array in inputs.values():
            array.flags.writeable = False
        return instance.run(inputs, outputs or [each.name for each in config.output], CONTEXT)
    finally:
        instance.close()
        loaded.close()


def refused(work: Callable[[], object]) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        work()
    return caught.value


def floats(*rows: Sequence[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)
