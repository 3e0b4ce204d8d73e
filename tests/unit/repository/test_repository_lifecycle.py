from itertools import product

import pytest

from halimede.core.repository.lifecycle import NEXT, Event, next_state, reason
from halimede.core.types import ErrorCode, InferenceError, ModelReadyState

UNKNOWN, LOADING, READY = ModelReadyState.UNKNOWN, ModelReadyState.LOADING, ModelReadyState.READY
UNLOADING, UNAVAILABLE = ModelReadyState.UNLOADING, ModelReadyState.UNAVAILABLE


def walk(*events: Event, start: ModelReadyState = UNKNOWN) -> list[ModelReadyState]:
    states = [start]
    for event in events:
        states.append(next_state(states[-1], event))
    return states[1:]


def test_a_version_is_loaded_served_and_unloaded():
    assert walk(Event.LOAD, Event.LOADED, Event.UNLOAD, Event.UNLOADED) == [LOADING, READY, UNLOADING, UNAVAILABLE]


def test_a_version_that_failed_can_be_loaded_again():
    assert walk(Event.LOAD, Event.FAILED, Event.LOAD, Event.LOADED) == [LOADING, UNAVAILABLE, LOADING, READY]


def test_version_continues_to_serve_when_its_reload_fails():
    assert walk(Event.RELOAD_FAILED, Event.UNLOAD, Event.UNLOADED, start=READY) == [READY, UNLOADING, UNAVAILABLE]


def test_every_transient_state_can_be_left():
    assert {state for state, _ in NEXT} == set(ModelReadyState)


@pytest.mark.parametrize(
    ("state", "event"), [pair for pair in product(ModelReadyState, Event) if pair not in NEXT], ids=str
)
def test_any_other_transition_is_an_internal_error(state: ModelReadyState, event: Event):
    with pytest.raises(InferenceError) as raised:
        next_state(state, event)

    assert raised.value.code is ErrorCode.INTERNAL
    assert raised.value.message.startswith(
        f"a model version in state {state.value} cannot take {event.name}, expected one of "
    )


def test_error_names_the_expected_events():
    with pytest.raises(InferenceError) as raised:
        next_state(LOADING, Event.UNLOAD)

    assert raised.value.message == (
        "a model version in state LOADING cannot take UNLOAD, expected one of LOADED, FAILED"
    )


def test_reasons_describe_the_event():
    cause = InferenceError(ErrorCode.NOT_FOUND, "no file model.onnx")

    assert {event: reason(event, cause) for event in Event} == {
        Event.LOAD: "",
        Event.LOADED: "",
        Event.FAILED: "Not found: no file model.onnx",
        Event.RELOAD_FAILED: "reload failed, the loaded one keeps serving: Not found: no file model.onnx",
        Event.UNLOAD: "",
        Event.UNLOADED: "unloaded",
    }
    assert reason(Event.FAILED) == "unknown cause"


def test_a_reason_is_bounded():
    assert len(reason(Event.FAILED, InferenceError(ErrorCode.INTERNAL, "x" * 100_000))) == 4096 + 3
