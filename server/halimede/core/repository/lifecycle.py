"""The states of a loaded model version, and their reasons in the repository index.

One state belongs to one load of one version. During a reload two loads of the same version exist: the serving
one stays READY, the new one is LOADING, and the index shows the serving one. Only the transitions in `NEXT`
exist, so that no version can be stuck: LOADING ends by LOADED or FAILED, UNLOADING by UNLOADED.
"""

from enum import Enum

from halimede.core.types import InferenceError, ModelReadyState, internal

MAX_REASON_CHARACTERS = 4096


class VersionEvent(Enum):
    """An event in the life of a version."""

    LOAD = "load"
    LOADED = "loaded"
    FAILED = "failed"
    RELOAD_FAILED = "reload failed"
    UNLOAD = "unload"
    UNLOADED = "unloaded"


NEXT = {
    (ModelReadyState.UNKNOWN, VersionEvent.LOAD): ModelReadyState.LOADING,
    (ModelReadyState.UNAVAILABLE, VersionEvent.LOAD): ModelReadyState.LOADING,
    (ModelReadyState.LOADING, VersionEvent.LOADED): ModelReadyState.READY,
    (ModelReadyState.LOADING, VersionEvent.FAILED): ModelReadyState.UNAVAILABLE,
    # The serving load continues to serve if the reload fails.
    (ModelReadyState.READY, VersionEvent.RELOAD_FAILED): ModelReadyState.READY,
    (ModelReadyState.READY, VersionEvent.UNLOAD): ModelReadyState.UNLOADING,
    (ModelReadyState.UNLOADING, VersionEvent.UNLOADED): ModelReadyState.UNAVAILABLE,
}


def next_state(state: ModelReadyState, event: VersionEvent) -> ModelReadyState:
    """The state after the event; InferenceError INTERNAL if the event cannot happen in this state."""
    following = NEXT.get((state, event))
    if following is None:
        expected = ", ".join(e.name for (s, e) in NEXT if s is state)
        raise internal(f"a model version in state {state.value} cannot take {event.name}, expected one of {expected}")
    return following


def reason(event: VersionEvent, cause: InferenceError | None = None) -> str:
    """The reason in the index after the event; "" for none. `cause` belongs to FAILED and RELOAD_FAILED."""
    match event:
        case VersionEvent.FAILED | VersionEvent.RELOAD_FAILED:
            cause_text = f"{cause.code.value}: {cause.message}" if cause is not None else "unknown cause"
            text = (
                cause_text
                if event is VersionEvent.FAILED
                else f"reload failed, the loaded one keeps serving: {cause_text}"
            )
        case VersionEvent.UNLOADED:
            text = event.value
        case _:
            text = ""
    return text if len(text) <= MAX_REASON_CHARACTERS else text[:MAX_REASON_CHARACTERS] + "..."
