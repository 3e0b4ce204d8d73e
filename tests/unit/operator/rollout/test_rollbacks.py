"""What is rolled back, what happens afterwards, and what becomes of `kubectl rollout undo`."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.labels import ROLLED_BACK
from halimede_operator.core.snapshot import Object
from support.operator_pods import (
    DEADLINE,
    fetch_failed,
    node_lost,
    rejected,
    second,
    serving,
    unscheduled,
)
from support.operator_rollouts import (
    BROKEN,
    CAUSE,
    FIXED,
    LATE,
    PLATFORM,
    SPEC,
    World,
    failed_update,
    hanging,
    load_failed,
    served_world,
)

NEWER = replace(PLATFORM, server_image="server:2", s3_endpoint="https://other.example")


def test_a_broken_update_is_rolled_back_with_its_cause() -> None:
    world, before, broken = failed_update()

    events = world.reconcile()

    assert world.revision == before
    world.serve(before)
    events += world.reconcile()
    assert (world.condition("Ready"), world.condition("Reconciling")) == ("True Serving", "")
    assert [world.condition(each) for each in ("Degraded", "Stalled")] == ["True RolledBack"] * 2
    assert world.condition("Progressing") == "False RolledBack"
    assert CAUSE in world.message("Degraded")
    assert CAUSE in world.status["lastFailure"]["message"]
    assert world.message("Ready") == (
        f"1/1 replicas serving version 1; revision {broken} of generation 2 was rolled back"
    )
    assert (world.status["observedGeneration"], world.status["phase"]) == (2, "Degraded")
    assert world.outcomes() == [f"{broken} 2 RolledBack ModelLoadFailed", f"{before} 1 Serving"]
    assert [each.type for each in events if each.reason == "RolledBack"] == ["Warning"]
    assert world.reconcile() == []


def test_a_rolled_back_spec_is_not_tried_again_by_another_operator() -> None:
    world, before, _ = failed_update()
    world.reconcile()
    world.serve(before)
    world.object["status"] = None
    world.platform = NEWER
    world.edit(replicas=2)
    world.reconcile()

    assert (world.revision, world.deployment["spec"]["replicas"]) == (before, 2)
    assert world.condition("Stalled") == "True RolledBack"
    assert CAUSE in world.message("Stalled")


def by_memory(memory: str) -> Object:
    return {"type": "MIG", "mig": {"minMemory": memory}}


def devices(world: World) -> str:
    [limit] = world.deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    return str(limit)


@pytest.mark.parametrize("policy", ["Auto", "OnSpecChange", "Manual"])
def test_a_rolled_back_change_of_the_devices_is_not_tried_again(policy: str) -> None:
    """Its devices stay those that it had, so that it is recognized."""
    rollout = {"upgradePolicy": policy}
    world = served_world({**SPEC, "accelerator": by_memory("8Gi"), "rollout": rollout})
    world.edit(accelerator=by_memory("12Gi"))
    world, before, broken = failed_update(world)
    assert devices(world) == "nvidia.com/mig-2g.20gb"

    world.reconcile()
    assert (world.revision, devices(world)) == (before, "nvidia.com/mig-1g.10gb")
    world.serve(before)
    world.reconcile()
    assert (world.revision, world.condition("Stalled")) == (before, "True RolledBack")

    # Without rollbacks it is tried again at once, on the devices that it asks for.
    world.edit(rollout={**rollout, "autoRollback": False})
    world.reconcile()
    assert (world.revision, devices(world)) == (broken, "nvidia.com/mig-2g.20gb")


def test_a_fixed_spec_is_tried_after_a_rollback() -> None:
    world, before, broken = failed_update()
    world.reconcile()
    world.serve(before)
    world.reconcile()
    world.edit(model=FIXED)
    world.reconcile()
    fixed = world.revision
    assert fixed not in (before, broken)
    world.serve(fixed)
    world.reconcile()

    assert (world.condition("Ready"), world.condition("Stalled")) == ("True Serving", "")
    assert world.condition("Degraded") == ""
    assert world.outcomes() == [
        f"{fixed} 3 Serving",
        f"{broken} 2 RolledBack ModelLoadFailed",
        f"{before} 1 Superseded",
    ]


def test_the_same_spec_is_tried_after_another_one() -> None:
    world, before, broken = failed_update()
    world.reconcile()
    world.serve(before)
    world.reconcile()
    world.edit(model=SPEC["model"])
    world.reconcile()
    assert (world.revision, world.condition("Stalled"), world.annotation(ROLLED_BACK)) == (before, "", "")
    world.edit(model=BROKEN)
    world.reconcile()

    assert world.revision == broken
    assert world.outcomes() == [f"{broken} 4 RollingOut", f"{before} 1 Superseded"]


def test_without_auto_rollback_the_failed_spec_stays() -> None:
    world, before, broken = failed_update(served_world({**SPEC, "rollout": {"autoRollback": False}}))
    world.reconcile()

    assert world.revision == broken
    assert world.condition("Stalled") == "True ProgressDeadlineExceeded"
    assert world.outcomes() == [f"{broken} 2 Failed ModelLoadFailed", f"{before} 1 Superseded"]

    world.edit(rollout={})
    world.reconcile()
    assert world.revision == before
    world.edit(rollout={"autoRollback": False})
    world.progress = "ReplicaSetUpdated"
    world.reconcile()
    assert world.revision == broken


def test_without_a_revision_that_was_ready_nothing_is_rolled_back() -> None:
    world = World()
    world.reconcile()
    first = world.revision
    world.have(load_failed(first))
    world.edit(model=BROKEN)
    world.reconcile()
    broken = world.revision
    world.have(load_failed(broken))
    world.progress = LATE
    world._control()
    world.reconcile()

    assert world.revision == broken
    assert world.outcomes() == [f"{broken} 2 Failed ModelLoadFailed", f"{first} 1 Superseded NeverReady"]


def test_no_rollback_before_the_deadline() -> None:
    world, _, broken = failed_update()
    world.progress = "ReplicaSetUpdated"
    world._control()
    world.reconcile()

    assert world.revision == broken


CAUSES = {
    "load": (load_failed, "ModelLoadFailed"),
    "not found": (lambda name: fetch_failed(11, "no key", f"bert-{name}-a", template=name), "ModelFetchFailed"),
    "hangs": (hanging, "ProgressDeadlineExceeded"),
    "node": (lambda name: node_lost(f"bert-{name}-a", template=name), None),
    "no device": (lambda name: unscheduled("1 Insufficient nvidia.com/gpu.", f"bert-{name}-a", template=name), None),
    "no room": (lambda name: unscheduled("no room", f"bert-{name}-a", template=name), None),
    "evicted": (lambda name: rejected("Evicted", "low on memory", f"bert-{name}-a", template=name), None),
}


@pytest.mark.parametrize("case", CAUSES)
def test_which_causes_roll_back(case: str) -> None:
    pod, reason = CAUSES[case]
    world, before, broken = failed_update(pod=pod)
    world.reconcile()

    assert world.revision == (broken if reason is None else before)
    if reason is not None:
        assert world.outcomes()[0] == f"{broken} 2 RolledBack {reason}"


@pytest.mark.parametrize("pod", [load_failed, hanging])
def test_a_pod_that_waited_for_its_node_gets_the_whole_deadline(pod: Any) -> None:
    world, before, broken = failed_update(pod=lambda name: placed(pod(name), DEADLINE))
    world.reconcile()
    assert world.revision == broken

    world.now = second(2 * DEADLINE)
    world.reconcile()
    assert world.revision == before


def placed(pod: Object, when: int) -> Object:
    (scheduled,) = (each for each in pod["status"]["conditions"] if each["type"] == "PodScheduled")
    scheduled["lastTransitionTime"] = second(when)
    return pod


def test_a_revision_that_was_ready_is_not_rolled_back() -> None:
    world, _, broken = failed_update()
    world.serve(broken)
    world.reconcile()
    world.have(load_failed(broken))
    world.progress = LATE
    world._control()
    world.reconcile()

    assert world.revision == broken


def test_the_restored_revision_is_not_rolled_back() -> None:
    world, before, _ = failed_update()
    world.reconcile()
    world.have(load_failed(before))
    world.progress = LATE
    world._control()
    world.reconcile()

    assert world.revision == before
    assert (world.condition("Ready"), world.condition("Stalled")) == ("False ModelLoadFailed", "True RolledBack")


def test_without_its_config_map_the_restored_revision_cannot_be_kept() -> None:
    world, before, broken = failed_update()
    world.reconcile()
    world.serve(before)
    world.reconcile()
    del world.children["ConfigMap", f"bert-config-{before}"]

    events = world.reconcile()

    assert (world.revision, world.annotation(ROLLED_BACK)) == (broken, "")
    assert "RolloutUndone" not in {each.reason for each in events}


def test_pods_that_went_first_are_restored_by_the_status_alone() -> None:
    """With Recreate no pod of the revision before is left."""
    world, before, broken = failed_update()
    world.have(load_failed(broken))
    world._control()
    world.reconcile()

    assert world.revision == before


def test_an_upgrade_that_fails_is_rolled_back() -> None:
    world = served_world({**SPEC, "rollout": {"upgradePolicy": "Auto"}})
    before = world.revision
    world.platform = NEWER
    world.reconcile()
    newer = world.revision
    world.have(serving(f"bert-{before}-a", template=before), load_failed(newer))
    world.progress = LATE
    world._control()
    world.reconcile()
    assert (world.revision, world.outcomes()[0]) == (before, f"{newer} 1 RolledBack ModelLoadFailed")

    world.platform = replace(NEWER, server_image="server:3")
    world.progress = "ReplicaSetUpdated"
    world.reconcile()
    assert world.image == "server:3"


def test_only_five_revisions_are_listed() -> None:
    world = served_world()
    for number in range(6):
        world.edit(env=[{"name": "NUMBER", "value": str(number)}])
        world.reconcile()

    assert len(world.status["revisions"]) == 5
    assert world.status["revisions"][0] == f"{world.revision} of generation 7: RollingOut"


# kubectl rollout undo.


def test_rollout_undo_is_undone_with_one_event() -> None:
    world = served_world()
    before = world.revision
    world.edit(model=FIXED)
    world.reconcile()
    fixed = world.revision
    world.serve(fixed)
    world.reconcile()
    world.platform = NEWER
    world.reconcile()

    world.undo(before)
    (event,) = (each for each in world.reconcile() if each.type == "Warning")

    assert (event.type, event.reason, world.revision, world.image) == ("Warning", "RolloutUndone", fixed, "server:1")
    assert event.message == (
        f"the Deployment was set back to revision {before}, and the operator has restored revision {fixed}: change "
        "the spec of the InferenceModel instead, with kubectl edit inferencemodel/bert, or kubectl apply of the "
        "earlier manifest"
    )
    assert world.outcomes() == [f"{fixed} 2 Serving", f"{before} 1 Superseded"]


def test_an_undo_of_the_template_alone_is_undone_too() -> None:
    world = served_world()
    before = world.revision
    world.edit(model=FIXED)
    world.reconcile()
    fixed = world.revision
    world.serve(fixed)
    world.reconcile()
    world.deployment["spec"]["template"] = copy.deepcopy(world.replica_sets[before]["spec"]["template"])

    (event,) = (each for each in world.reconcile() if each.type == "Warning")

    assert (event.reason, world.revision) == ("RolloutUndone", fixed)


def test_an_undo_after_a_rollback_does_not_bring_the_failed_revision_back() -> None:
    world, before, broken = failed_update()
    world.reconcile()
    world.serve(before)
    world.reconcile()

    world.undo(broken)
    (event,) = (each for each in world.reconcile() if each.type == "Warning")

    assert (event.reason, world.revision) == ("RolloutUndone", before)
    assert world.condition("Stalled") == "True RolledBack"


def test_an_earlier_spec_that_is_applied_again_is_no_undo() -> None:
    world = served_world()
    before = world.revision
    world.edit(model=FIXED)
    world.reconcile()
    world.serve(world.revision)
    world.reconcile()
    world.platform = NEWER
    world.edit(model=SPEC["model"])
    events = world.reconcile()

    assert "RolloutUndone" not in {each.reason for each in events}
    assert (world.revision != before, world.image) == (True, "server:2")
