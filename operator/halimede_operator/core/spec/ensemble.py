"""Parses ModelEnsembles into `EnsembleSpec`, and checks that the steps fit together."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from halimede_operator.core.reading import objects_at, text_at
from halimede_operator.core.spec.field import INT64_MAX, Field, Rule, shown
from halimede_operator.core.spec.types import EnsembleSpec, EnsembleTensor, Step, Workload
from halimede_operator.core.spec.when import read_when
from halimede_spec.dataflow import Flow, make_flow, makers, walk

MAX_STEPS = 32
MAX_TENSORS = 64
DATA_TYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BF16", "BYTES"),
)

_MAX_RANK = 63
_REQUEST = "request"
_SHOWN = 10
"""At most this many names of a list are in a message."""

_TENSOR = Rule(
    re.compile(r"[^\s`\x00-\x1f\x7f]+"),
    "must be a tensor's name, without spaces, control characters and backticks",
    128,
)
_STEP = Rule(
    re.compile(r"(?!(?:request|parameters)$)[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII),
    "must be of lower case letters, digits and '-', start with a letter, end with a letter or digit, and be neither "
    "request nor parameters",
    63,
)
_MODEL = Rule(
    re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII),
    "must be the name of an InferenceModel, of lower case letters, digits and '-'",
    50,
)
_LOCAL = Rule(
    re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII),
    "must be a name of letters, digits and '_' that does not start with a digit",
    128,
)


def member_names(ensemble: Mapping[str, Any]) -> frozenset[str]:
    """Names of the InferenceModels that a ModelEnsemble uses, also if its spec is invalid. Any: JSON."""
    steps = objects_at(ensemble, "spec", "steps")[:MAX_STEPS]
    return frozenset(name for step in steps if (name := text_at(step, "modelRef", "name")))


def read_ensemble(spec: Field, name: str, workload: Workload) -> EnsembleSpec:
    """The spec of an ensemble, valid only if no problem was added. name: of the object."""
    earlier = len(spec.problems)
    inputs = (
        spec.get("inputs").required("the tensors that a request carries").objects("name", least=1, most=MAX_TENSORS)
    )
    outputs = (
        spec.get("outputs").required("the tensors that a response carries").objects("name", least=1, most=MAX_TENSORS)
    )
    steps = spec.get("steps").required("the calls of models").objects("name", least=1, most=MAX_STEPS)
    spec.section("placement").get("mode").choice("Colocate", "Colocate")
    ensemble = EnsembleSpec(
        name=name,
        max_batch_size=spec.get("maxBatchSize").integer(0, 0),
        inputs=tuple(_tensor(entry, is_output=False) for entry in inputs),
        outputs=tuple(_tensor(entry, is_output=True) for entry in outputs),
        steps=tuple(_step(entry) for entry in steps),
        workload=workload,
    )
    # The flow is checked only if every step could be read.
    if len(spec.problems) == earlier:
        _check_flow(spec, ensemble)
    return ensemble


def _tensor(field: Field, *, is_output: bool) -> EnsembleTensor:
    shape = field.get("shape").required("the dimensions, for instance [-1, 768]")
    dimensions = shape.items(least=1, most=_MAX_RANK)
    for dimension in dimensions:
        if dimension.value == 0:
            dimension.refuse("must be 1 or more, or -1 for one that varies, got 0")
    source = field.get("from") if is_output else None
    return EnsembleTensor(
        name=field.get("name").required("the tensor's name").text("", _TENSOR),
        data_type=field.get("dataType").required(f"one of {', '.join(DATA_TYPES)}").choice("", *DATA_TYPES),
        shape=tuple(dimension.required("a dimension").integer(-1, -1, INT64_MAX) for dimension in dimensions),
        source=source.required("the output of a step, as STEP.OUTPUT").text(None) if source else None,
    )


def _step(field: Field) -> Step:
    model = field.section("modelRef")
    inputs = field.section("inputs").required("where the model's inputs come from")
    outputs = field.section("outputs").required("what the model's outputs are called")
    for tensors in (inputs, outputs):
        if tensors.given and not tensors.entries():
            tensors.refuse("must not be empty")
    when = field.get("when")
    condition = when.text(None)
    if condition is not None and isinstance(problem := read_when(condition), str):
        when.refuse(f"cannot be read: {problem}")
    return Step(
        name=field.get("name").required("the step's name").text("", _STEP),
        model=model.get("name").required("an InferenceModel of this namespace").text("", _MODEL),
        version=model.get("version").integer(None, 1, INT64_MAX),
        inputs={name: entry.text("") for name, entry in inputs.named_entries().items()},
        outputs={name: entry.text("", _LOCAL) for name, entry in outputs.named_entries().items()},
        when=condition,
    )


def _check_flow(spec: Field, ensemble: EnsembleSpec) -> None:
    """Every tensor is made once and used, and no step waits for itself."""
    inputs = {f"{_REQUEST}.{tensor.name}" for tensor in ensemble.inputs}
    made = [[f"{step.name}.{local}" for local in step.outputs.values()] for step in ensemble.steps]
    maker = makers(inputs, made)
    needs: list[tuple[str, ...]] = []
    for i, step in enumerate(ensemble.steps):
        field = spec.get("steps").items()[i]
        _check_once(field.get("outputs"), step)
        references = read_when(step.when) if step.when is not None else ()
        named = [] if isinstance(references, str) else [reference.tensor for reference in references]
        asked = [(field.get("inputs").entries()[name], source) for name, source in step.inputs.items()]
        for where, source in [*asked, *((field.get("when"), source) for source in named)]:
            if source not in inputs and source not in maker:
                where.refuse(_unknown(source, ensemble))
        sources = dict.fromkeys([*step.inputs.values(), *named])
        needs.append(tuple(source for source in sources if source in inputs or source in maker))
    flow = make_flow(inputs, maker, needs)
    _check_outputs(spec, ensemble, set(maker))
    used = {*flow.users, *(tensor.source for tensor in ensemble.outputs if tensor.source is not None)}
    for i, tensor in enumerate(ensemble.inputs):
        if f"{_REQUEST}.{tensor.name}" not in used:
            spec.get("inputs").items()[i].refuse(f"is not used: no step has {_REQUEST}.{tensor.name} as an input")
    for i, step in enumerate(ensemble.steps):
        if used.isdisjoint(made[i]):
            spec.get("steps").items()[i].get("outputs").refuse(
                f"are not used: neither a step nor an output of the ensemble has one of {step.name}'s"
            )
    circle = _circle([step.name for step in ensemble.steps], flow)
    if circle:
        names = [ensemble.steps[i].name for i in (*circle, circle[0])]
        spec.get("steps").items()[circle[0]].get("inputs").refuse(f"must not wait for itself: {' needs '.join(names)}")


def _check_once(outputs: Field, step: Step) -> None:
    seen: dict[str, str] = {}
    for name, local in step.outputs.items():
        if seen.setdefault(local, name) != name:
            outputs.entries()[name].refuse(f"must differ from that of {seen[local]}, got {shown(local)}")


def _check_outputs(spec: Field, ensemble: EnsembleSpec, made: set[str]) -> None:
    inputs = {tensor.name for tensor in ensemble.inputs}
    taken: dict[str, str] = {}
    for i, output in enumerate(ensemble.outputs):
        field = spec.get("outputs").items()[i]
        source = output.source or ""
        if source not in made:
            field.get("from").refuse(
                f"must be the output of a step, got {shown(source)}; there are {_some(sorted(made))}"
            )
        elif taken.setdefault(source, output.name) != output.name:
            field.get("from").refuse(f"must not be that of output {taken[source]} too: {source} can have one name")
        if output.name in inputs:
            field.get("name").refuse("must not be the name of an input")


def _unknown(source: str, ensemble: EnsembleSpec) -> str:
    """The message for an unknown source: which sources would be valid."""
    step, _, tensor = source.partition(".")
    if step == _REQUEST and tensor:
        inputs = [f"{_REQUEST}.{tensor.name}" for tensor in ensemble.inputs]
        return f"must be an input of the ensemble, got {shown(source)}; there are {_some(inputs)}"
    outputs = [f"{one.name}.{local}" for one in ensemble.steps if one.name == step for local in one.outputs.values()]
    if outputs:
        return f"must be an output of step {step}, got {shown(source)}; it has {_some(outputs)}"
    steps = _some([one.name for one in ensemble.steps])
    return f"must be {_REQUEST}.TENSOR or STEP.OUTPUT with one of the steps {steps}, got {shown(source)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _circle(names: Sequence[str], flow: Flow) -> Sequence[int]:
    """Steps of which each waits for the next and the last for the first; () if there are none. By name, so that the
    order of the list does not matter."""

    def following(step: int) -> int:
        return min((flow.maker[tensor] for tensor in flow.missing(step)), key=names.__getitem__)

    waiting = [step for step in range(len(names)) if any(flow.missing(step))]
    return walk(min(waiting, key=names.__getitem__), following).circle if waiting else ()
