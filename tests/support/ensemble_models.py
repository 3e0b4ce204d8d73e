"""Repositories with ensembles, and models for their steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from support.models import write_config
from support.served import add_python


@dataclass(frozen=True)
class Step:
    """One step; the maps go from the model's tensors to the ensemble's."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    version: int = -1
    extra: str = ""

    def text(self) -> str:
        maps = "".join(
            f'{side} {{ key: "{key}" value: "{value}" }} '
            for side, tensors in (("input_map", self.inputs), ("output_map", self.outputs))
            for key, value in tensors.items()
        )
        return f'{{ model_name: "{self.model}" model_version: {self.version} {maps} {self.extra} }}'


def chain(*models: str) -> list[Step]:
    """Models in sequence, each IN -> OUT; the ensemble's tensors are IN, between1, between2, … and OUT."""
    names = ["IN", *(f"between{number}" for number in range(1, len(models))), "OUT"]
    return [
        Step(model, {"IN": source}, {"OUT": target})
        for model, (source, target) in zip(models, pairwise(names), strict=True)
    ]


@dataclass(frozen=True)
class Tensors:
    """The inputs or the outputs of an ensemble, all of one type and shape."""

    names: Sequence[str] = ("IN",)
    datatype: str = "FP32"
    dims: str = "4"
    extra: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        kind = "TYPE_STRING" if self.datatype == "BYTES" else f"TYPE_{self.datatype}"
        return ", ".join(
            f'{{ name: "{name}" data_type: {kind} dims: [ {self.dims} ] {self.extra.get(name, "")} }}'
            for name in self.names
        )


def add_ensemble(
    repository: Path,
    name: str,
    steps: Sequence[Step],
    *,
    inputs: Tensors | None = None,
    outputs: Tensors | None = None,
    max_batch_size: int = 4,
    max_inflight_requests: int = 0,
    extra: str = "",
) -> None:
    """An ensemble, IN FP32[4] -> OUT FP32[4] by default."""
    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    limit = f"max_inflight_requests: {max_inflight_requests}" if max_inflight_requests else ""
    write_config(
        repository / name,
        f"""platform: "ensemble"
        max_batch_size: {max_batch_size}
        input [ {(inputs or Tensors()).text()} ]
        output [ {(outputs or Tensors(["OUT"])).text()} ]
        ensemble_scheduling {{ {limit} step [ {", ".join(step.text() for step in steps)} ] }}
        {extra}
        """,
    )


def add_plus(repository: Path, name: str, added: float = 1.0, *, first: str = "", **how: Any) -> None:
    """A python model IN -> OUT, FP32[4], that adds a number; it answers negative input with an error.

    `first` is code that runs before."""
    execute = f"""
def one(request):
    array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    if array.flat[0] < 0:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array + np.float32({added}))])

{first}
return [one(request) for request in requests]
"""
    add_python(repository, name, execute, dims="4", **how)
