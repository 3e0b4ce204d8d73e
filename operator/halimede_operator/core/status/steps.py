"""The steps of an ensemble, and the InferenceModels that they are made of."""

from dataclasses import dataclass
from enum import StrEnum

from halimede_operator.core.api.spec import EnsembleSpec
from halimede_operator.core.pods import FetchedModel
from halimede_operator.core.reading import clean, condition, integer_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.status.scene import Scene


class MemberState(StrEnum):
    """Of an ensemble's model, worst first."""

    MISSING = "Missing"
    INVALID = "Invalid"
    LOADING = "Loading"
    READY = "Ready"


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    """Of the InferenceModel."""
    steps: tuple[str, ...]
    state: MemberState
    message: str
    fetched: FetchedModel | None


def members_of(scene: Scene, spec: EnsembleSpec) -> tuple[Member, ...]:
    """In the order in which the steps name them."""
    steps: dict[str, list[str]] = {}
    for step in spec.steps:
        steps.setdefault(step.model, []).append(step.name)
    return tuple(_member(scene, name, tuple(names)) for name, names in steps.items())


def _member(scene: Scene, name: str, steps: tuple[str, ...]) -> Member:
    object_ = scene.snapshot.members.get(name)
    served = text_at(object_, "spec", "model", "name") or name
    pods = scene.serving or tuple(pod for pod in scene.newest if not pod.is_unknown)
    ready = [pod.versions(served) for pod in pods]
    is_ready = bool(ready) and bool(frozenset.intersection(*ready))
    fetched = (model for pod in pods for model in pod.fetched if model.name in {name, served})
    state, message = _state(name, object_, is_ready)
    return Member(name, steps, state, message, next(fetched, None))


def _state(name: str, object_: Object | None, is_ready: bool) -> tuple[MemberState, str]:
    if object_ is None:
        return MemberState.MISSING, f"InferenceModel {name} does not exist"
    accepted = condition(object_, "Accepted")
    is_current = integer_at(accepted, "observedGeneration") == integer_at(object_, "metadata", "generation")
    if accepted.get("status") == "False" and is_current:
        return MemberState.INVALID, clean(f"InferenceModel {name}: {text_at(accepted, 'message')}")
    return (MemberState.READY, "") if is_ready else (MemberState.LOADING, f"model {name} is not loaded yet")
