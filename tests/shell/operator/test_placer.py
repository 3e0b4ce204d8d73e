"""Decisions about devices, for several objects at once: each sees those before it."""

import asyncio
import datetime
from typing import Any

import pytest

from halimede_operator.core.labels import PLACEMENT
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.placer import GONE_S, RESERVED_S
from halimede_operator.reconcile.reconciler import UNPLACED_AGAIN_S
from support.device_nodes import node
from support.kube_api import Fault, Object
from support.operator_harness import SPEC, TODAY, Harness, create_pod, with_harness

SLICE = "nvidia.com/mig-"


def key(name: str) -> Key:
    return Key(Kind.INFERENCE_MODEL, "prod", name)


def put_node(harness: Harness, *cards: tuple[str, ...], name: str = "a", **options: Any) -> None:
    made = node(name, *cards, **options)
    # Nodes have no namespace.
    harness.api.put("nodes", None, name, **made)  # type: ignore[arg-type]


def put_model(harness: Harness, name: str, memory: str = "8Gi", created: int = 0, **spec: Any) -> Key:
    accelerator = {"type": "MIG", "mig": {"minMemory": memory}, **spec.pop("accelerator", {})}
    moment = (TODAY + datetime.timedelta(seconds=created)).strftime("%Y-%m-%dT%H:%M:%SZ")
    metadata = {"creationTimestamp": moment}
    harness.api.put(
        "inferencemodels", "prod", name, spec={**SPEC, "accelerator": accelerator, **spec}, metadata=metadata
    )
    return key(name)


def deployment(harness: Harness, name: str) -> Object:
    return harness.api.objects["deployments", "prod", name]


def devices(harness: Harness, name: str) -> str:
    [server] = deployment(harness, name)["spec"]["template"]["spec"]["containers"]
    [found] = [limit for limit in server["resources"]["limits"] if limit.startswith("nvidia.com/")]
    return str(found)


def placed(harness: Harness, name: str) -> tuple[str, str]:
    conditions = harness.api.objects["inferencemodels", "prod", name]["status"]["conditions"]
    found = next(condition for condition in conditions if condition["type"] == "Placed")
    return found["reason"], found["message"]


@with_harness
async def test_objects_at_the_same_time_get_different_devices(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",) * 7, ("2g.20gb",) * 3, ("3g.40gb",) * 2)
    keys = [put_model(harness, f"m{number:02}", created=number) for number in range(16)]
    harness.relist()
    await asyncio.gather(*[harness.reconcile(key) for key in reversed(keys)])
    # All are decided on one inventory, the oldest first. The last four find everything taken.
    given = [devices(harness, key.name).removeprefix(SLICE) for key in keys]
    assert given == ["1g.10gb"] * 7 + ["2g.20gb"] * 3 + ["3g.40gb"] * 2 + ["1g.10gb"] * 4
    assert harness.api.counted("GET /api/v1/nodes") == 1
    assert harness.api.counted("GET /api/v1/pods") == 1


@with_harness
async def test_a_choice_is_kept_until_its_pods_are_seen(harness: Harness) -> None:
    put_node(harness, ("1g.10gb", "2g.20gb"))
    put_model(harness, "digits")
    await harness.sync(key("digits"))
    assert devices(harness, "digits") == f"{SLICE}1g.10gb"
    # Its pods do not exist in the next inventory either.
    harness.now += 10
    put_model(harness, "second")
    await harness.sync(key("second"))
    assert devices(harness, "second") == f"{SLICE}2g.20gb"

    # Now they do, so the choice and the pod are not counted twice.
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    put_node(harness, ("1g.10gb", "1g.10gb", "2g.20gb"))
    harness.now += 10
    put_model(harness, "third")
    await harness.sync(key("third"))
    assert devices(harness, "third") == f"{SLICE}1g.10gb"


@with_harness
async def test_a_repeated_choice_takes_no_second_device(harness: Harness) -> None:
    put_node(harness, ("1g.10gb", "1g.10gb", "2g.20gb"))
    harness.api.faults.append(Fault("PATCH /apis/apps/v1/namespaces/prod/deployments/first", status=500, times=1))
    first = put_model(harness, "first")
    assert isinstance(await harness.sync(first), Failed)
    await harness.sync(first)
    await harness.sync(put_model(harness, "second"))
    assert [devices(harness, name) for name in ("first", "second")] == [f"{SLICE}1g.10gb"] * 2


@with_harness
async def test_a_choice_repeated_after_a_while_takes_no_second_device(harness: Harness) -> None:
    put_node(harness, ("1g.10gb", "1g.10gb", "2g.20gb"))
    harness.api.faults.append(Fault("PATCH /apis/apps/v1/namespaces/prod/deployments/first", status=500))
    first = put_model(harness, "first")
    # It is refused again and again, and its choice is kept for it no longer than other choices.
    for _ in range(3):
        assert isinstance(await harness.sync(first), Failed)
        harness.now += 30
    await harness.sync(put_model(harness, "second"))
    await harness.sync(put_model(harness, "third"))
    assert [devices(harness, name) for name in ("second", "third")] == [f"{SLICE}1g.10gb", f"{SLICE}2g.20gb"]
    harness.now += RESERVED_S - 80
    await harness.sync(first)
    put_node(harness, ("1g.10gb",) * 4, ("2g.20gb",))
    await harness.sync(put_model(harness, "fourth"))
    assert devices(harness, "fourth") == f"{SLICE}1g.10gb"


@with_harness
async def test_an_object_without_replicas_needs_no_devices(harness: Harness) -> None:
    harness.api.put("inferencemodels", "prod", "digits", spec=SPEC)
    await harness.sync()
    accelerator = {"type": "MIG", "mig": {"minMemory": "8Gi"}}
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator, "suspend": True})
    await harness.sync()
    assert deployment(harness, "digits")["spec"]["replicas"] == 0
    put_node(harness, ("1g.10gb",))
    harness.now += 10
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator})
    await harness.sync()
    assert devices(harness, "digits") == f"{SLICE}1g.10gb"


@with_harness
async def test_nothing_is_announced_that_the_api_server_refuses(harness: Harness) -> None:
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "rollout": {"policy": "Recreate"}})
    await harness.sync()
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    changed = {**SPEC, "rollout": {"policy": "Recreate"}, "env": [{"name": "N", "value": "1"}]}
    harness.api.put("inferencemodels", "prod", "digits", spec=changed)
    denied = Fault("PATCH /apis/apps/v1/namespaces/prod/deployments/digits", status=403, reason="Forbidden")
    harness.api.faults.append(denied)
    await harness.sync()
    told = harness.digits()["status"], harness.api.writes()["PATCH inferencemodels"]
    for _ in range(3):
        await harness.sync()
    assert (harness.digits()["status"], harness.api.writes()["PATCH inferencemodels"]) == told
    assert harness.condition("Accepted")["status"] == "False"
    # What is accepted is announced before it is done.
    harness.api.faults.clear()
    harness.now += 10
    await harness.sync()
    assert harness.condition("RolloutStrategy")["reason"] == "Recreate"


@pytest.mark.parametrize("waited", [RESERVED_S - 20, RESERVED_S + 1])
@with_harness
async def test_a_choice_without_pods_is_given_up_after_a_while(harness: Harness, waited: float) -> None:
    put_node(harness, ("1g.10gb", "2g.20gb"))
    await harness.sync(put_model(harness, "first"))
    harness.now += waited
    await harness.sync(put_model(harness, "second"))
    assert devices(harness, "second") == f"{SLICE}{'2g.20gb' if waited < RESERVED_S else '1g.10gb'}"


@with_harness
async def test_devices_stay_although_smaller_ones_become_free(harness: Harness) -> None:
    put_node(harness, ("3g.40gb",))
    model = put_model(harness, "bert")
    await harness.sync(model)
    put_node(harness, ("1g.10gb", "3g.40gb"))
    harness.now += 60
    put_model(harness, "bert", replicas=2)
    await harness.sync(model)
    assert devices(harness, "bert") == f"{SLICE}3g.40gb"
    assert harness.api.counted("GET /api/v1/nodes") == 1
    # A changed need is a new decision.
    put_model(harness, "bert", memory="9Gi")
    await harness.sync(model)
    assert devices(harness, "bert") == f"{SLICE}1g.10gb"


@with_harness
async def test_an_object_without_fitting_devices_waits_for_them(harness: Harness) -> None:
    put_node(harness, ("1g.10gb", "1g.10gb"))
    model = put_model(harness, "bert", memory="12Gi")
    assert await harness.sync(model) == Done(again_in=UNPLACED_AGAIN_S)
    assert ("deployments", "prod", "bert") not in harness.api.objects
    reason, message = placed(harness, "bert")
    assert reason == "InsufficientDevices"
    assert message == (
        "need 1x a slice with 12 GiB (12.6 GiB with headroom); 2x 1g.10gb free on node a, which has 9.75 GiB "
        "(nvidia.com/mig-1g.10gb.memory is 9984); no node has devices that fit"
    )
    put_node(harness, ("2g.20gb",))
    harness.now += UNPLACED_AGAIN_S
    await harness.sync(model)
    assert devices(harness, "bert") == f"{SLICE}2g.20gb"


@with_harness
async def test_a_change_that_no_device_fits_leaves_what_serves(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",))
    model = put_model(harness, "bert")
    await harness.sync(model)
    before = deployment(harness, "bert")
    put_model(harness, "bert", memory="70Gi")
    harness.now += 10
    await harness.sync(model)
    assert deployment(harness, "bert") == before
    assert placed(harness, "bert")[0] == "InsufficientDevices"
    # It can be scaled to nothing all the same.
    put_model(harness, "bert", memory="70Gi", replicas=0)
    await harness.sync(model)
    assert deployment(harness, "bert")["spec"]["replicas"] == 0


@with_harness
async def test_a_pod_that_waits_too_long_gets_other_devices(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",))
    model = put_model(harness, "digits", accelerator={"moveAfter": "30s"})
    await harness.sync(model)
    lacks = {"reason": "Unschedulable", "message": f"0/1 nodes: 1 Insufficient {SLICE}1g.10gb"}
    since = TODAY.strftime("%Y-%m-%dT%H:%M:%SZ")
    create_pod(
        harness,
        "digits-1-x",
        {"type": "PodScheduled", "status": "False", "lastTransitionTime": since, **lacks},
    )
    # Another's pod has the slice, and a larger one is free.
    put_node(harness, ("1g.10gb", "3g.40gb"))
    harness.api.put(
        "pods", "other", "p", status={"phase": "Running"},
        spec={"nodeName": "a", "containers": [{"name": "c", "resources": {"limits": {f"{SLICE}1g.10gb": "1"}}}]},
    )  # fmt: skip
    harness.now += 10
    harness.today = TODAY + datetime.timedelta(seconds=10)
    assert await harness.sync(model) == Done(again_in=UNPLACED_AGAIN_S)
    assert devices(harness, "digits") == f"{SLICE}1g.10gb"
    assert "3g.40gb free on node a" in placed(harness, "digits")[1]
    harness.today = TODAY + datetime.timedelta(seconds=30)
    await harness.sync(model)
    assert devices(harness, "digits") == f"{SLICE}3g.40gb"


@with_harness
async def test_without_the_right_to_read_nodes_only_names_are_possible(harness: Harness) -> None:
    harness.api.faults.append(Fault("GET /api/v1/nodes", status=403, reason="Forbidden"))
    await harness.sync(put_model(harness, "bert"))
    assert "name the slice in spec.accelerator.mig.profile" in placed(harness, "bert")[1]
    await harness.sync(put_model(harness, "named", accelerator={"mig": {"profile": "1g.10gb"}}))
    assert devices(harness, "named") == f"{SLICE}1g.10gb"


@with_harness
async def test_a_failed_read_of_the_nodes_is_tried_again(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",))
    harness.api.faults.append(Fault("GET /api/v1/pods", status=500, times=1))
    first, second = put_model(harness, "first"), put_model(harness, "second")
    harness.relist()
    outcomes = await asyncio.gather(harness.reconcile(first), harness.reconcile(second))
    assert [type(outcome).__name__ for outcome in outcomes] == ["Failed", "Failed"]
    await asyncio.gather(harness.reconcile(first), harness.reconcile(second))
    assert devices(harness, "first") == f"{SLICE}1g.10gb"


@with_harness
async def test_long_lists_of_pods_are_read_in_pages(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",) * 7, ("2g.20gb",))
    for number in range(107):
        held = {f"{SLICE}1g.10gb": "1"} if number >= 100 else {}
        harness.api.put(
            "pods", "other", f"p{number:03}", status={"phase": "Running"},
            spec={"nodeName": "a", "containers": [{"name": "c", "resources": {"limits": held}}]},
        )  # fmt: skip
    await harness.sync(put_model(harness, "bert"))
    assert devices(harness, "bert") == f"{SLICE}2g.20gb"
    assert harness.api.counted("GET /api/v1/pods") == 2


@with_harness
async def test_the_choice_is_in_an_annotation_and_survives_the_operator(harness: Harness) -> None:
    put_node(harness, ("1g.10gb",))
    await harness.sync(put_model(harness, "bert"))
    written = deployment(harness, "bert")["metadata"]["annotations"][PLACEMENT]
    assert f'"resource":"{SLICE}1g.10gb"' in written


def put_pod(harness: Harness, of: str, slice_: str, **metadata: Any) -> None:
    """A pod of a model that has a slice of node a."""
    labels = {"app.kubernetes.io/managed-by": "halimede-operator", "halimede.dev/model": of}
    limits = {"resources": {"limits": {f"{SLICE}{slice_}": "1"}}}
    harness.api.put(
        "pods", "prod", f"{of}-x", status={"phase": "Running"}, metadata={"labels": labels, **metadata},
        spec={"nodeName": "a", "containers": [{"name": "server", **limits}]},
    )  # fmt: skip


@pytest.mark.parametrize(("ends_in_s", "expected"), [(30, "1g.10gb"), (-11, "2g.20gb")])
@with_harness
async def test_a_slice_of_a_pod_that_is_ending_is_waited_for(harness: Harness, ends_in_s: int, expected: str) -> None:
    put_node(harness, ("1g.10gb", "2g.20gb"))
    ends_at = (TODAY + datetime.timedelta(seconds=ends_in_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
    put_pod(harness, "m1", "1g.10gb", deletionTimestamp=ends_at)
    await harness.sync(put_model(harness, "m9", memory="9Gi"))
    assert devices(harness, "m9") == f"{SLICE}{expected}"


@pytest.mark.parametrize(
    "by",
    ["background", "background, not reconciled", "foreground", "foreground, not reconciled", "nobody", "a mistake"],
)
@with_harness
async def test_the_slice_of_a_model_deleted_a_moment_ago_is_waited_for(harness: Harness, by: str) -> None:
    put_node(harness, ("1g.10gb", "2g.20gb", "2g.20gb"))
    deleted = put_model(harness, "m1", memory="9Gi")
    await harness.sync(deleted)
    put_pod(harness, "m1", "1g.10gb")
    harness.now += 10
    await harness.sync(put_model(harness, "other", memory="12Gi"))
    # The inventory is still good for 10 s, and it does not show that the pod ends.
    if by.startswith("foreground"):
        now = TODAY.strftime("%Y-%m-%dT%H:%M:%SZ")
        harness.api.put("inferencemodels", "prod", "m1", metadata={"deletionTimestamp": now})
    elif by != "nobody":
        del harness.api.objects["inferencemodels", "prod", "m1"]
    if not by.endswith("not reconciled"):
        await harness.sync(deleted)
    if by == "a mistake":
        # It was made again at once, and its pod is seen to have the slice.
        await harness.sync(put_model(harness, "m1", memory="9Gi"))
        harness.now += 10
    await harness.sync(put_model(harness, "m9", memory="9Gi"))
    is_ending = by not in {"nobody", "a mistake"}
    assert devices(harness, "m9") == f"{SLICE}{'1g.10gb' if is_ending else '2g.20gb'}"
    # Minutes later the pod still has its slice, so it was to be kept.
    harness.now += GONE_S + RESERVED_S
    put_node(harness, ("1g.10gb", "3g.40gb"))
    await harness.sync(put_model(harness, "late", memory="9Gi"))
    assert devices(harness, "late") == f"{SLICE}3g.40gb"


@pytest.mark.parametrize("holder", ["ending", "own", "other"])
@with_harness
async def test_an_update_surges_onto_a_slice_that_is_free_soon(harness: Harness, holder: str) -> None:
    put_node(harness, ("2g.20gb",) if holder == "own" else ("2g.20gb", "2g.20gb"))
    model = put_model(harness, "digits", memory="12Gi")
    await harness.sync(model)
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    if holder != "own":
        ends_at = (TODAY + datetime.timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
        put_pod(harness, "m1", "2g.20gb", **({"deletionTimestamp": ends_at} if holder == "ending" else {}))
    put_model(harness, "digits", memory="12Gi", env=[{"name": "N", "value": "1"}])
    harness.now += 10
    await harness.sync(model)
    assert harness.condition("RolloutStrategy")["reason"] == ("Surge" if holder == "ending" else "InPlace")


@pytest.mark.parametrize("rollout", [{"rebalance": True}, {}, {"rebalance": True, "paused": True}])
@with_harness
async def test_a_model_moves_to_a_smaller_slice_only_if_it_may(harness: Harness, rollout: dict[str, bool]) -> None:
    rebalance = rollout == {"rebalance": True}
    put_node(harness, ("2g.20gb",))
    small = put_model(harness, "m9", memory="9Gi", rollout=rollout)
    await harness.sync(small)
    put_pod(harness, "m9", "2g.20gb")
    waits = put_model(harness, "digits", memory="12Gi")
    await harness.sync(waits)
    lacks = {"reason": "Unschedulable", "message": f"0/1 nodes: 1 Insufficient {SLICE}2g.20gb"}
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "False", **lacks})
    put_node(harness, ("1g.10gb", "2g.20gb"))
    harness.now += 10
    await harness.sync(small)
    assert devices(harness, "m9") == f"{SLICE}2g.20gb"

    await harness.sync(waits)
    assert "held by im/m9; im/m9 would fit on the free 1g.10gb; 0/1 nodes" in placed(harness, "digits")[1]
    assert (small in harness.woken) == rebalance
    await harness.sync(small)
    assert devices(harness, "m9") == f"{SLICE}{'1g.10gb' if rebalance else '2g.20gb'}"
    # The model keeps its device. While it moves, no other object is asked for room.
    await harness.sync(small)
    await harness.sync(waits)
    assert devices(harness, "m9") == f"{SLICE}{'1g.10gb' if rebalance else '2g.20gb'}"
    assert ("would fit" in placed(harness, "digits")[1]) != rebalance


@with_harness
async def test_no_model_moves_for_one_that_gets_a_free_device(harness: Harness) -> None:
    put_node(harness, ("2g.20gb",))
    small = put_model(harness, "m9", memory="9Gi", rollout={"rebalance": True})
    await harness.sync(small)
    put_pod(harness, "m9", "2g.20gb")
    waits = put_model(harness, "digits", memory="12Gi")
    await harness.sync(waits)
    lacks = {"reason": "Unschedulable", "message": f"0/1 nodes: 1 Insufficient {SLICE}2g.20gb"}
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "False", **lacks})
    put_node(harness, ("1g.10gb", "2g.20gb", "2g.20gb"))
    harness.now += 10
    await harness.sync(waits)
    assert small not in harness.woken
    assert "headroom); devices that fit are free, or will be soon; 0/1 nodes" in placed(harness, "digits")[1]


@pytest.mark.parametrize("policy", ["Surge", "Auto"])
@with_harness
async def test_a_forced_surge_without_a_spare_names_the_remedy(harness: Harness, policy: str) -> None:
    put_node(harness, ("2g.20gb",))
    model = put_model(harness, "digits", memory="12Gi", rollout={"policy": policy})
    await harness.sync(model)
    put_pod(harness, "digits", "2g.20gb")
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="a")
    put_model(harness, "digits", memory="12Gi", rollout={"policy": policy}, env=[{"name": "N", "value": "1"}])
    harness.now += 10
    await harness.sync(model)
    lacks = {"reason": "Unschedulable", "message": f"0/1 nodes: 1 Insufficient {SLICE}2g.20gb"}
    create_pod(harness, "digits-2-x", {"type": "PodScheduled", "status": "False", **lacks})
    harness.now += 10
    await harness.sync(model)
    message = placed(harness, "digits")[1]
    assert ("Auto or InPlace lets an old pod go first; 0/1 nodes" in message) == (policy == "Surge")
    assert "held by" not in message
