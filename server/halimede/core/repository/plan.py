"""What to load and unload: the models on disk against the models served, for one wish.

A wish to follow the repository (polling) is one more member of `Wish` and one more case: it compares everything.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

Fingerprint = Hashable
"""Equal as long as nothing in a model's directory changed."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Load what is wanted when the server starts; `names` None means every model that there is."""

    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class LoadModel:
    name: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    name: str


Wish = Startup | LoadModel | UnloadModel


@dataclass(frozen=True, slots=True)
class Load:
    """Load the model, or reload it if it is served. `fingerprint` is what is then served."""

    name: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Unload:
    name: str


@dataclass(frozen=True, slots=True)
class Missing:
    """The model is wanted and not on disk. What is served under the name stays."""

    name: str
    error: InferenceError


Step = Load | Unload | Missing


def plan(entries: Mapping[str, Fingerprint], loaded: Mapping[str, Fingerprint], wish: Wish) -> tuple[Step, ...]:
    """The steps that fulfil the wish, sorted by name; none where it is fulfilled already.

    Unloading what is not loaded is fulfilled already, known name or not.
    """
    match wish:
        case Startup(names):
            wanted = entries.keys() if names is None else set(names)
            return tuple(step for name in sorted(wanted) for step in _load(entries, loaded, name))
        case LoadModel(name):
            return _load(entries, loaded, name)
        case UnloadModel(name):
            return (Unload(name),) if name in loaded else ()


def _load(entries: Mapping[str, Fingerprint], loaded: Mapping[str, Fingerprint], name: str) -> tuple[Step, ...]:
    if name not in entries:
        # Scripts look for the first half of this text; the second is the reason, which Triton keeps in its log.
        text = (
            f"failed to load '{clip(name)}', failed to poll from model repository: "
            "no repository has a model directory of that name"
        )
        return (Missing(name, InferenceError(ErrorCode.INTERNAL, text)),)
    fingerprint = entries[name]
    if name in loaded and loaded[name] == fingerprint:
        return ()
    return (Load(name, fingerprint),)
