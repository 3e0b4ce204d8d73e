"""The fields of a status beside its conditions, and their bounds."""

from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.snapshot import PodIndex
from halimede_operator.core.spec.types import (
    Accelerator,
    AcceleratorType,
    Serving,
    Workload,
)
from halimede_operator.core.status.conditions import Condition, merged
from support.operator_pods import (
    DIGEST,
    IMAGE,
    NEW,
    OLD,
    deployment,
    ended,
    fetch_failed,
    fetching,
    index,
    loading,
    pod,
    replica_set,
    serving,
    snapshot,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import LATER, NOW, PROBLEM, message, status_for, two_serving


def test_the_whole_status_of_a_model_that_serves():
    spec = model_spec(
        format="onnx",
        workload=Workload(replicas=2, accelerator=Accelerator(AcceleratorType.MIG, mig_profile="1g.10gb")),
    )

    slices = Placement("nvidia.com/mig-1g.10gb", "1g.10gb")
    seen = snapshot(
        model_key(),
        serving("bert-1-a"),
        serving("bert-1-b", node="node-2"),
        child=deployment(2, placement=slices),
        generation=3,
    )
    assert status_for(seen, spec) == {
        "observedGeneration": 3,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "Serving",
                "message": "2/2 replicas serving version 1",
                "lastTransitionTime": NOW,
            }
        ],
        "phase": "Serving",
        "url": "http://bert.prod.svc:8000/v2/models/bert",
        "addresses": {"http": "http://bert.prod.svc:8000", "grpc": "bert.prod.svc:8001"},
        "replicas": 2,
        "readyReplicas": 2,
        "desiredReplicas": 2,
        "selector": "halimede.dev/model=bert",
        "current": {"versions": [1], "templateHash": NEW, "image": IMAGE},
        "effective": {
            "resourceName": "nvidia.com/mig-1g.10gb",
            "nodes": "node-1, node-2",
        },
        "model": {"digest": DIGEST, "sizeBytes": 438, "fetchedAt": "2026-11-22T09:00:04Z"},
        "placements": ["bert-1-a on node-1", "bert-1-b on node-2"],
        "startup": (
            "bert-1-b created 2026-11-22T09:00:00Z: "
            "scheduled +0 s, fetched +4 s, started +5 s, loaded +8 s, ready +8 s"
        ),
    }  # fmt: skip


def test_without_http_there_is_no_url():
    spec = model_spec(workload=Workload(serving=Serving(http=False, grpc_port=9001)))
    status = status_for(snapshot(model_key(), child=deployment()), spec)

    assert "url" not in status
    assert status["addresses"] == {"grpc": "bert.prod.svc:9001"}


def test_versions_are_those_that_every_ready_pod_serves():
    indexes = {
        "bert-1-a": index(("bert", "10", "READY", ""), ("bert", "2", "READY", ""), ("bert", "1", "READY", ""), ("x", "7", "READY", "")),
        "bert-1-b": index(("bert", "2", "READY", ""), ("bert", "10", "READY", ""), ("bert", "x", "READY", "")),
    }  # fmt: skip
    status = status_for(two_serving(indexes=indexes))

    assert status["current"]["versions"] == [2, 10]
    assert message(status) == "2/2 replicas serving versions 2, 10"


def test_desired_replicas_are_reported_for_any_pods():
    one = snapshot(model_key(), serving("bert-1-a"), child=deployment(2))
    suspended = model_spec(workload=Workload(replicas=2, suspend=True))
    fields = ("replicas", "readyReplicas", "desiredReplicas")

    assert [status_for(one)[name] for name in fields] == [1, 1, 2]
    assert [status_for(one, suspended)[name] for name in fields] == [1, 1, 0]
    assert "desiredReplicas" not in status_for(snapshot(model_key()), None, problems=(PROBLEM,))


def test_current_describes_the_pods_that_serve():
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    pods = (serving("bert-0-a", template=OLD), fetching("bert-1-a"))
    status = status_for(snapshot(model_key(), *pods, child=deployment(2), replica_sets=sets))

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

    assert status_for(seen)["current"]["versions"] == [3]


def test_old_conditions_are_dropped_and_invalid_times_replaced():
    old = [
        {"type": "Stalled", "status": "True", "lastTransitionTime": NOW},
        {"type": "Ready", "status": "True", "lastTransitionTime": "yesterday"},
        {"type": "Placed", "status": "False", "lastTransitionTime": NOW},
    ]
    new = [Condition("Placed", "False", "Unschedulable", "no room"), Condition("Ready", "True", "Serving", "")]

    assert [(c["type"], c["lastTransitionTime"]) for c in merged(old, new, LATER)] == [
        ("Placed", NOW),
        ("Ready", LATER),
    ]


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
        status = status_for(snapshot(model_key(), made, child=deployment()), model_spec())
        assert (text, status.get("model")) == (text, expected)


def test_the_fetched_model_is_kept_when_the_kubelet_forgets_it():
    before = status_for(two_serving())
    forgot = [serving("bert-1-a"), serving("bert-1-b")]
    for each in forgot:
        each["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = (
            "Unable to get init container status"
        )
    after = status_for(snapshot(model_key(), *forgot, child=deployment(2), status=before))
    other = status_for(
        snapshot(model_key(), *forgot, child=deployment(2), replica_sets=(replica_set(OLD),), status=before)
    )

    assert after["model"] == before["model"]
    assert "model" not in other


def test_the_fetched_model_is_dropped_with_its_template():
    """The old status describes the newest template, but the pods that serve have the one before."""
    forgetful = loading("bert-1-a")
    forgetful["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = "nothing known"
    before = serving("bert-0-a", template=OLD)
    old = {"current": {"templateHash": NEW}, "model": {"digest": DIGEST}}
    sets = (replica_set(OLD, 9), replica_set(NEW, 10))
    status = status_for(snapshot(model_key(), before, forgetful, child=deployment(2), replica_sets=sets, status=old))
    assert (status["current"]["templateHash"], "model" in status) == (OLD, False)


def test_texts_are_bounded_and_clean():
    hostile = "a\x00b\x1b[31m\u202e" + "x" * 5000
    status = status_for(snapshot(model_key(), fetch_failed(11, hostile), child=deployment(2)))

    text = message(status)
    assert len(text) == 1024
    assert text.startswith(
        f"0/2 replicas serving: pod bert-{NEW}-aaaaa: container fetch (image {IMAGE}): not found: a b [31m xxx"
    )
    assert text.endswith("x…")
    assert len(status["lastFailure"]["message"]) == 1024


def test_the_first_64_placements_are_reported():
    pods = [serving(f"bert-1-{n:03}") for n in range(70)]
    status = status_for(snapshot(model_key(), *pods, child=deployment(70)), model_spec(workload=Workload(replicas=70)))

    assert status["placements"] == [f"bert-1-{n:03} on node-1" for n in range(64)]
    assert status["placementsTruncated"] is True
    assert (status["replicas"], status["readyReplicas"]) == (70, 70)


def test_malformed_parts_of_an_old_status_are_dropped():
    strange = {
        "addresses": {"http": "x" * 600, "grpc": 7, "other": "x"},
        "current": {"templateHash": NEW, "versions": ["1", True, 7]},
        "lastFailure": {"reason": "CrashLoop", "message": "a\nb", "exitCode": 2**40, "time": NOW},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    silent = {name: PodIndex(error="timed out") for name in ("bert-1-a", "bert-1-b")}
    status = status_for(two_serving(status=strange, indexes=silent), None, problems=(PROBLEM,))

    assert {name: len(address) for name, address in status["addresses"].items()} == {"http": 512}
    assert status["current"]["versions"] == [7]
    assert status["lastFailure"] == {"reason": "CrashLoop", "message": "a b", "time": NOW}


def test_the_first_64_versions_are_reported():
    many = index(*(("bert", str(number), "READY", "") for number in range(1, 71)))
    status = status_for(two_serving(indexes={"bert-1-a": many, "bert-1-b": many}))

    assert status["current"]["versions"] == list(range(1, 65))
