from itertools import product

import pytest

from halimede.core.repository.lifecycle import NEXT, VersionEvent, next_state, reason
from halimede.core.types import ErrorCode, InferenceError, ModelReadyState
from support.refusals import error_of

UNKNOWN, LOADING, READY = ModelReadyState.UNKNOWN, ModelReadyState.LOADING, ModelReadyState.READY
UNLOADING, UNAVAILABLE = ModelReadyState.UNLOADING, ModelReadyState.UNAVAILABLE


def walk(*events: VersionEvent, start: ModelReadyState = UNKNOWN) -> list[ModelReadyState]:
    states = [start]
    for event in events:
        states.append(next_state(states[-1], event))
    return states[1:]


def test_a_version_is_loaded_served_and_unloaded():
    assert walk(VersionEvent.LOAD, VersionEvent.LOADED, VersionEvent.UNLOAD, VersionEvent.UNLOADED) == [
        LOADING,
        READY,
        UNLOADING,
        UNAVAILABLE,
    ]


def test_a_version_that_failed_can_be_loaded_again():
    assert walk(VersionEvent.LOAD, VersionEvent.FAILED, VersionEvent.LOAD, VersionEvent.LOADED) == [
        LOADING,
        UNAVAILABLE,
        LOADING,
        READY,
    ]


def test_version_continues_to_serve_when_its_reload_fails():
    assert walk(VersionEvent.RELOAD_FAILED, VersionEvent.UNLOAD, VersionEvent.UNLOADED, start=READY) == [
        READY,
        UNLOADING,
        UNAVAILABLE,
    ]


def test_every_transient_state_can_be_left():
    assert {state for state, _ in NEXT} == set(ModelReadyState)


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in product(ModelReadyState, VersionEvent) if pair not in NEXT], ids=str
)
def test_any_other_transition_is_an_internal_error(state: ModelReadyState, event: VersionEvent):
    error = error_of(next_state, state, event)

    assert error.code is ErrorCode.INTERNAL
    assert error.message.startswith(
        f"a model version in state {state.value} cannot take {event.name}, expected one of "
    )


def test_error_names_the_expected_events():
    assert error_of(next_state, LOADING, VersionEvent.UNLOAD).message == (
        "a model version in state LOADING cannot take UNLOAD, expected one of LOADED, FAILED"
    )


def test_reasons_describe_the_event():
    cause = InferenceError(ErrorCode.NOT_FOUND, "no file model.onnx")

    assert {event: reason(event, cause) for event in VersionEvent} == {
        VersionEvent.LOAD: "",
        VersionEvent.LOADED: "",
        VersionEvent.FAILED: "Not found: no file model.onnx",
        VersionEvent.RELOAD_FAILED: "reload failed, the loaded one keeps serving: Not found: no file model.onnx",
        VersionEvent.UNLOAD: "",
        VersionEvent.UNLOADED: "unloaded",
    }
    assert reason(VersionEvent.FAILED) == "unknown cause"


def test_a_reason_is_bounded():
    assert len(reason(VersionEvent.FAILED, InferenceError(ErrorCode.INTERNAL, "x" * 100_000))) == 4096 + 3
