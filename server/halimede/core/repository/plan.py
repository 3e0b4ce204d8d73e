"""The repository plan: from the loaded models and their dependencies, what to load, swap and withdraw, in order.

An ensemble depends on the models of its steps. It is loaded after them and follows them: if one of them is unloaded,
it is withdrawn; when all are loaded again, it serves again; if their configurations or labels have changed, it is made
anew. A load or unload of one model therefore changes all ensembles above it. All of these changes are one plan, which
is performed in one step of the event loop.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from halimede.core.config.model_config import ModelConfig, ModelTransactionPolicy
from halimede.core.ensemble.graph import Graph, make_graph, members_of
from halimede.core.graph import longest_path, path, reachable
from halimede.core.repository.load_errors import CircleError, EnsembleError, MissingStepError
from halimede.core.repository.load_waits import LoadWaits
from halimede.core.types import InferenceError
from halimede.core.types.caller import MAX_DEPTH

Labels = Mapping[str, tuple[str, ...]]
"""The lines of each output's label file, by output name."""

StepKey = tuple[str, int]
"""The model and the version that a step names."""

LATEST = -1
"""In a step: the highest version."""


def version_text(version: int) -> str:
    """A step's version in the form of requests: "" for the highest."""
    return "" if version == LATEST else str(version)


@dataclass(frozen=True, slots=True)
class Served:
    """A serving version, as seen by the ensembles that have it as a step."""

    config: ModelConfig
    labels: Labels


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an ensemble. Its versions need no change while these are equal.

    `members` are its steps' models, in the order of the steps; `depth` is the nesting depth of calls in a
    request.
    """

    config: ModelConfig
    labels: Labels
    members: tuple[Served, ...]
    depth: int


@dataclass(frozen=True, slots=True)
class Design:
    """An ensemble that fits the models of its steps, with the configuration and labels that it serves with."""

    parts: Parts
    graph: Graph
    config: ModelConfig
    labels: Labels

    @property
    def served(self) -> Served:
        return Served(self.config, self.labels)

    @property
    def steps(self) -> tuple[StepKey, ...]:
        return members_of(self.parts.config)


@dataclass(frozen=True, slots=True)
class LoadedEnsemble:
    """An ensemble between its load and its unload. `config` and `labels` are those of its directory; `parts` are those
    of its versions, None while it does not serve."""

    config: ModelConfig
    labels: Labels
    versions: tuple[int, ...]
    parts: Parts | None

    @property
    def steps(self) -> tuple[StepKey, ...]:
        return members_of(self.config)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The loaded models: `serving` has models and ensembles by name, their versions by `version_text`."""

    serving: Mapping[str, Mapping[str, Served]]
    ensembles: Mapping[str, LoadedEnsemble]

    def steps_of(self, name: str) -> Iterator[str]:
        """The models of a loaded ensemble's steps; nothing for a model."""
        ensemble = self.ensembles.get(name)
        return (step for step, _ in ensemble.steps) if ensemble is not None else iter(())

    def find(self, step: StepKey) -> Served | None:
        """The version that serves a step."""
        name, version = step
        return self.serving.get(name, {}).get(version_text(version))


@dataclass(frozen=True, slots=True)
class Swap:
    """Serve an ensemble by this design from now on."""

    ensemble: str
    design: Design


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Do not serve an ensemble. `problem` is "" if the model of a step is missing, and else why the ensemble does not
    fit the models."""

    ensemble: str
    cause: str
    problem: str


def steps_to_load(ensemble: str, steps: Sequence[StepKey], usable: Collection[StepKey], waits: LoadWaits) -> list[str]:
    """The models to load before an ensemble is made: those of all steps but the `usable` ones, each once.

    CircleError if the load of one of them is the ensemble's own, or waits for it.
    """
    names = list(dict.fromkeys(step[0] for step in steps if step not in usable))
    for name in names:
        if circle := waits.path(name, ensemble):
            raise CircleError((ensemble, *circle[:-1]))
    return names


def make_design(snapshot: Snapshot, config: ModelConfig, labels: Labels) -> Design:
    """An ensemble with the current models of its steps. EnsembleError if one is missing, leads back to the ensemble, or
    does not fit."""
    return _design_of(_parts(snapshot, config, labels))


def _parts(snapshot: Snapshot, config: ModelConfig, labels: Labels) -> Parts:
    """The current parts of an ensemble. EnsembleError if a step is missing or leads back to the ensemble, or if the
    ensemble nests others too deep."""
    ensemble, steps = config.name, members_of(config)
    members: list[Served] = []
    for name, version in steps:
        if circle := path(name, ensemble, snapshot.steps_of):
            raise CircleError((ensemble, *circle[:-1]))
        member = snapshot.find((name, version))
        if member is None and snapshot.find((name, LATEST)) is None:
            raise MissingStepError(f"ensemble '{ensemble}' depends on '{name}' which has no loaded version")
        if member is None:
            raise MissingStepError(
                f"ensemble '{ensemble}' depends on '{name}' whose required version {version} is not loaded."
            )
        members.append(member)
    nested = longest_path(ensemble, lambda at: (n for n, _ in steps) if at == ensemble else snapshot.steps_of(at))
    depth = len(nested) - 1
    if depth > MAX_DEPTH:
        raise EnsembleError(
            f"ensemble '{ensemble}' nests ensembles {depth} deep: calls within one another are at most {MAX_DEPTH}"
            f": {' -> '.join(nested)}"
        )
    return Parts(config, labels, tuple(members), depth)


def _design_of(parts: Parts) -> Design:
    """The design of these parts. EnsembleError if they do not fit together."""
    try:
        graph, config = ensemble_graph(parts.config, [member.config for member in parts.members])
    except InferenceError as error:
        raise EnsembleError(error.message) from error
    return Design(parts, graph, config, _with_inherited(parts, graph))


def ensemble_graph(config: ModelConfig, members: Sequence[ModelConfig]) -> tuple[Graph, ModelConfig]:
    """An ensemble's graph and its configuration as it is served; `members` are those of its steps' models, in order.

    INVALID_ARG with every mismatch.
    """
    graph = make_graph(config, members)
    return graph, replace(config, model_transaction_policy=ModelTransactionPolicy(decoupled=graph.decoupled))


def follow(snapshot: Snapshot, changed: str) -> list[Swap | Withdraw]:
    """The changes of the ensembles above a model whose serving versions have changed. Each ensemble comes after those
    that are steps of it."""
    serving = dict(snapshot.serving)
    now = Snapshot(serving, snapshot.ensembles)
    changes = {changed}
    actions: list[Swap | Withdraw] = []
    for name in _above(snapshot, changed):
        if changes.isdisjoint(snapshot.steps_of(name)):
            continue
        action = _agree(now, name, snapshot.ensembles[name])
        if action is None:
            continue
        actions.append(action)
        if isinstance(action, Swap):
            versions = map(str, snapshot.ensembles[name].versions)
            serving[name] = dict.fromkeys((*versions, ""), action.design.served)
            changes.add(name)
        elif name in serving:
            del serving[name]
            changes.add(name)
    return actions


def is_used(snapshot: Snapshot, name: str) -> bool:
    """Whether a model is a step of a serving ensemble."""
    return any(
        ensemble.parts is not None and name in snapshot.steps_of(each) for each, ensemble in snapshot.ensembles.items()
    )


def _above(snapshot: Snapshot, name: str) -> list[str]:
    """The ensembles that have the model as a step, directly or through others, each after those that are its steps."""
    users: dict[str, list[str]] = {}
    for ensemble in snapshot.ensembles:
        for step in snapshot.steps_of(ensemble):
            users.setdefault(step, []).append(ensemble)
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for model in reachable(name, lambda model: users.get(model, ())):
        for user in users.get(model, ()):
            sorter.add(user, model)
    return [each for each in sorter.static_order() if each != name]


def _agree(snapshot: Snapshot, name: str, ensemble: LoadedEnsemble) -> Swap | Withdraw | None:
    """The change that adapts an ensemble to the current models of its steps; None if it needs no change."""
    try:
        parts = _parts(snapshot, ensemble.config, ensemble.labels)
        return None if parts == ensemble.parts else Swap(name, _design_of(parts))
    except MissingStepError as error:
        return Withdraw(name, error.message, "")
    except EnsembleError as error:
        return Withdraw(name, error.message, f"{error.code.value}: {error.message}")


def _with_inherited(parts: Parts, graph: Graph) -> Labels:
    """An ensemble's own labels, and for its other outputs those of the model that makes them."""
    inherited = {
        tensor: member.labels[output]
        for step, member in zip(graph.steps, parts.members, strict=True)
        for output, tensor in step.outputs.items()
        if output in member.labels
    }
    wanted = {output.name for output in parts.config.output}
    return {**{tensor: lines for tensor, lines in inherited.items() if tensor in wanted}, **parts.labels}
