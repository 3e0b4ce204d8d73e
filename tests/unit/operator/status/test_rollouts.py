"""Replicas and templates: the conditions while an object changes."""

import pytest

from halimede_operator.core.snapshot import Object, PodIndex
from halimede_operator.core.spec.types import (
    Rollout,
    Workload,
)
from support.operator_pods import (
    DEADLINE,
    IMAGE,
    NEW,
    OLD,
    deployment,
    ended,
    fetch_failed,
    fetched,
    fetching,
    leaving,
    loading,
    lost_readiness,
    node_lost,
    pod,
    replica_set,
    second,
    serving,
    snapshot,
    unscheduled,
)
from support.operator_specs import model_key, model_spec, workload
from support.operator_status import LATER, NOW, TWO, conditions, message, status_for, two_serving

PAUSED = (
    "spec.paused of Deployment bert is true, so that the new spec is not rolled out; "
    "kubectl rollout resume deployment/bert lets it go on"
)
ROLLOUTS: dict[str, tuple[tuple[Object, ...], Object, str, dict[str, str]]] = {
    "the new ones come while the old ones serve": (
        (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD), fetching("bert-1-a")),
        deployment(2, generation=2, progress="ReplicaSetUpdated"),
        "0/2 replicas serving, 2 of the spec before: pod bert-1-a on node node-1 pulls its image and fetches the model",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True RollingOut",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "the old ones serve and the new ones fail": (
        (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD), fetch_failed(11, "no key", "bert-1-a")),
        deployment(2, generation=2, progress="ReplicaSetUpdated"),
        f"0/2 replicas serving, 2 of the spec before: pod bert-1-a: container fetch (image {IMAGE}): not found: no key, trying again",
        {"Ready": "False ModelFetchFailed", "Available": "True Serving", "Progressing": "True RollingOut",
         "Degraded": "True ModelFetchFailed", "Reconciling": "True ModelFetchFailed", "phase": "Degraded"},
    ),
    "and it takes too long": (
        (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD), loading("bert-1-a")),
        deployment(2, generation=2, progress="ProgressDeadlineExceeded"),
        f'0/2 replicas serving, 2 of the spec before: ReplicaSet "bert-{NEW}" has timed out progressing. pod bert-1-a on node node-1 starts the server and loads the model',
        {"Ready": "False ProgressDeadlineExceeded", "Available": "True Serving", "Progressing": "False ProgressDeadlineExceeded",
         "Degraded": "True ProgressDeadlineExceeded", "Stalled": "True ProgressDeadlineExceeded", "phase": "Degraded"},
    ),
    "the last old one is about to go": (
        (serving("bert-0-a", template=OLD), serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, progress="ReplicaSetUpdated"),
        "2/2 replicas serving, 1 of the spec before: those of the spec before are about to go",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True RollingOut",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "it has gone": (
        (leaving(serving("bert-0-a", template=OLD)), serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "phase": "Serving"},
    ),
    "no controller has seen the change yet": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, seen=1, template="9d5f7b6c88"),
        "the Deployment is not yet that of the spec",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True Applying",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "the Deployment's controller has, and its ReplicaSet has not come to us": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, template="9d5f7b6c88"),
        "the Deployment is not yet that of the spec",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True Applying",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "a first rollout with one replica that has no room": (
        (serving("bert-1-a"), unscheduled("no room", "bert-1-b")),
        deployment(2, progress="ReplicaSetUpdated"),
        "1/2 replicas serving: pod bert-1-b: no room",
        {"Ready": "False Unschedulable", "Available": "True Serving", "Progressing": "True RollingOut",
         "Degraded": "True Unschedulable", "Reconciling": "True Unschedulable", "phase": "Degraded"},
    ),
    "the Deployment has other replicas": (
        (serving("bert-1-a"),),
        deployment(1),
        "1/2 replicas serving version 1: the pods are being made",
        {"Ready": "True Serving", "Progressing": "True Applying",
         "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and no controller has seen that": (
        (serving("bert-1-a"),),
        deployment(2, generation=2, seen=1),
        "1/2 replicas serving version 1: the pods are being made",
        {"Ready": "True Serving", "Progressing": "True Applying",
         "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and the new pod loads": (
        (serving("bert-1-a"), loading("bert-1-b")),
        deployment(2, generation=2),
        "1/2 replicas serving version 1: pod bert-1-b on node node-1 starts the server and loads the model",
        {"Ready": "True Serving", "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and the new pod has no room": (
        (serving("bert-1-a"), unscheduled("no room", "bert-1-b")),
        deployment(2, generation=2),
        "1/2 replicas serving version 1: pod bert-1-b: no room",
        {"Ready": "True Serving", "Degraded": "True Unschedulable",
         "Reconciling": "True Serving", "phase": "Degraded"},
    ),
    "it is scaled from zero": (
        (loading("bert-1-a"), loading("bert-1-b")),
        deployment(2, generation=2),
        "0/2 replicas serving: pod bert-1-a on node node-1 starts the server and loads the model",
        {"Ready": "False Loading", "Available": "False Loading", "Progressing": "False Complete",
         "Reconciling": "True Loading", "phase": "Loading"},
    ),
    "one of two is lost with its node": (
        (serving("bert-1-a"), node_lost("bert-1-b")),
        deployment(2),
        "1/2 replicas serving version 1: pod bert-1-b: its node node-1 does not answer.",
        {"Ready": "True Serving", "Degraded": "True NodeLost",
         "Reconciling": "True Serving", "phase": "Degraded"},
    ),
    "none of two is left": (
        (fetch_failed(11, "no key", "bert-1-a"), node_lost("bert-1-b")),
        deployment(2),
        f"0/2 replicas serving: pod bert-1-a: container fetch (image {IMAGE}): not found: no key, trying again",
        {"Ready": "False ModelFetchFailed", "Available": "False ModelFetchFailed", "Progressing": "False Complete",
         "Reconciling": "True ModelFetchFailed", "phase": "Failed"},
    ),
    "a user paused it before a new spec": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, progress="DeploymentPaused", template="9d5f7b6c88", is_paused=True),
        PAUSED,
        {"Ready": "False RolloutPaused", "Available": "True Serving", "Progressing": "False RolloutPaused",
         "Degraded": "True RolloutPaused", "Stalled": "True RolloutPaused", "phase": "Degraded"},
    ),
    "a user paused it halfway": (
        (serving("bert-0-a", template=OLD), serving("bert-1-a")),
        deployment(2, generation=2, progress="DeploymentPaused", is_paused=True),
        f"1/2 replicas serving, 1 of the spec before: {PAUSED}",
        {"Ready": "False RolloutPaused", "Available": "True Serving", "Progressing": "False RolloutPaused",
         "Degraded": "True RolloutPaused", "Stalled": "True RolloutPaused", "phase": "Degraded"},
    ),
    "a user paused it, and it has nothing to do": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, progress="DeploymentPaused", is_paused=True),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "phase": "Serving"},
    ),
    "a pod more than wanted that fails does not matter": (
        (serving("bert-1-a"), serving("bert-1-b"), unscheduled("no room", "bert-1-c")),
        deployment(2),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "phase": "Serving"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLLOUTS)
def test_a_rollout(case: str):
    pods, child, text, expected = ROLLOUTS[case]
    status = status_for(
        snapshot(model_key(), *pods, child=child, replica_sets=(replica_set(OLD, 9), replica_set(NEW, 10)))
    )

    found = conditions(status)
    kept = {"Ready", "Available", "Progressing", "Degraded", "Reconciling", "Stalled"}
    assert {**{type_: state for type_, state in found.items() if type_ in kept}, "phase": status["phase"]} == expected
    assert message(status) == text


def test_a_postponed_rollout_is_not_reported_as_complete():
    status = status_for(two_serving(), TWO, is_postponed=True)
    found = conditions(status)
    assert (found["Ready"], found["Progressing"]) == ("False Progressing", "True Applying")
    assert found["Available"] == "True Serving"


def test_a_rollback_makes_the_old_template_the_newest_one():
    sets = (replica_set(OLD, 11), replica_set(NEW, 10))
    pods = (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD))
    status = status_for(snapshot(model_key(), *pods, child=deployment(2, template=OLD), replica_sets=sets))

    assert conditions(status)["Ready"] == "True Serving"
    assert status["current"]["templateHash"] == OLD


def test_a_paused_deployment_stays_ready_while_one_replica_serves():
    paused = deployment(2, progress="DeploymentPaused", is_paused=True)
    pods = (serving("bert-1-a"), lost_readiness("bert-1-b"))
    before = status_for(two_serving())

    assert conditions(status_for(snapshot(model_key(), *pods, child=paused, status=before)))["Ready"] == "True Serving"
    assert conditions(status_for(snapshot(model_key(), *pods, child=paused)))["Ready"] == "False ProbeFailed"


def test_a_rollout_that_the_spec_pauses_names_the_field():
    spec = model_spec(workload=workload(replicas=2, rollout=Rollout(paused=True)))
    paused = deployment(2, generation=2, progress="DeploymentPaused", template=OLD, is_paused=True)
    pods = (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD))
    status = status_for(snapshot(model_key(), *pods, child=paused), spec)

    assert conditions(status)["Progressing"] == "False RolloutPaused"
    assert message(status, "Progressing") == (
        "spec.rollout.paused is true, so that the new spec is not rolled out; false lets it go on"
    )


def test_readiness_of_an_old_template_does_not_count_for_a_new_one():
    before = status_for(two_serving()) | {"current": {"templateHash": OLD, "versions": [1]}}
    silent = {name: PodIndex(error="timed out") for name in ("bert-1-a", "bert-1-b")}

    assert conditions(status_for(two_serving(status=before, indexes=silent)))["Ready"] == "Unknown IndexUnreachable"


def test_a_replica_failing_after_a_rollout_is_not_progressing():
    status = status_for(snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=deployment(2)))
    rolling = deployment(2, progress="ReplicaSetUpdated")
    other = status_for(snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=rolling))

    assert "Progressing" not in conditions(status)
    assert (conditions(other)["Progressing"], message(other, "Progressing")) == (
        "True RollingOut",
        "1/2 replicas of the newest spec serving",
    )


def test_a_failure_past_the_deadline_is_stalled_with_its_reason():
    late = deployment(2, progress="ProgressDeadlineExceeded")
    status = status_for(snapshot(model_key(), fetch_failed(11, "no key", "bert-1-a"), child=late))

    found = conditions(status)
    assert (found["Ready"], found["Stalled"]) == ("False ModelFetchFailed", "True ProgressDeadlineExceeded")
    assert "Reconciling" not in found


LATE = deployment(2, progress="ProgressDeadlineExceeded")


@pytest.mark.parametrize(
    ("pod_", "ready", "stalled"),
    [
        (fetching(), "False Fetching", None),
        (fetching(last=ended(16, "the store answers again")), "False Fetching", None),
        (fetching(last=ended(15, "no route")), "False ModelFetchFailed", "True ProgressDeadlineExceeded"),
        (pod(), "False ProgressDeadlineExceeded", "True ProgressDeadlineExceeded"),
        (loading(), "False ProgressDeadlineExceeded", "True ProgressDeadlineExceeded"),
        (pod(fetch=fetched(finished=DEADLINE - 299)), "False Loading", None),
        (
            pod(fetch=fetched(finished=DEADLINE - 300)),
            "False ProgressDeadlineExceeded",
            "True ProgressDeadlineExceeded",
        ),
    ],
)
def test_a_long_fetch_is_not_stalled(pod_: Object, ready: str, stalled: str | None):
    found = conditions(status_for(snapshot(model_key(), pod_, child=LATE), now=second(DEADLINE + 300)))

    assert (found["Ready"], found.get("Stalled")) == (ready, stalled)
    assert found["Progressing"] == ("False ProgressDeadlineExceeded" if stalled else "True RollingOut")


IDLE = {
    "suspended": (Workload(replicas=2, suspend=True), "Suspended", "spec.suspend is true: there are no replicas"),
    "scaled to zero": (Workload(replicas=0), "ScaledToZero", "spec.replicas is 0"),
}


@pytest.mark.parametrize("case", IDLE)
def test_an_object_with_zero_replicas_is_not_ready_and_at_rest(case: str):
    workload, reason, text = IDLE[case]
    status = status_for(snapshot(model_key(), child=deployment(0)), model_spec(workload=workload))

    assert conditions(status) == {"Ready": f"False {reason}", "Accepted": "True Valid"}
    assert (message(status), status["phase"], status["replicas"]) == (text, "Suspended", 0)


def test_scaling_down_is_reported_until_all_pods_are_gone():
    status = status_for(
        snapshot(model_key(), serving("bert-1-a"), child=deployment(0)), model_spec(workload=Workload(replicas=0))
    )

    found = conditions(status)
    assert (found["Progressing"], found["Reconciling"]) == ("True ScalingDown", "True ScaledToZero")


def test_an_object_being_deleted_is_reported_as_deleting():
    seen = two_serving()
    seen.object["metadata"]["deletionTimestamp"] = NOW

    assert conditions(status_for(seen))["Ready"] == "False Deleting"


def test_transition_times_change_only_with_the_status():
    before = status_for(two_serving())
    lost = snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=deployment(2), status=before)
    after = status_for(lost, now=LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in after["conditions"]}

    assert times == {"Ready": NOW, "ModelLoaded": LATER, "Degraded": LATER, "Reconciling": LATER}


def test_an_unobserved_generation_is_reconciling_with_zero_replicas():
    status = status_for(
        snapshot(model_key(), child=deployment(0, generation=2, seen=1)), model_spec(workload=Workload(replicas=0))
    )

    assert conditions(status)["Reconciling"] == "True ScaledToZero"
