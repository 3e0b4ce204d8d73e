"""The strategy of a Deployment: which pods go first, why, and what to expect."""

from typing import Any

import pytest

from halimede_operator.core.children.deployment import STRATEGIES
from halimede_operator.core.labels import PLACEMENT, REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.pods.start import Start
from halimede_operator.core.rollout.strategy import Strategy, strategy_at_rest, strategy_of
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import DeviceClaim, Rollout, RolloutPolicy, Workload
from halimede_operator.core.subject import Subject
from support.operator_pods import second, snapshot
from support.operator_specs import PLATFORM, model_key, model_spec

GPU = "nvidia.com/mig-3g.40gb"
SLICES = Placement(GPU)
CLAIM = Placement("", claim=DeviceClaim("mig.nvidia.com"))
AUTO, SURGE, IN_PLACE = RolloutPolicy.AUTO, RolloutPolicy.SURGE, RolloutPolicy.IN_PLACE


def deployment(template: str, policy: RolloutPolicy = SURGE, placement: Placement | None = None) -> Object:
    spec = {"terminationGracePeriodSeconds": 40}
    devices = {PLACEMENT: placement.written()} if placement is not None else {}
    return {
        "kind": "Deployment",
        "metadata": {"annotations": {TEMPLATE_HASH: template, **devices}},
        "spec": {
            "strategy": STRATEGIES[policy],
            "template": {"metadata": {"labels": {REVISION_LABEL: template}}, "spec": spec},
        },
    }


def pod(
    template: str, *, started: int | None = 11, waits: bool = False, phase: str = "Running", claim: bool = False
) -> Object:
    """started: seconds from its creation to its readiness."""
    conditions = []
    if waits:
        text = f"0/2 nodes are available: 2 Insufficient {GPU}."
        scheduled = {"type": "PodScheduled", "status": "False", "message": text, "lastTransitionTime": second(0)}
        conditions.append(scheduled)
    elif started is not None:
        conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": second(started)})
    metadata = {"labels": {REVISION_LABEL: template}, "creationTimestamp": second(0)}
    spec: Object = {"containers": [{"resources": {"limits": {GPU: "1"}}}]}
    if claim:
        spec = {"containers": [{}], "resourceClaims": [{"name": "accelerator"}]}
    return {"metadata": metadata, "spec": spec, "status": {"conditions": conditions, "phase": phase}}


def decided(
    *pods: Object,
    room: int | None = None,
    live: str = "old",
    now: RolloutPolicy = SURGE,
    policy: RolloutPolicy = AUTO,
    replicas: int = 1,
    placement: Placement | None = SLICES,
    at: int = 30,
    over_quota: bool = False,
    startup: Start | None = None,
    **fields: Any,
) -> Strategy:
    """at: the second of the decision. live: the template that the existing Deployment has. now: its strategy."""
    workload = Workload(replicas=replicas, rollout=Rollout(policy), **fields)
    status = {"startup": startup.as_text()} if startup is not None else None
    seen = snapshot(model_key(), *pods, child=deployment(live, now), status=status)
    subject = Subject(seen, PLATFORM, model_spec(workload=workload))
    wanted = deployment("new", placement=placement)
    return strategy_of(subject, workload, wanted, second(at), room=room, over_quota=over_quota)


def test_a_rollout_surges_if_a_device_is_free_and_else_goes_in_place() -> None:
    assert decided(pod("old")).needs_room
    assert decided(pod("old"), room=1) == Strategy(
        SURGE, f"a further {GPU} is free, or soon: each old pod serves until its successor is ready"
    )
    # 5 s of drain delay, 3 s to hand over and a start of 11 s, in steps of 5 s. The grace period is 40 s.
    assert decided(pod("old"), room=0) == Strategy(
        IN_PLACE,
        f"no further {GPU} is free: the old pod goes before the new one starts; nothing serves for "
        "about 20 s, by the last start, and for up to 35 s more while old requests end",
    )
    assert "2 of 3 replicas serve" in decided(pod("old"), room=0, replicas=3).reason


def test_without_devices_a_rollout_surges() -> None:
    assert decided(pod("old"), placement=None).policy is SURGE
    assert not decided(pod("old"), placement=None).needs_room


def test_a_rollout_that_has_begun_goes_on_as_it_is() -> None:
    pods = pod("old"), pod("new", started=None)
    assert decided(*pods, live="new", now=SURGE, room=0).policy is SURGE
    assert decided(*pods, live="new", now=IN_PLACE, room=1).policy is IN_PLACE
    assert not decided(*pods, live="new").needs_room


def test_a_new_pod_that_waits_for_devices_takes_those_of_an_old_one() -> None:
    pods = pod("old"), pod("new", waits=True)
    assert decided(*pods, live="new").needs_room
    assert decided(*pods, live="new", room=0).policy is IN_PLACE
    assert decided(*pods, live="new", room=1).policy is SURGE


def test_a_new_pod_that_cannot_use_free_devices_takes_those_of_an_old_one() -> None:
    pods = pod("old"), pod("new", waits=True)
    found = decided(*pods, live="new", room=1, at=60)
    assert found.policy is IN_PLACE
    assert found.reason.startswith(f"the new pod has found no {GPU} for 60 s: ")


def test_a_quota_that_refuses_the_new_pod_lets_an_old_one_go() -> None:
    found = decided(pod("old"), live="new", room=1, over_quota=True)
    assert found.policy is IN_PLACE
    assert found.reason.startswith("a quota refuses a further pod: ")
    assert decided(pod("old"), room=1, over_quota=True).policy is SURGE


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_pods_that_have_ended_are_no_rollout(phase: str) -> None:
    assert decided(pod("old", phase=phase), pod("new"), live="new") == Strategy(SURGE)


@pytest.mark.parametrize("now", [SURGE, IN_PLACE])
def test_at_rest_the_strategy_stays(now: RolloutPolicy) -> None:
    assert decided(pod("new"), live="new", now=now, room=0) == Strategy(now)
    # Replicas that wait for devices are no rollout.
    assert decided(pod("new"), pod("new", waits=True), live="new", now=now, replicas=2) == Strategy(now)
    assert strategy_at_rest(Workload(), None) is SURGE


@pytest.mark.parametrize("fields", [{"replicas": 0}, {"suspend": True}])
def test_without_replicas_nothing_is_decided(fields: dict[str, Any]) -> None:
    assert decided(pod("old"), room=0, **fields) == Strategy(SURGE)


@pytest.mark.parametrize("policy", [SURGE, IN_PLACE, RolloutPolicy.RECREATE])
def test_the_policy_of_the_spec_is_the_strategy(policy: RolloutPolicy) -> None:
    found = decided(pod("old"), policy=policy)
    assert (found.policy, found.needs_room) == (policy, False)
    assert found.reason.startswith(f"spec.rollout.policy is {policy}: ")


def test_an_unknown_start_is_assumed_to_be_long() -> None:
    assert "for up to 160 s" in decided(pod("old", started=None), room=0).reason


def test_the_gap_is_that_of_measured_starts() -> None:
    old = pod("old", started=500)
    # It waited for its node for a minute, and for its image for half a minute.
    old["status"]["conditions"].append({"type": "PodScheduled", "status": "True", "lastTransitionTime": second(60)})
    assert "about 450 s" in decided(old, room=0).reason
    fetched = {"name": "fetch", "state": {"terminated": {"exitCode": 0, "startedAt": second(90)}}}
    old["status"]["initContainerStatuses"] = [fetched]
    assert "about 420 s" in decided(old, room=0).reason
    # It was unready for a while. When it was ready first is in the status.
    old["metadata"]["name"] = "bert-1-a"
    for name, expected in (("bert-1-a", "about 15 s"), ("bert-1-b", "about 420 s")):
        assert expected in decided(old, room=0, startup=Start(name, second(0), {"ready": 94})).reason


def test_with_a_claim_a_rollout_surges_without_looking_at_devices() -> None:
    found = decided(pod("old", claim=True), placement=CLAIM, now=IN_PLACE)
    assert (found.policy, found.needs_room) == (SURGE, False)
    assert found.reason == (
        "each old pod serves until its successor is ready, but an old pod goes first if its successor finds no device of "
        "class mig.nvidia.com for 60 s"
    )


def test_a_new_pod_without_a_claimed_device_for_a_minute_replaces_an_old_one() -> None:
    pods = pod("old", claim=True), pod("new", waits=True, claim=True)
    assert decided(*pods, live="new", placement=CLAIM, at=59).policy is SURGE
    found = decided(*pods, live="new", placement=CLAIM, at=60)
    assert found.policy is IN_PLACE
    assert found.reason.startswith("the new pod has found no device of class mig.nvidia.com for 60 s: the old pod goes")
    assert decided(*pods, live="new", placement=CLAIM, now=IN_PLACE, at=70).policy is IN_PLACE
    assert decided(pod("old", claim=True), live="new", placement=CLAIM, over_quota=True).policy is IN_PLACE
