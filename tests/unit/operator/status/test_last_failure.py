"""The last failure of an object, which is kept after it recovered."""

from support.operator_pods import (
    IMAGE,
    deployment,
    ended,
    fetch_failed,
    serving,
    snapshot,
    stopped,
)
from support.operator_specs import model_key
from support.operator_status import LATER, NOW, conditions, status_for, two_serving


def test_a_failure_is_remembered_after_recovery():
    failed = status_for(snapshot(model_key(), fetch_failed(11, "no key", "bert-1-a"), child=deployment(2)))
    recovered = status_for(two_serving(status=failed), now=LATER)

    assert failed["lastFailure"] == {
        "reason": "ModelFetchFailed",
        "message": f"pod bert-1-a: container fetch (image {IMAGE}): not found: no key, trying again",
        "pod": "bert-1-a",
        "container": "fetch",
        "exitCode": 11,
        "time": "2026-11-22T09:00:06Z",
    }
    assert recovered["lastFailure"] == failed["lastFailure"]


def test_a_restart_between_two_reconciles_is_remembered():
    crash = ended(137, "Killed", reason="OOMKilled", started=5, finished=50)
    pods = (serving("bert-1-a", since=60, last=crash), serving("bert-1-b"))
    status = status_for(snapshot(model_key(), *pods, child=deployment(2)))

    assert conditions(status)["Ready"] == "True Serving"
    assert (status["lastFailure"]["reason"], status["lastFailure"]["time"]) == ("OutOfMemory", "2026-11-22T09:00:50Z")


def test_an_older_restart_does_not_hide_a_newer_failure():
    crash = ended(137, "Killed", reason="OOMKilled", started=5, finished=50)
    newer = {"reason": "Unschedulable", "message": "no room", "time": NOW}
    pods = (serving("bert-1-a", since=60, last=crash), serving("bert-1-b"))
    status = status_for(snapshot(model_key(), *pods, child=deployment(2), status={"lastFailure": newer}))

    assert status["lastFailure"] == newer


def test_a_failure_without_a_time_keeps_the_time_of_its_first_report():
    pulling = stopped({"waiting": {"reason": "ErrImagePull", "message": "no such host"}}, "bert-1-a")
    first = status_for(snapshot(model_key(), pulling, child=deployment(2)))
    second = status_for(snapshot(model_key(), pulling, child=deployment(2), status=first), now=LATER)

    assert (first["lastFailure"]["time"], second["lastFailure"]["time"]) == (NOW, NOW)


def test_an_exit_code_that_the_schema_does_not_allow_is_left_out():
    status = status_for(snapshot(model_key(), stopped(ended(10**20, "no config")), child=deployment()))
    assert "exitCode" not in status["lastFailure"]
