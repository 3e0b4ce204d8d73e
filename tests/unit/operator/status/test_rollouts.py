"""Replicas, templates and times: the status while an object changes, and that it stays equal while nothing changes."""

import json
from dataclasses import replace

import pytest

from halimede_operator.core.api.conditions import Condition, merged
from halimede_operator.core.api.spec import (
    Accelerator,
    AcceleratorType,
    Key,
    Kind,
    Problem,
    Serving,
    Spec,
    Workload,
)
from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.diff import Conflict
from halimede_operator.core.snapshot import Object, PodIndex, Snapshot
from halimede_operator.core.status import ApplyFailure, status_of
from support.operator_pods import (
    DEADLINE,
    DIGEST,
    FETCHED_MODEL,
    IMAGE,
    NEW,
    OLD,
    deployment,
    ended,
    fetch_failed,
    fetched,
    fetching,
    index,
    leaving,
    loading,
    lost_readiness,
    node_lost,
    pod,
    replica_set,
    second,
    serving,
    snapshot,
    stopped,
    unscheduled,
)
from support.operator_specs import ensemble_key, model_key, model_spec, search_spec

NOW, LATER = "2026-11-22T10:00:00Z", "2026-11-22T11:00:00Z"
TWO = model_spec(workload=Workload(replicas=2))
PROBLEM = Problem("spec.model.uri", "must be a URI")


def told(seen: Snapshot, spec: Spec | None = TWO, *, now: str = NOW, **obstacles: object) -> Object:
    given = {"problems": (), "failures": (), "conflicts": (), **obstacles}
    return status_of(seen, spec, given["problems"], given["failures"], given["conflicts"], now)


def conditions(status: Object) -> dict[str, str]:
    return {c["type"]: f"{c['status']} {c['reason']}" for c in status["conditions"]}


def message(status: Object, type_: str = "Ready") -> str:
    return next(c["message"] for c in status["conditions"] if c["type"] == type_)


def two_serving(**fields: object) -> Snapshot:
    return snapshot(model_key(), serving("bert-1-a"), serving("bert-1-b", node="node-2"), child=deployment(2), **fields)


def test_the_whole_status_of_a_model_that_serves():
    spec = model_spec(
        format="onnx",
        workload=Workload(replicas=2, accelerator=Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb")),
    )

    assert told(two_serving(generation=3), spec) == {
        "observedGeneration": 3,
        "conditions": [
            {"type": type_, "status": status, "reason": reason, "message": text, "observedGeneration": 3, "lastTransitionTime": NOW}
            for type_, status, reason, text in (
                ("Accepted", "True", "Valid", "the spec is valid"),
                ("ModelFetched", "True", "Fetched", "every replica has the model's files"),
                ("Placed", "True", "Scheduled", "every replica has a node"),
                ("ModelLoaded", "True", "Loaded", "every replica has loaded version 1"),
                ("Available", "True", "Serving", "2 replicas serving"),
                ("Progressing", "False", "Complete", "all pods are of the newest spec"),
                ("Degraded", "False", "AsExpected", "no replica fails beside others that serve"),
                ("Ready", "True", "Serving", "2/2 replicas serving version 1"),
            )
        ],
        "phase": "Serving",
        "url": "http://bert.prod.svc:8000/v2/models/bert",
        "addresses": [
            {"type": "http", "value": "http://bert.prod.svc:8000"},
            {"type": "grpc", "value": "bert.prod.svc:8001"},
        ],
        "replicas": 2,
        "readyReplicas": 2,
        "desiredReplicas": 2,
        "selector": "halimede.dev/model=bert",
        "current": {"versions": [1], "templateHash": NEW, "image": IMAGE},
        "effective": {"format": "onnx", "resourceName": "nvidia.com/mig-1g.10gb", "serverImage": IMAGE},
        "model": {"digest": DIGEST, "sizeBytes": 438, "fetchedAt": "2026-11-22T09:00:04Z"},
        "placements": [{"pod": "bert-1-a", "node": "node-1"}, {"pod": "bert-1-b", "node": "node-2"}],
    }  # fmt: skip


def test_without_http_there_is_no_url():
    spec = model_spec(workload=Workload(serving=Serving(http=False, grpc_port=9001)))
    status = told(snapshot(model_key(), child=deployment()), spec)

    assert "url" not in status
    assert status["addresses"] == [{"type": "grpc", "value": "bert.prod.svc:9001"}]


def test_versions_are_those_that_every_ready_pod_serves():
    indexes = {
        "bert-1-a": index(("bert", "10", "READY", ""), ("bert", "2", "READY", ""), ("bert", "1", "READY", ""), ("x", "7", "READY", "")),
        "bert-1-b": index(("bert", "2", "READY", ""), ("bert", "10", "READY", ""), ("bert", "x", "READY", "")),
    }  # fmt: skip
    status = told(two_serving(indexes=indexes))

    assert status["current"]["versions"] == [2, 10]
    assert message(status) == "2/2 replicas serving versions 2, 10"


PAUSED = (
    "spec.paused of Deployment bert is true, so that the new spec is not rolled out; "
    "kubectl rollout resume deployment/bert lets it go on"
)
ROLLOUTS: dict[str, tuple[tuple[Object, ...], Object, str, dict[str, str]]] = {
    "the new ones come while the old ones serve": (
        (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD), fetching("bert-1-a")),
        deployment(2, generation=2, progress="ReplicaSetUpdated"),
        "0/2 replicas serving, 2 of the spec before: pod bert-1-a on node node-1 pulls its image and fetches the model",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True RollingOut", "Degraded": "False AsExpected",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "the old ones serve and the new ones fail": (
        (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD), fetch_failed(11, "no key", "bert-1-a")),
        deployment(2, generation=2, progress="ReplicaSetUpdated"),
        f"0/2 replicas serving, 2 of the spec before: pod bert-1-a: container fetch (image {IMAGE}): not found: no key",
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
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True RollingOut", "Degraded": "False AsExpected",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "it has gone": (
        (leaving(serving("bert-0-a", template=OLD)), serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected", "phase": "Serving"},
    ),
    "nobody has looked at the change yet": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, seen=1, template="9d5f7b6c88"),
        "the Deployment is not yet that of the spec",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True Applying", "Degraded": "False AsExpected",
         "Reconciling": "True Progressing", "phase": "Serving"},
    ),
    "the Deployment's controller has, and its ReplicaSet has not come to us": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, template="9d5f7b6c88"),
        "the Deployment is not yet that of the spec",
        {"Ready": "False Progressing", "Available": "True Serving", "Progressing": "True Applying", "Degraded": "False AsExpected",
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
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "True Applying", "Degraded": "False AsExpected",
         "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and nobody has looked at that": (
        (serving("bert-1-a"),),
        deployment(2, generation=2, seen=1),
        "1/2 replicas serving version 1: the pods are being made",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "True Applying", "Degraded": "False AsExpected",
         "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and the new pod loads": (
        (serving("bert-1-a"), loading("bert-1-b")),
        deployment(2, generation=2),
        "1/2 replicas serving version 1: pod bert-1-b on node node-1 starts the server and loads the model",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected",
         "Reconciling": "True Serving", "phase": "Serving"},
    ),
    "it is scaled, and the new pod has no room": (
        (serving("bert-1-a"), unscheduled("no room", "bert-1-b")),
        deployment(2, generation=2),
        "1/2 replicas serving version 1: pod bert-1-b: no room",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "True Unschedulable",
         "Reconciling": "True Serving", "phase": "Degraded"},
    ),
    "it is scaled from zero": (
        (loading("bert-1-a"), loading("bert-1-b")),
        deployment(2, generation=2),
        "0/2 replicas serving: pod bert-1-a on node node-1 starts the server and loads the model",
        {"Ready": "False Loading", "Available": "False Loading", "Progressing": "False Complete", "Degraded": "False AsExpected",
         "Reconciling": "True Loading", "phase": "Loading"},
    ),
    "one of two is lost with its node": (
        (serving("bert-1-a"), node_lost("bert-1-b")),
        deployment(2),
        "1/2 replicas serving version 1: pod bert-1-b: its node node-1 does not answer.",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "True NodeLost",
         "Reconciling": "True Serving", "phase": "Degraded"},
    ),
    "none of two is left": (
        (fetch_failed(11, "no key", "bert-1-a"), node_lost("bert-1-b")),
        deployment(2),
        f"0/2 replicas serving: pod bert-1-a: container fetch (image {IMAGE}): not found: no key",
        {"Ready": "False ModelFetchFailed", "Available": "False ModelFetchFailed", "Progressing": "False Complete",
         "Degraded": "False AsExpected", "Reconciling": "True ModelFetchFailed", "phase": "Failed"},
    ),
    "somebody has paused it before a new spec": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, progress="DeploymentPaused", template="9d5f7b6c88", is_paused=True),
        PAUSED,
        {"Ready": "False RolloutPaused", "Available": "True Serving", "Progressing": "False RolloutPaused",
         "Degraded": "True RolloutPaused", "Stalled": "True RolloutPaused", "phase": "Degraded"},
    ),
    "somebody has paused it halfway": (
        (serving("bert-0-a", template=OLD), serving("bert-1-a")),
        deployment(2, generation=2, progress="DeploymentPaused", is_paused=True),
        f"1/2 replicas serving, 1 of the spec before: {PAUSED}",
        {"Ready": "False RolloutPaused", "Available": "True Serving", "Progressing": "False RolloutPaused",
         "Degraded": "True RolloutPaused", "Stalled": "True RolloutPaused", "phase": "Degraded"},
    ),
    "somebody has paused it, and it has nothing to do": (
        (serving("bert-1-a"), serving("bert-1-b")),
        deployment(2, generation=2, progress="DeploymentPaused", is_paused=True),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected", "phase": "Serving"},
    ),
    "a pod more than wanted that fails does not matter": (
        (serving("bert-1-a"), serving("bert-1-b"), unscheduled("no room", "bert-1-c")),
        deployment(2),
        "2/2 replicas serving version 1",
        {"Ready": "True Serving", "Available": "True Serving", "Progressing": "False Complete", "Degraded": "False AsExpected", "phase": "Serving"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLLOUTS)
def test_a_rollout(case: str):
    pods, child, text, expected = ROLLOUTS[case]
    status = told(snapshot(model_key(), *pods, child=child, replica_sets=(replica_set(OLD, 9), replica_set(NEW, 10))))

    found = conditions(status)
    kept = {"Ready", "Available", "Progressing", "Degraded", "Reconciling", "Stalled"}
    assert {**{type_: said for type_, said in found.items() if type_ in kept}, "phase": status["phase"]} == expected
    assert message(status) == text


def test_a_postponed_rollout_is_not_reported_as_complete():
    status = status_of(two_serving(), TWO, (), (), (), NOW, is_postponed=True)
    found = conditions(status)
    assert (found["Ready"], found["Progressing"]) == ("False Progressing", "True Applying")
    assert found["Available"] == "True Serving"


def test_a_rollback_makes_the_old_template_the_newest_one():
    sets = (replica_set(OLD, 11), replica_set(NEW, 10))
    pods = (serving("bert-0-a", template=OLD), serving("bert-0-b", template=OLD))
    status = told(snapshot(model_key(), *pods, child=deployment(2, template=OLD), replica_sets=sets))

    assert conditions(status)["Ready"] == "True Serving"
    assert status["current"]["templateHash"] == OLD


def test_a_paused_deployment_stays_ready_while_one_replica_serves():
    paused = deployment(2, progress="DeploymentPaused", is_paused=True)
    pods = (serving("bert-1-a"), lost_readiness("bert-1-b"))
    before = told(two_serving())

    assert conditions(told(snapshot(model_key(), *pods, child=paused, status=before)))["Ready"] == "True Serving"
    assert conditions(told(snapshot(model_key(), *pods, child=paused)))["Ready"] == "False ProbeFailed"


def test_desired_replicas_are_reported_for_any_pods():
    one = snapshot(model_key(), serving("bert-1-a"), child=deployment(2))
    suspended = model_spec(workload=Workload(replicas=2, suspend=True))
    fields = ("replicas", "readyReplicas", "desiredReplicas")

    assert [told(one)[name] for name in fields] == [1, 1, 2]
    assert [told(one, suspended)[name] for name in fields] == [1, 1, 0]
    assert "desiredReplicas" not in told(snapshot(model_key()), None, problems=(PROBLEM,))


def test_current_describes_the_pods_that_serve():
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    pods = (serving("bert-0-a", template=OLD), fetching("bert-1-a"))
    status = told(snapshot(model_key(), *pods, child=deployment(2), replica_sets=sets))

    assert status["current"] == {"versions": [1], "templateHash": OLD, "image": IMAGE}


def test_versions_are_kept_while_no_pod_can_be_asked():
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    pods = (serving("bert-0-a", template=OLD), fetching("bert-1-a"))
    before = {"current": {"versions": [3], "templateHash": OLD}}
    seen = snapshot(
        model_key(),
        *pods,
        child=deployment(2),
        replica_sets=sets,
        status=before,
        indexes={"bert-0-a": PodIndex(error="timed out")},
    )

    assert told(seen)["current"]["versions"] == [3]


def test_readiness_of_an_old_template_does_not_count_for_a_new_one():
    before = told(two_serving()) | {"current": {"templateHash": OLD, "versions": [1]}}
    silent = {name: PodIndex(error="timed out") for name in ("bert-1-a", "bert-1-b")}

    assert conditions(told(two_serving(status=before, indexes=silent)))["Ready"] == "Unknown IndexUnreachable"


def test_a_replica_failing_after_a_rollout_is_not_progressing():
    status = told(snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=deployment(2)))
    rolling = deployment(2, progress="ReplicaSetUpdated")
    other = told(snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=rolling))

    assert conditions(status)["Progressing"] == "False Complete"
    assert (conditions(other)["Progressing"], message(other, "Progressing")) == (
        "True RollingOut",
        "1/2 replicas of the newest spec serving",
    )


def test_a_failure_past_the_deadline_is_stalled_with_its_reason():
    late = deployment(2, progress="ProgressDeadlineExceeded")
    status = told(snapshot(model_key(), fetch_failed(11, "no key", "bert-1-a"), child=late))

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
    found = conditions(told(snapshot(model_key(), pod_, child=LATE), now=second(DEADLINE + 300)))

    assert (found["Ready"], found.get("Stalled")) == (ready, stalled)
    assert found["Progressing"] == ("False ProgressDeadlineExceeded" if stalled else "True RollingOut")


IDLE = {
    "suspended": (Workload(replicas=2, suspend=True), "Suspended", "spec.suspend is true: there are no replicas"),
    "scaled to zero": (Workload(replicas=0), "ScaledToZero", "spec.replicas is 0"),
}


@pytest.mark.parametrize("case", IDLE)
def test_an_object_with_zero_replicas_is_not_ready_and_at_rest(case: str):
    workload, reason, text = IDLE[case]
    status = told(snapshot(model_key(), child=deployment(0)), model_spec(workload=workload))

    assert conditions(status) == {
        "Accepted": "True Valid",
        "ModelFetched": f"Unknown {reason}",
        "Placed": f"Unknown {reason}",
        "ModelLoaded": f"Unknown {reason}",
        "Available": f"False {reason}",
        "Progressing": f"False {reason}",
        "Degraded": "False AsExpected",
        "Ready": f"False {reason}",
    }
    assert (message(status), status["phase"], status["replicas"]) == (text, "Suspended", 0)


def test_scaling_down_is_reported_until_all_pods_are_gone():
    status = told(
        snapshot(model_key(), serving("bert-1-a"), child=deployment(0)), model_spec(workload=Workload(replicas=0))
    )

    found = conditions(status)
    assert (found["Progressing"], found["Reconciling"]) == ("True ScalingDown", "True ScaledToZero")


def test_an_object_being_deleted_is_reported_as_deleting():
    seen = two_serving()
    seen.object["metadata"]["deletionTimestamp"] = NOW

    assert conditions(told(seen))["Ready"] == "False Deleting"


OBSTACLES = {
    "problems, all of them": (
        {"problems": (PROBLEM, Problem("spec.replicas", "must not be negative"))},
        "False InvalidSpec",
        "spec.model.uri: must be a URI; spec.replicas: must not be negative",
    ),
    "a name that is taken": (
        {"conflicts": (Conflict({"kind": "Service", "metadata": {"name": "bert"}}, "Widget other"),)},
        "False Conflict",
        "Service bert exists and belongs to Widget other; rename this object, or delete what is in its way",
    ),
    "a name of nobody's": (
        {"conflicts": (Conflict({"kind": "Service", "metadata": {"name": "bert"}}, ""),)},
        "False Conflict",
        "Service bert exists and belongs to somebody else; rename this object, or delete what is in its way",
    ),
    "no right to write": (
        {"failures": (ApplyFailure("Service prod/bert", Meaning.FORBIDDEN, 'cannot patch resource "services"'),)},
        "False Forbidden",
        'Service prod/bert: cannot patch resource "services"',
    ),
    "a child that is not valid": (
        {"failures": (ApplyFailure("Deployment prod/bert", Meaning.REFUSED, "spec.template: bad"),)},
        "False ApplyRefused",
        "Deployment prod/bert: spec.template: bad",
    ),
    "a quota of children": (
        {"failures": (ApplyFailure("Service prod/bert", Meaning.OVER_QUOTA, "exceeded quota: q"),)},
        "False QuotaExceeded",
        "Service prod/bert: exceeded quota: q",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_obstacles_are_reported_as_not_accepted_and_stalled(case: str):
    obstacles, expected, text = OBSTACLES[case]
    status = told(two_serving(), None if "problems" in obstacles else TWO, **obstacles)

    found = conditions(status)
    reason = expected.split()[1]
    assert (found["Accepted"], found["Ready"], found["Stalled"]) == (expected, expected, f"True {reason}")
    assert (message(status, "Accepted"), message(status)) == (text, text)
    assert found["Degraded"] == f"True {reason}"
    assert (found["Available"], status["phase"]) == ("True Serving", "Degraded")
    assert "Reconciling" not in found


def test_missing_rights_are_degraded_even_without_pods():
    """O-11."""
    failure = ApplyFailure("Deployment prod/bert", Meaning.FORBIDDEN, 'cannot patch resource "deployments"')
    status = told(snapshot(model_key()), failures=(failure,))

    assert (conditions(status)["Degraded"], status["phase"]) == ("True Forbidden", "Failed")


def test_a_transient_failure_does_not_make_the_spec_invalid():
    status = told(two_serving(), failures=(ApplyFailure("Service prod/bert", Meaning.TRANSIENT, "timed out"),))

    found = conditions(status)
    assert (found["Accepted"], found["Ready"]) == ("True Valid", "False ApplyFailed")
    assert found["Reconciling"] == "True ApplyFailed"
    assert message(status) == "Service prod/bert: timed out; it is tried again"


def test_a_spec_with_problems_keeps_the_status_of_serving_pods():
    spec = replace(TWO, model=replace(TWO.model, format="onnx"))
    before = told(two_serving(), spec)
    after = told(two_serving(status=before, generation=2), None, problems=(PROBLEM,))

    same = ("url", "addresses", "effective", "current", "model", "placements", "readyReplicas")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}


def test_transition_times_change_only_with_the_status():
    before = told(two_serving())
    lost = snapshot(model_key(), serving("bert-1-a"), lost_readiness("bert-1-b"), child=deployment(2), status=before)
    after = told(lost, now=LATER)
    times = {c["type"]: c["lastTransitionTime"] for c in after["conditions"]}

    assert times == {
        "Accepted": NOW,
        "ModelFetched": NOW,
        "Placed": NOW,
        "ModelLoaded": LATER,
        "Available": NOW,
        "Progressing": NOW,
        "Degraded": LATER,
        "Ready": NOW,
        "Reconciling": LATER,
    }


def test_old_conditions_are_dropped_and_invalid_times_replaced():
    old = [
        {"type": "Stalled", "status": "True", "lastTransitionTime": NOW},
        {"type": "Ready", "status": "True", "lastTransitionTime": "yesterday"},
        {"type": "Placed", "status": "False", "lastTransitionTime": NOW},
    ]
    new = [Condition("Placed", "False", "Unschedulable", "no room", 2), Condition("Ready", "True", "Serving", "", 2)]

    assert [(c["type"], c["lastTransitionTime"]) for c in merged(old, new, LATER)] == [
        ("Placed", NOW),
        ("Ready", LATER),
    ]


def test_a_failure_is_remembered_after_recovery():
    failed = told(snapshot(model_key(), fetch_failed(11, "no key", "bert-1-a"), child=deployment(2)))
    recovered = told(two_serving(status=failed), now=LATER)

    assert failed["lastFailure"] == {
        "reason": "ModelFetchFailed",
        "message": f"pod bert-1-a: container fetch (image {IMAGE}): not found: no key",
        "pod": "bert-1-a",
        "container": "fetch",
        "exitCode": 11,
        "time": "2026-11-22T09:00:06Z",
    }
    assert recovered["lastFailure"] == failed["lastFailure"]


def test_a_restart_between_two_reconciles_is_remembered():
    crash = ended(137, "Killed", reason="OOMKilled", started=5, finished=50)
    pods = (serving("bert-1-a", since=60, last=crash), serving("bert-1-b"))
    status = told(snapshot(model_key(), *pods, child=deployment(2)))

    assert conditions(status)["Ready"] == "True Serving"
    assert (status["lastFailure"]["reason"], status["lastFailure"]["time"]) == ("OutOfMemory", "2026-11-22T09:00:50Z")


def test_an_older_restart_does_not_hide_a_newer_failure():
    crash = ended(137, "Killed", reason="OOMKilled", started=5, finished=50)
    newer = {"reason": "Unschedulable", "message": "no room", "time": NOW}
    pods = (serving("bert-1-a", since=60, last=crash), serving("bert-1-b"))
    status = told(snapshot(model_key(), *pods, child=deployment(2), status={"lastFailure": newer}))

    assert status["lastFailure"] == newer


def test_a_failure_without_a_time_keeps_the_time_of_its_first_report():
    pulling = stopped({"waiting": {"reason": "ErrImagePull", "message": "no such host"}}, "bert-1-a")
    first = told(snapshot(model_key(), pulling, child=deployment(2)))
    second = told(snapshot(model_key(), pulling, child=deployment(2), status=first), now=LATER)

    assert (first["lastFailure"]["time"], second["lastFailure"]["time"]) == (NOW, NOW)


def test_malformed_parts_of_a_fetch_report_are_ignored():
    for text, expected in (
        ('{"models":[{"name":"bert","digest":"<script>","size_bytes":-1,"fetched_at":"now"}]}', None),
        ('{"models":[{"name":"bert","size_bytes":1e400}]}', None),
        ('{"models":[{"name":"bert","fetched_at":"0001-01-01T00:00:00Z"}]}', None),
        ('{"models":[{"name":"bert","size_bytes":99999999999999999999}]}', None),
        ('{"models":[{"name":"other","size_bytes":1},{"name":"bert","size_bytes":7}]}', {"sizeBytes": 7}),
        ('{"models":{"name":"bert"}}', None),
        ("[" * 9000, None),
        ("ok", None),
        ("", None),
    ):
        fetch = {**serving()["status"]["initContainerStatuses"][0], "state": ended(0, text)}
        made = pod(fetch=fetch, server={**serving()["status"]["containerStatuses"][0]}, ready_since=8)
        status = told(snapshot(model_key(), made, child=deployment()), model_spec())
        assert (text, status.get("model")) == (text, expected)


def test_the_fetched_model_is_kept_when_the_kubelet_forgets_it():
    before = told(two_serving())
    forgot = [serving("bert-1-a"), serving("bert-1-b")]
    for each in forgot:
        each["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = (
            "Unable to get init container status"
        )
    after = told(snapshot(model_key(), *forgot, child=deployment(2), status=before))
    other = told(snapshot(model_key(), *forgot, child=deployment(2), replica_sets=(replica_set(OLD),), status=before))

    assert after["model"] == before["model"]
    assert "model" not in other


def test_the_fetched_model_is_dropped_with_its_template():
    """The old status describes the newest template, but the pods that serve have the one before."""
    forgetful = loading("bert-1-a")
    forgetful["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = "nothing known"
    before = serving("bert-0-a", template=OLD)
    old = {"current": {"templateHash": NEW}, "model": {"digest": DIGEST}}
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    status = told(snapshot(model_key(), before, forgetful, child=deployment(2), replica_sets=sets, status=old))
    assert (status["current"]["templateHash"], "model" in status) == (OLD, False)


def test_texts_are_bounded_and_clean():
    hostile = "a\x00b\x1b[31m\u202e" + "x" * 5000
    status = told(snapshot(model_key(), fetch_failed(11, hostile), child=deployment(2)))

    text = message(status)
    assert len(text) == 1024
    assert text.startswith(
        f"0/2 replicas serving: pod bert-{NEW}-aaaaa: container fetch (image {IMAGE}): not found: a b [31m xxx"
    )
    assert text.endswith("x…")
    assert len(status["lastFailure"]["message"]) == 1024


def test_the_first_64_placements_are_reported():
    pods = [serving(f"bert-1-{n:03}") for n in range(70)]
    status = told(snapshot(model_key(), *pods, child=deployment(70)), model_spec(workload=Workload(replicas=70)))

    assert [each["pod"] for each in status["placements"]] == [f"bert-1-{n:03}" for n in range(64)]
    assert status["placementsTruncated"] is True
    assert (status["replicas"], status["readyReplicas"]) == (70, 70)


ENSEMBLE_INDEX = (("search", "1", "READY", ""), ("tok", "1", "READY", ""), ("pool-v2", "3", "READY", ""))
MEMBERS = {
    "tok": {"metadata": {"name": "tok", "generation": 1}, "spec": {}},
    "pool": {"metadata": {"name": "pool", "generation": 2}, "spec": {"model": {"name": "pool-v2"}}},
}


def ensemble(pod_: Object, entries: tuple[tuple[str, str, str, str], ...], members: dict[str, Object]) -> Snapshot:
    name = pod_["metadata"]["name"]
    child = deployment()
    return snapshot(ensemble_key(), pod_, child=child, indexes={name: index(*entries)}, members=members)


def two_models() -> str:
    return json.dumps(
        {"models": [FETCHED_MODEL | {"name": "pool-v2"}, FETCHED_MODEL | {"name": "tok", "size_bytes": 9}]}
    )


def test_the_status_of_an_ensemble_that_serves():
    made = serving("search-1-a")
    made["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = two_models()
    status = told(ensemble(made, ENSEMBLE_INDEX, MEMBERS), search_spec())

    assert conditions(status) == {
        "Accepted": "True Valid",
        "StepsReady": "True Loaded",
        "ModelFetched": "True Fetched",
        "Placed": "True Scheduled",
        "ModelLoaded": "True Loaded",
        "Available": "True Serving",
        "Progressing": "False Complete",
        "Degraded": "False AsExpected",
        "Ready": "True Serving",
    }
    fetched = {"digest": DIGEST, "fetchedAt": "2026-11-22T09:00:04Z"}
    assert status["members"] == [
        {"name": "tok", "sizeBytes": 9, **fetched},
        {"name": "pool", "sizeBytes": 438, **fetched},
    ]
    assert (status["readySteps"], status["selector"]) == ("2/2", "halimede.dev/ensemble=search")
    assert status["url"] == "http://search.prod.svc:8000/v2/models/search"
    assert "model" not in status


def test_a_loading_ensemble_reports_its_unready_steps():
    entries = (("tok", "1", "READY", ""), ("pool-v2", "3", "LOADING", ""))
    status = told(ensemble(loading("search-1-a"), entries, MEMBERS), search_spec())

    assert (conditions(status)["StepsReady"], conditions(status)["Ready"]) == ("False Loading", "False Loading")
    assert message(status, "StepsReady") == "step pool: model pool is not loaded yet"
    assert status["readySteps"] == "1/2"


LACKING = {
    "no such model": (
        {"tok": MEMBERS["tok"]},
        "ModelMissing",
        "step pool: InferenceModel pool does not exist",
    ),
    "a model with problems": (
        {
            **MEMBERS,
            "tok": {
                **MEMBERS["tok"],
                "status": {"conditions": [{"type": "Accepted", "status": "False", "observedGeneration": 1, "message": "spec.model.uri: bad"}]},
            },
        },
        "ModelInvalid",
        "step tok: InferenceModel tok: spec.model.uri: bad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_missing_or_invalid_member_is_reported(case: str):
    members, reason, text = LACKING[case]
    status = told(ensemble(serving("search-1-a"), ENSEMBLE_INDEX, members), search_spec())

    found = conditions(status)
    assert (found["StepsReady"], found["Ready"], found["Stalled"]) == (
        f"False {reason}",
        f"False {reason}",
        f"True {reason}",
    )
    assert (message(status, "StepsReady"), message(status)) == (text, text)
    assert (found["Available"], found["Degraded"], status["readySteps"]) == ("True Serving", f"True {reason}", "1/2")


def test_problems_of_an_older_generation_of_a_member_do_not_count():
    old = {"type": "Accepted", "status": "False", "observedGeneration": 1, "message": "bad"}
    members = {**MEMBERS, "pool": {**MEMBERS["pool"], "status": {"conditions": [old]}}}

    assert (
        conditions(told(ensemble(serving("search-1-a"), ENSEMBLE_INDEX, members), search_spec()))["Ready"]
        == "True Serving"
    )


def test_steps_of_an_invalid_ensemble_are_unknown():
    seen = snapshot(Key(Kind.MODEL_ENSEMBLE, "prod", "search"), child=deployment())
    status = told(seen, None, problems=(PROBLEM,))

    assert (conditions(status)["StepsReady"], conditions(status)["Ready"]) == (
        "Unknown InvalidSpec",
        "False InvalidSpec",
    )
    assert "readySteps" not in status


def test_an_unobserved_generation_is_reconciling_with_zero_replicas():
    status = told(
        snapshot(model_key(), child=deployment(0, generation=2, seen=1)), model_spec(workload=Workload(replicas=0))
    )

    assert conditions(status)["Reconciling"] == "True ScaledToZero"


def test_malformed_parts_of_an_old_status_are_dropped():
    strange = {
        "addresses": [{"type": f"p{number}", "value": "x" * 600} for number in range(9)],
        "current": {"templateHash": NEW, "versions": ["1", True, 7]},
        "lastFailure": {"reason": "CrashLoop", "message": "a\nb", "exitCode": 2**40, "time": NOW},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    silent = {name: PodIndex(error="timed out") for name in ("bert-1-a", "bert-1-b")}
    status = told(two_serving(status=strange, indexes=silent), None, problems=(PROBLEM,))

    assert [(each["type"], len(each["value"])) for each in status["addresses"]] == [(f"p{n}", 512) for n in range(8)]
    assert status["current"]["versions"] == [7]
    assert status["lastFailure"] == {"reason": "CrashLoop", "message": "a b", "time": NOW}


def test_the_first_64_versions_are_reported():
    many = index(*(("bert", str(number), "READY", "") for number in range(1, 71)))
    status = told(two_serving(indexes={"bert-1-a": many, "bert-1-b": many}))

    assert status["current"]["versions"] == list(range(1, 65))


def test_a_step_is_ready_if_all_serving_pods_have_its_model():
    pods = (serving("search-1-a"), loading("search-1-b"))
    indexes = {"search-1-a": index(*ENSEMBLE_INDEX), "search-1-b": index(("tok", "1", "READY", ""))}
    seen = snapshot(ensemble_key(), *pods, child=deployment(2), indexes=indexes, members=MEMBERS)

    assert told(seen, search_spec(workload=Workload(replicas=2)))["readySteps"] == "2/2"
