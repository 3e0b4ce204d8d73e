"""Devices on real nodes: which ones models get, what a model without any says, and updates where none is free."""

import json
import re
import threading
import time

import pytest

from cluster.gpus import Gpus, Layout
from cluster.installed import Tenant
from cluster.models import QUESTION, SECONDS_TO_REPORT, START_LIMIT_S, Object, apply, model
from cluster.spaces import eventually

pytestmark = [pytest.mark.large, pytest.mark.usefixtures("second_node")]

ANSWER = {"OUT": [2, 4, 6, 8]}
RELIST_S = 11.0
"""By then the operator lists nodes and pods again, and knows what has changed."""


def test_models_get_the_smallest_slice_that_fits(tenant: Tenant, gpus: Gpus, scaled: str) -> None:
    gpus.install("node-1", Layout([["1g.10gb", "2g.20gb"]]))
    gpus.install("node-2", Layout([["4g.40gb"], ["4g.40gb"]], strategy="single"))
    time.sleep(RELIST_S)
    apply(
        tenant,
        model("small", scaled, accelerator=by_memory("9Gi")),
        model("large", scaled, accelerator=by_memory("30Gi")),
        model("first", scaled, accelerator=by_memory("12Gi")),
        model("whole", scaled, accelerator={"type": "GPU"}),
    )
    for name in ("small", "large", "first"):
        tenant.wait_ready(f"im/{name}", START_LIMIT_S)
    assert {name: placed(tenant, name) for name in ("small", "large", "first")} == {
        "small": ("nvidia.com/mig-1g.10gb", "", "node-1"),
        "large": ("nvidia.com/gpu", "4g.40gb", "node-2"),
        "first": ("nvidia.com/mig-2g.20gb", "", "node-1"),
    }
    # A slice that is offered as nvidia.com/gpu is free, but it is no GPU, and no hint for one.
    message = tenant.wait_for_reason("im/whole", "InsufficientDevices")
    assert "need 1x GPU; no GPU is free; no node has devices that fit" in message
    assert "node-1" in tenant.kubectl("get", "im/small", "-o", "wide")

    # Two models want the only slice that is left.
    gpus.install("node-2", Layout([]))
    time.sleep(RELIST_S)
    begun = time.monotonic()
    apply(tenant, model("second", scaled, accelerator=by_memory("12Gi")))
    tenant.wait_for_reason("im/second", "InsufficientDevices")
    assert time.monotonic() < begun + SECONDS_TO_REPORT
    holder = "nearest: 2g.20gb on node-1, held by im/first"
    eventually(lambda: holder in tenant.condition("im/second")["message"], "the holder to be named")
    tenant.kubectl("delete", "im/first", "--wait=false")
    eventually(lambda: not tenant.names("pods", "--selector=halimede.dev/model=first"), "the first one's pod to go", 90)
    freed = time.monotonic()
    tenant.wait_ready("im/second", START_LIMIT_S)
    print(f"\nserved {time.monotonic() - freed:.1f} s after the slice was free")
    assert tenant.infer("second", QUESTION) == ANSWER


def test_a_small_slice_is_waited_for_and_a_model_moves_to_one_for_another(
    tenant: Tenant, gpus: Gpus, scaled: str
) -> None:
    gpus.install("node-1", Layout([["1g.10gb", "2g.20gb"]]))
    gpus.install("node-2", Layout([]))
    time.sleep(RELIST_S)
    small, large = (f"nvidia.com/mig-{profile}" for profile in ("1g.10gb", "2g.20gb"))
    apply(tenant, model("m1", scaled, accelerator=by_memory("9Gi")))
    tenant.wait_ready("im/m1", START_LIMIT_S)
    tenant.kubectl("delete", "im/m1", "--wait=false")
    apply(tenant, model("m9", scaled, accelerator=by_memory("9Gi")))
    tenant.wait_ready("im/m9", START_LIMIT_S)
    assert placed(tenant, "m9") == (small, "", "node-1")
    (placement,) = tenant.get("im/m9")["status"]["placements"]
    assert re.fullmatch(r"m9-\S+ on node-1(: 1g\.10gb MIG-\S+)?", placement), placement

    apply(tenant, model("moves", scaled, accelerator=by_memory("9Gi"), rollout={"rebalance": True}))
    tenant.wait_ready("im/moves", START_LIMIT_S)
    assert placed(tenant, "moves")[0] == large
    tenant.kubectl("delete", "im/m9")
    eventually(lambda: not tenant.names("pods", "--selector=halimede.dev/model=m9"), "m9's pod to go", 90)
    begun = time.monotonic()
    apply(tenant, model("large", scaled, accelerator=by_memory("12Gi")))
    tenant.wait_ready("im/large", START_LIMIT_S)
    print(f"\nserved {time.monotonic() - begun:.1f} s after it was applied")
    assert [placed(tenant, name)[0] for name in ("moves", "large")] == [small, large]
    assert [tenant.infer(name, QUESTION) for name in ("moves", "large")] == [ANSWER, ANSWER]


def test_an_update_without_a_free_device_says_before_how_long_nothing_serves(
    tenant: Tenant, gpus: Gpus, scaled: str
) -> None:
    gpus.install("node-1", Layout([["4g.40gb"]]))
    time.sleep(RELIST_S)

    def update(number: int) -> None:
        """Apply the model with another environment, which needs new pods."""
        env = [{"name": "NUMBER", "value": str(number)}]
        apply(tenant, model("only", scaled, accelerator=by_memory("12Gi"), env=env))

    update(1)
    tenant.wait_ready("im/only", START_LIMIT_S)
    [before] = tenant.get("pods")["items"]
    stop, gaps = threading.Event(), list[float]()
    watching = threading.Thread(target=watch_gaps, args=(tenant, stop, gaps))
    watching.start()
    update(2)
    told = eventually(lambda: tenant.condition("im/only", "RolloutStrategy") or None, "the strategy to be told")
    old = f"pod/{before['metadata']['name']}"
    eventually(lambda: old not in tenant.names("pods"), "the old pod to end", 90)
    eventually(lambda: serves(tenant), "the new pod to serve", 150)
    stop.set()
    watching.join()
    assert told["reason"] == "InPlace"
    stated = re.search(
        r"no further nvidia.com/mig-4g.40gb is free: the old pod goes before the new one starts; "
        r"nothing serves for about (\d+) s, by the last start, and for up to (\d+) s more",
        told["message"],
    )
    assert stated is not None, told["message"]
    print(f"\nstated {stated[1]} s, measured {max(gaps):.1f} s")
    assert 0 < max(gaps) <= float(stated[1]) + float(stated[2])
    # With a free device the next update has no gap.
    gpus.install("node-2", Layout([["4g.40gb"]]))
    time.sleep(RELIST_S)
    update(3)
    told = eventually(lambda: tenant.condition("im/only", "RolloutStrategy") or None, "the strategy to be told")
    assert (told["reason"], told["message"][:9]) == ("Surge", "a further"), told["message"]
    eventually(lambda: not tenant.condition("im/only", "RolloutStrategy"), "the end of the update", START_LIMIT_S)
    assert tenant.infer("only", QUESTION) == ANSWER


def watch_gaps(tenant: Tenant, stop: threading.Event, gaps: list[float]) -> None:
    """For how long the Service has no ready endpoint, each time."""
    served = time.monotonic()
    gaps.append(0.0)
    while not stop.is_set():
        now = time.monotonic()
        if serves(tenant):
            served = now
            gaps.append(0.0)
        else:
            gaps[-1] = now - served
        stop.wait(0.5)


def serves(tenant: Tenant) -> bool:
    slices: Object = json.loads(
        tenant.kubectl("get", "endpointslices", "--selector=kubernetes.io/service-name=only", "-o", "json")
    )
    endpoints = [each for found in slices["items"] for each in found.get("endpoints") or ()]
    return any(each["conditions"].get("ready") for each in endpoints)


def by_memory(memory: str) -> Object:
    return {"type": "MIG", "mig": {"minMemory": memory}}


def placed(tenant: Tenant, name: str) -> tuple[str, str, str]:
    """The resource, the profile if the resource does not name it, and the nodes."""
    effective = tenant.get(f"im/{name}")["status"]["effective"]
    return effective["resourceName"], effective.get("profile", ""), effective["nodes"]
