"""The content of a pod: the models to fetch and the ensembles that use them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from halimede_operator.core.children.ensemble_config import ensemble_config
from halimede_operator.core.spec.types import EnsembleSpec, Json, Model, ModelSpec, Problem, Spec


@dataclass(frozen=True, slots=True)
class Ensemble:
    name: str
    config: Json


@dataclass(frozen=True, slots=True)
class Content:
    """Models in the order of their names."""

    models: tuple[Model, ...]
    ensembles: tuple[Ensemble, ...] = ()


def content_of(spec: Spec, members: Mapping[str, ModelSpec]) -> Content:
    """The content for a spec. members: all models of an ensemble by object name; they have no `member_problems`."""
    if isinstance(spec, ModelSpec):
        return Content((spec.model,))
    models = {name: members[name].model for name in sorted({step.model for step in spec.steps})}
    chosen = {name: _versions(spec, name, model) for name, model in models.items()}
    config = ensemble_config(
        spec, {name: model.name for name, model in models.items()}, {name: each.newest for name, each in chosen.items()}
    )
    served = [replace(model, config=chosen[name].config(model)) for name, model in models.items()]
    return Content(tuple(sorted(served, key=lambda model: model.name)), (Ensemble(spec.name, config),))


def member_problems(spec: EnsembleSpec, members: Mapping[str, ModelSpec]) -> tuple[Problem, ...]:
    """Why these models cannot be served in one pod: a repository can have each served name only once."""
    problems: list[Problem] = []
    served: dict[str, str] = {}
    for i, step in enumerate(spec.steps):
        name = members[step.model].model.name
        path = f"spec.steps[{i}].modelRef.name"
        if name == spec.name:
            text = f"InferenceModel '{step.model}' is served as '{name}', which is the ensemble's own name"
            problems.append(Problem(path, f"{text}; give its spec.model.name or the ensemble another one"))
        elif served.setdefault(name, step.model) != step.model:
            text = f"InferenceModels '{served[name]}' and '{step.model}' are both served as '{name}'"
            problems.append(Problem(path, f"{text}; give one of them another spec.model.name"))
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class _Versions:
    """Which versions of a member the ensemble's pod serves.

    policy: its `versionPolicy`; None: the member's own. newest: the version for steps that name none; None: the
    highest available one.
    """

    policy: Json | None = None
    newest: int | None = None

    def config(self, model: Model) -> Json:
        return model.config if self.policy is None else {**model.config, "versionPolicy": self.policy}


def _versions(spec: EnsembleSpec, name: str, model: Model) -> _Versions:
    """The versions that steps name, and the model's own versions for steps that name none.

    If a model has both kinds of steps and serves its latest versions, all versions are served, because no policy can
    express "the latest, and 2".
    """
    steps = [step for step in spec.steps if step.model == name]
    named = {step.version for step in steps if step.version is not None}
    if not named:
        return _Versions()
    if all(step.version is not None for step in steps):
        return _Versions({"specific": {"versions": sorted(named)}})
    own = (model.config.get("versionPolicy") or {}).get("specific")
    if own is None:
        return _Versions({"all": {}})
    return _Versions({"specific": {"versions": sorted(named.union(own["versions"]))}}, max(own["versions"]))
