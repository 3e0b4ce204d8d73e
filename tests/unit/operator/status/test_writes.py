"""How often a status is written: once for each change of the cause, whatever kubelets write meanwhile."""

import json
from collections.abc import Iterable
from pathlib import Path

from halimede_operator.core.snapshot import Object, PodIndex, Snapshot
from halimede_operator.core.spec.types import ModelSpec, Workload
from support.operator_pods import (
    IMAGE,
    NEW,
    back_off,
    container,
    deployment,
    ended,
    fetched,
    fetching,
    index,
    loading,
    pod,
    replica_set,
    running,
    second,
    serving,
    snapshot,
    stopped,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import status_for

NAME = f"bert-{NEW}-aaaaa"


def written(looks: Iterable[Snapshot], spec: ModelSpec | None = None) -> list[Object]:
    """The statuses that differ from the one before, with one reconcile per second."""
    statuses: list[Object] = []
    for number, look in enumerate(looks):
        if statuses:
            look.object["status"] = statuses[-1]
        status = status_for(look, spec or model_spec(), now=second(number + 1))
        if not statuses or status != statuses[-1]:
            statuses.append(status)
    return statuses


def ready_of(status: Object) -> tuple[str, str]:
    return next((c["reason"], c["message"]) for c in status["conditions"] if c["type"] == "Ready")


def seen(pod_: Object, pod_index: PodIndex | None = None) -> Snapshot:
    return snapshot(model_key(), pod_, child=deployment(), indexes={NAME: pod_index} if pod_index else {})


def test_a_starting_model_writes_one_status_per_stage():
    unscheduled = pod(has_sandbox=False)
    del unscheduled["spec"]["nodeName"]
    unscheduled["status"] = {"phase": "Pending"}
    new = deployment(seen=0, progress="ReplicaSetUpdated")
    made = deployment(progress="ReplicaSetUpdated")
    without_sets = snapshot(model_key(), child=new)
    looks = [
        Snapshot(model_key(), without_sets.object, {}, (new,), (), (), {}),
        snapshot(model_key(), child=new, replica_sets=(replica_set(),)),
        snapshot(model_key(), child=made),
        *(
            snapshot(model_key(), each, child=made, indexes={NAME: pod_index} if pod_index else {})
            for each, pod_index in (
                (unscheduled, None),
                (pod(has_sandbox=False, created=4), None),
                (pod(created=4), None),
                (fetching(created=4), None),
                (pod(fetch=fetched(), created=4), None),
                (loading(created=4), None),
                (loading(created=4), index(("bert", "1", "LOADING", ""))),
                (serving(created=4), index(("bert", "1", "READY", ""))),
            )
        ),
        seen(serving(created=4), index(("bert", "1", "READY", ""))),
    ]

    reasons = [ready_of(status)[0] for status in written(looks)]

    # The last one is the Deployment's own word that the rollout is complete, which Progressing knew before.
    assert reasons == ["Pending", "Scheduling", "Fetching", "Loading", "Serving"]


def test_a_model_that_is_made_without_replicas_writes_one_status():
    key, spec = model_key(), model_spec(workload=Workload(replicas=0))
    looks = [
        Snapshot(key, snapshot(key).object, {}, (deployment(0, seen=0, progress=""),), (), (), {}),
        snapshot(key, child=deployment(0, seen=0, progress="NewReplicaSetCreated")),
        snapshot(key, child=deployment(0)),
    ]

    (only,) = written(looks, spec)

    states = {condition["type"]: condition["reason"] for condition in only["conditions"]}
    assert states == {"Ready": "ScaledToZero", "Accepted": "Valid"}


def test_a_recorded_crash_loop_writes_one_status():
    """Recorded on Kubernetes 1.36: a pod whose server exits with 3 at each start, for five runs."""
    lines = (Path(__file__).parent / "crash_loop.jsonl").read_text().splitlines()
    pods = [json.loads(line) for line in lines]
    template = pods[0]["metadata"]["labels"]["pod-template-hash"]
    child = deployment(progress="ReplicaSetUpdated", template=template)
    looks = [snapshot(model_key(), each, child=child, replica_sets=(replica_set(template),)) for each in pods]
    restarts = [each["status"]["containerStatuses"][0]["restartCount"] for each in pods[1:]]

    statuses = written(looks)

    assert (restarts[0], restarts[-1]) == (0, 4)
    assert [ready_of(status)[0] for status in statuses] == ["Fetching", "Loading", "CrashLoop"]
    assert ready_of(statuses[-1])[1].endswith("exited with code 3: last words")


def crash(number: int) -> Object:
    """One end of a server that dies 1 s after each start. Its last message varies in irrelevant parts."""
    address = f"0x7f{number:010x}"
    log = f"Traceback (most recent call last):\n  File m.py\nValueError: <Model object at {address}> has no weights\n"
    return ended(1, log, started=5 + 20 * number, finished=6 + 20 * number)


def test_a_crash_loop_with_varying_messages_writes_one_status():
    """Each step has a new end, a longer back-off, and a new run, started or not."""
    looks = []
    for number in range(8):
        now, before = crash(number), crash(number - 1) if number else None
        up = {**container("server", running(5 + 20 * number), before, restarts=number), "started": False}
        turns = (
            up,
            {**up, "started": True},
            container("server", now, before, restarts=number),
            container("server", back_off(NAME, pause=f"{10 * 2**number}s"), now, restarts=number),
            container("server", back_off(NAME, pause=f"{20 * 2**number}s"), now, restarts=number),
        )
        looks += [seen(pod(fetch=fetched(), server=server)) for server in turns]

    reasons = [ready_of(status) for status in written(looks)]

    expected = f"pod {NAME}: container server (image {IMAGE}): exited with code 1: ValueError: <Model object at 0x…> has no weights"
    assert reasons == [
        ("Loading", f"0/1 replicas serving: pod {NAME} on node node-1 starts the server and loads the model"),
        ("CrashLoop", f"0/1 replicas serving: {expected}"),
    ]


def test_a_lasting_failure_keeps_the_time_of_its_beginning():
    first, second_, third = crash(0), crash(1), crash(2)
    looks = [
        seen(stopped(first)),
        seen(stopped(back_off(NAME), last=second_)),
        seen(serving(last=second_, since=60)),
        seen(stopped(third, unready_since=46)),
    ]

    times = [status["lastFailure"]["time"] for status in written(looks)]

    ends = [each["terminated"]["finishedAt"] for each in (first, second_, third)]
    assert times == ends
