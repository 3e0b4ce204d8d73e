"""Causes that only events, or no status at all, report: volumes, pull secrets, a scheduler that does not run."""

import pytest

from halimede_operator.core.snapshot import Object
from support.operator_pods import (
    deployment,
    leaving,
    pod,
    second,
    serving,
    snapshot,
    stopped,
    unscheduled,
    waiting,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import NAME, NOW, SERVER, condition_state, ready_state, status_for

SETUP = 'MountVolume.SetUp failed for volume "%s" : %s'
SUMMARY = (
    "Unable to attach or mount volumes: unmounted volumes=[keys], unattached volumes=[], "
    "failed to process volumes=[]: context deadline exceeded"
)
NO_SECRET, NO_MAP = 'secret "keys" not found', 'configmap "corp-ca" not found'
MOUNTS = {
    "a Secret": ([(1, SETUP % ("keys", NO_SECRET))], "SecretMissing", SETUP % ("keys", NO_SECRET)),
    "a ConfigMap": ([(1, SETUP % ("ca", NO_MAP))], "ConfigMapMissing", SETUP % ("ca", NO_MAP)),
    "a key": (
        [(1, SETUP % ("ca", "references non-existent config key: ca.crt"))],
        "VolumeMountFailed",
        SETUP % ("ca", "references non-existent config key: ca.crt"),
    ),
    "several, of which one is reported": (
        [(1, SETUP % ("ca", NO_MAP)), (1, SETUP % ("keys", NO_SECRET))],
        "SecretMissing",
        SETUP % ("keys", NO_SECRET),
    ),
    "of a volume the last": (
        [(2, SETUP % ("keys", NO_SECRET)), (3, SETUP % ("keys", "references non-existent secret key: TOKEN"))],
        "VolumeMountFailed",
        SETUP % ("keys", "references non-existent secret key: TOKEN"),
    ),
    "a volume that is no longer tried is over": (
        [(1, SETUP % ("keys", NO_SECRET)), (152, SETUP % ("ca", NO_MAP))],
        "ConfigMapMissing",
        SETUP % ("ca", NO_MAP),
    ),
    "a cause before a summary": (
        [(1, SETUP % ("ca", "no such host")), (124, SUMMARY)],
        "VolumeMountFailed",
        SETUP % ("ca", "no such host"),
    ),
    "only a summary event": ([(124, SUMMARY)], "VolumeMountFailed", SUMMARY),
}


def events_of_mounts(*reported: tuple[int, str]) -> dict[str, tuple[Object, ...]]:
    events = ({"reason": "FailedMount", "lastTimestamp": second(at), "message": message} for at, message in reported)
    return {f"uid-{NAME}": tuple(events)}


@pytest.mark.parametrize("case", MOUNTS)
@pytest.mark.parametrize("turn", [1, -1])
def test_failed_mounts_are_reported_from_kubelet_events(case: str, turn: int):
    reported, reason, message = MOUNTS[case]
    events = events_of_mounts(*reported[::turn])
    seen = snapshot(model_key(), pod(has_sandbox=False), child=deployment(), kubelet_events=events)

    status = status_for(seen, model_spec())

    assert ready_state(status) == ("False", reason, f"0/1 replicas serving: pod {NAME}: {message}")
    assert condition_state(status, "ModelFetched") == ("False", reason)
    assert status["lastFailure"] == {"reason": reason, "message": f"pod {NAME}: {message}", "pod": NAME, "time": NOW}


def test_a_failed_mount_is_not_reported_once_it_succeeded():
    """Events exist for an hour."""
    events = events_of_mounts((1, SETUP % ("keys", NO_SECRET)))
    reasons = [
        ready_state(status_for(snapshot(model_key(), each, child=deployment(), kubelet_events=events), model_spec()))[1]
        for each in (pod(has_sandbox=False), pod(), serving(), leaving(pod(has_sandbox=False)))
    ]
    assert reasons == ["SecretMissing", "Fetching", "Serving", "Pending"]


@pytest.mark.parametrize(
    ("lasted_s", "reason"), [(None, "Fetching"), (0, "Fetching"), (9, "Fetching"), (10, "VolumeMountFailed")]
)
@pytest.mark.parametrize("kind", ["configmap", "secret"])
def test_an_object_that_a_kubelet_does_not_know_yet_is_not_reported(kind: str, lasted_s: int | None, reason: str):
    """Starts of healthy pods on a busy node have this for a few seconds."""
    message = SETUP % ("config", f"failed to sync {kind} cache: timed out waiting for the condition")
    event = {"reason": "FailedMount", "lastTimestamp": second(20), "message": message}
    if lasted_s is not None:
        event["firstTimestamp"] = second(20 - lasted_s)
    events = {f"uid-{NAME}": (event,)}
    seen = snapshot(model_key(), pod(has_sandbox=False), child=deployment(), kubelet_events=events)

    assert ready_state(status_for(seen, model_spec()))[1] == reason


def unseen(scheduler: str, created: int) -> Object:
    """A new pod of the API server, before a scheduler has looked at it."""
    made = pod(created=created)
    made["spec"] = {**made["spec"], "schedulerName": scheduler}
    del made["spec"]["nodeName"]
    return {**made, "status": {"phase": "Pending"}}


@pytest.mark.parametrize(("age_s", "reason"), [(9, "Scheduling"), (10, "Unschedulable"), (600, "Unschedulable")])
def test_a_scheduler_that_does_not_react_is_named(age_s: int, reason: str):
    made = snapshot(model_key(), unseen("nobody", 100), child=deployment())

    status = status_for(made, model_spec(), now=second(100 + age_s))

    assert ready_state(status)[1] == reason
    expected = f"pod {NAME}: no scheduler has looked at it: its schedulerName is 'nobody'; does that scheduler run?"
    assert (reason == "Scheduling") or ready_state(status)[2] == f"0/1 replicas serving: {expected}"


def test_a_scheduler_that_has_reacted_is_not_reported():
    made = unscheduled("0/2 nodes are available.")

    assert (
        "schedulerName" not in ready_state(status_for(snapshot(model_key(), made, child=deployment()), model_spec()))[2]
    )


NO_SECRETS = (
    "Unable to retrieve some image pull secrets (registry, other); attempting to pull the image may not succeed."
)
PULL_SECRETS = {
    "reported lately": ([(100, NO_SECRETS)], "; the node cannot read the pull secrets registry, other: are they in the pod's namespace?"),
    "reported long ago": ([(9, NO_SECRETS)], ""),
    "reported of others later": (
        [(100, NO_SECRETS), (110, NO_SECRETS.replace("registry, other", "third"))],
        "; the node cannot read the pull secrets third: are they in the pod's namespace?",
    ),
    "other words": ([(100, "no")], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", PULL_SECRETS)
def test_a_missing_pull_secret_is_named_beside_the_failed_pull(case: str):
    reported, hint = PULL_SECRETS[case]
    events = tuple(
        {"reason": "FailedToRetrieveImagePullSecret", "lastTimestamp": second(at), "message": text}
        for at, text in reported
    )
    seen = snapshot(
        model_key(),
        stopped(waiting("ErrImagePull", "pull access denied")),
        child=deployment(),
        kubelet_events={f"uid-{NAME}": events},
    )

    status = status_for(seen, model_spec(), now=second(370))

    expected = f"0/1 replicas serving: {SERVER}: pull access denied{hint}"
    assert ready_state(status) == ("False", "ImagePullFailed", expected)


def test_malformed_events_are_ignored():
    events = {
        f"uid-{NAME}": (
            {"message": 7},
            {"lastTimestamp": "soon", "message": NO_SECRET, "reason": "FailedMount"},
            {},
            {"reason": []},
        )
    }
    seen = snapshot(model_key(), pod(has_sandbox=False), child=deployment(), kubelet_events=events)

    assert ready_state(status_for(seen, model_spec()))[1] == "SecretMissing"
