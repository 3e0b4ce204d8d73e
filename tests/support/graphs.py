"""Ensembles and the models of their steps, with one line for each configuration."""

import struct
from collections.abc import Mapping, Sequence

from halimede.core.config.model_config import (
    EnsembleStep,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from halimede.core.ensemble.graph import Graph, make_graph
from halimede.core.types import DataType, Tensor

FP32 = DataType.FP32


def model(
    name: str,
    inputs: Sequence[str] = ("IN",),
    outputs: Sequence[str] = ("OUT",),
    *,
    batch: int = 8,
    datatype: DataType = FP32,
    dims: tuple[int, ...] = (1,),
    decoupled: bool = False,
) -> ModelConfig:
    """A model with tensors of one type and shape; the name of an optional input ends in `?`."""
    return ModelConfig(
        name=name,
        backend="python",
        max_batch_size=batch,
        input=tuple(ModelInput(n.rstrip("?"), datatype, dims=dims, optional=n.endswith("?")) for n in inputs),
        output=tuple(ModelOutput(n, datatype, dims) for n in outputs),
        model_transaction_policy=ModelTransactionPolicy(decoupled) if decoupled else None,
    )


Steps = Sequence[tuple[ModelConfig, Mapping[str, str], Mapping[str, str]] | tuple[object, ...]]
"""Model, input map, output map, and the condition if the step has one."""


def ensemble(
    steps: Steps,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    *,
    batch: int = 8,
    datatype: DataType = FP32,
    dims: tuple[int, ...] = (1,),
    name: str = "e",
) -> ModelConfig:
    parsed = [EnsembleStep(m.name, -1, into, out, "", when[0] if when else None) for m, into, out, *when in steps]
    return ModelConfig(
        name=name,
        platform="ensemble",
        max_batch_size=batch,
        input=tuple(ModelInput(n.rstrip("?"), datatype, dims=dims, optional=n.endswith("?")) for n in inputs),
        output=tuple(ModelOutput(n, datatype, dims) for n in outputs),
        ensemble_scheduling=ModelEnsembling(tuple(parsed)),
    )


def graph(steps: Steps, *args: object, **kwargs: object) -> Graph:
    return make_graph(ensemble(steps, *args, **kwargs), [step[0] for step in steps])  # type: ignore[arg-type]


def tensor(name: str, value: float = 1.0, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    """An FP32 tensor of one element."""
    return Tensor(name, FP32, shape, struct.pack("<f", value))
