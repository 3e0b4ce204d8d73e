"""The state of an ensemble's steps and of the InferenceModels that they use."""

from dataclasses import dataclass
from enum import StrEnum

from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.pods.view import FetchedModel
from halimede_operator.core.reading import clean, condition, integer_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import EnsembleSpec


class MemberState(StrEnum):
    """States of a member, worst first."""

    MISSING = "Missing"
    INVALID = "Invalid"
    LOADING = "Loading"
    READY = "Ready"


@dataclass(frozen=True, slots=True)
class Member:
    """One InferenceModel that an ensemble uses."""

    name: str
    """Of the InferenceModel."""
    steps: tuple[str, ...]
    state: MemberState
    message: str
    fetched: FetchedModel | None


def members_of(observed: Observed, spec: EnsembleSpec) -> tuple[Member, ...]:
    """The members of an ensemble, in the order in which the steps name them."""
    steps: dict[str, list[str]] = {}
    for step in spec.steps:
        steps.setdefault(step.model, []).append(step.name)
    return tuple(_member(observed, name, tuple(names)) for name, names in steps.items())


def _member(observed: Observed, name: str, steps: tuple[str, ...]) -> Member:
    object_ = observed.subject.snapshot.members.get(name)
    served = text_at(object_, "spec", "model", "name") or name
    pods = observed.serving or tuple(pod for pod in observed.newest if not pod.is_unknown)
    ready = [pod.versions(served) for pod in pods]
    is_ready = bool(ready) and bool(frozenset.intersection(*ready))
    fetched = (model for pod in pods for model in pod.fetched if model.name in {name, served})
    state, message = _state(name, object_, is_ready)
    return Member(name, steps, state, message, next(fetched, None))


def _state(name: str, object_: Object | None, is_ready: bool) -> tuple[MemberState, str]:
    if object_ is None:
        return MemberState.MISSING, f"InferenceModel {name} does not exist"
    accepted = condition(object_, "Accepted")
    is_current = integer_at(object_, "status", "observedGeneration") == integer_at(object_, "metadata", "generation")
    # What else is not accepted concerns the model's own pods, and not those of the ensemble.
    if accepted.get("reason") == "InvalidSpec" and is_current:
        return MemberState.INVALID, clean(f"InferenceModel {name}: {text_at(accepted, 'message')}")
    return (MemberState.READY, "") if is_ready else (MemberState.LOADING, f"model {name} is not loaded yet")
