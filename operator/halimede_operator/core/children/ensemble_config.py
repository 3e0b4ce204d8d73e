"""Translates a ModelEnsemble into the server's model configuration of an ensemble.

The server gives each tensor one name. An input of the ensemble keeps its name. A step's output gets the name of the
ensemble's output that it is, otherwise `<step>.<name>`; underscores are added if an input or output has that name.
Unused step outputs are left out, because the server refuses them.

Conditions name tensors as steps do; they are translated to the server's names.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from halimede_operator.core.spec.types import EnsembleSpec, EnsembleTensor, Json, Step
from halimede_operator.core.spec.when import read_when, renamed

REQUEST = "request"
"""Source of the ensemble's own inputs: `request.X`."""


def ensemble_config(spec: EnsembleSpec, served_as: Mapping[str, str], newest: Mapping[str, int | None]) -> Json:
    """ModelConfig's JSON.

    served_as: the served name of each member. newest: by member, the version for steps that name none; None: the
    highest.
    """
    tensors = _tensors(spec)
    used = _used(spec)
    return {
        "name": spec.name,
        "platform": "ensemble",
        "max_batch_size": spec.max_batch_size,
        "input": [_tensor(each) for each in spec.inputs],
        "output": [_tensor(each) for each in spec.outputs],
        "ensemble_scheduling": {
            "step": [_step(step, served_as[step.model], newest.get(step.model), tensors, used) for step in spec.steps]
        },
    }


def _tensor(tensor: EnsembleTensor) -> dict[str, Any]:
    data_type = "STRING" if tensor.data_type == "BYTES" else tensor.data_type
    return {"name": tensor.name, "data_type": f"TYPE_{data_type}", "dims": list(tensor.shape)}


def _step(
    step: Step, served_as: str, newest: int | None, tensors: Mapping[str, str], used: frozenset[str]
) -> dict[str, Any]:
    version = step.version if step.version is not None else newest
    made = {output: f"{step.name}.{local}" for output, local in sorted(step.outputs.items())}
    config: dict[str, Any] = {
        "model_name": served_as,
        "model_version": -1 if version is None else version,
        "input_map": {name: tensors[source] for name, source in sorted(step.inputs.items())},
        "output_map": {output: tensors[name] for output, name in made.items() if name in used},
    }
    return config if step.when is None else {**config, "when": renamed(step.when, tensors)}


def _tensors(spec: EnsembleSpec) -> dict[str, str]:
    """The server's name of each `request.X` and `step.out`."""
    tensors = {f"{REQUEST}.{tensor.name}": tensor.name for tensor in spec.inputs}
    outputs = {tensor.source: tensor.name for tensor in spec.outputs}
    taken = {tensor.name for tensor in (*spec.inputs, *spec.outputs)}
    for step in spec.steps:
        for local in sorted(step.outputs.values()):
            source = f"{step.name}.{local}"
            tensors[source] = outputs.get(source) or _free(source, taken)
            taken.add(tensors[source])
    return tensors


def _free(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _used(spec: EnsembleSpec) -> frozenset[str]:
    """The sources that are used by a step, a condition or an output of the ensemble."""
    used = {tensor.source for tensor in spec.outputs if tensor.source is not None}
    for step in spec.steps:
        used.update(step.inputs.values())
        references = read_when(step.when) if step.when is not None else ()
        used.update(each.tensor for each in references if not isinstance(each, str))
    return frozenset(used)
