"""Devices of pods that are ending: an object waits for them rather than taking a larger kind for good."""

import pytest

from halimede_operator.core.placement.choice import Demand, better_than, choose, demand_of, room_for, smaller_kind
from halimede_operator.core.placement.ledger import OVERDUE_S, Ledger
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Accelerator, AcceleratorType, Workload
from support.device_nodes import inventory, node, pod
from support.operator_specs import model_key

SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-2g.20gb"
NOW, SOON, PAST = "2026-11-22T09:01:00Z", "2026-11-22T09:01:30Z", "2026-11-22T09:00:40Z"
NODES = [node("a", ("1g.10gb", "2g.20gb"))]


def demand(name: str = "m9", replicas: int = 1) -> Demand:
    accelerator = Accelerator(AcceleratorType.MIG, mig_min_memory_mib=9 * 1024)
    return demand_of(model_key(name), Workload(replicas=replicas, accelerator=accelerator), {"spec": {}})


def ledger(*pods: Object, gone: str = "") -> Ledger:
    return Ledger(inventory(NODES, pods), NOW, [model_key(gone)] if gone else [])


def resource(found: Ledger, name: str = "m9") -> str | None:
    placement = choose(demand(name), found)
    return placement and placement.resource


def test_an_object_waits_for_a_small_slice_of_a_pod_that_is_ending() -> None:
    assert resource(ledger(pod(SMALL, on="a", of="m1"))) == LARGE
    assert resource(ledger(pod(SMALL, on="a", of="m1", ends_at=SOON))) == SMALL
    assert resource(ledger(pod(SMALL, on="a", namespace="other", ends_at=SOON))) == SMALL


def test_a_pod_that_is_overdue_keeps_its_device() -> None:
    """Its node may be lost, and then it never ends."""
    assert OVERDUE_S < 20
    assert resource(ledger(pod(SMALL, on="a", of="m1", ends_at=PAST))) == LARGE


def test_pods_of_a_deleted_object_are_ending_before_they_are_marked() -> None:
    assert resource(ledger(pod(SMALL, on="a", of="m1"), gone="m1")) == SMALL
    assert resource(ledger(pod(SMALL, on="a", of="m1"), gone="m2")) == LARGE


def test_a_device_that_is_free_soon_goes_to_one_object_only() -> None:
    found = ledger(pod(SMALL, on="a", of="m1", ends_at=SOON))
    first = demand("first")
    placement = choose(first, found)
    assert placement is not None
    claim = first.claim(placement)
    entered = found.enter(claim)
    assert (placement.resource, entered) == (SMALL, [("a", 1)])
    assert resource(found, "second") == LARGE
    found.withdraw(claim, entered)
    assert resource(found, "second") == SMALL


def test_a_free_device_is_claimed_before_one_that_is_free_soon() -> None:
    nodes = [node("a", ("1g.10gb",)), node("b", ("1g.10gb",))]
    found = Ledger(inventory(nodes, [pod(SMALL, on="a", ends_at=SOON)]), NOW)
    wanted = demand(replicas=2)
    placement = choose(wanted, found)
    assert placement is not None
    assert found.enter(wanted.claim(placement), 2) == [("b", 1), ("a", 1)]


def test_own_pods_that_are_ending_count_once() -> None:
    found = ledger(pod(SMALL, on="a", of="m9", ends_at=SOON))
    placement = choose(demand(), found)
    assert placement is not None
    assert (placement.resource, room_for(demand(), placement, found)) == (SMALL, 1)
    assert [room_for(demand(), placement, found, own=own, ending=False) for own in (True, False)] == [0, 0]
    # A new pod beside the old one would get the device soon.
    assert room_for(demand(), placement, found, own=False) == 1


def test_pods_that_are_ending_are_not_those_that_an_object_waits_for() -> None:
    """An object that is deleted and made again has pods of before."""
    found = inventory(
        NODES, [pod(SMALL, on="a", of="m9", ends_at=SOON), pod(SMALL, on="a", of="m9"), pod(SMALL, of="m9")]
    )
    assert found.pods_of(model_key("m9"), SMALL, found.nodes) == 2


def test_a_waiting_pod_moves_when_the_grace_period_is_over() -> None:
    waits = pod(SMALL, of="m9")
    current = choose(demand(), ledger(pod(SMALL, on="a", ends_at=SOON)))
    assert current is not None
    assert better_than(current, demand(), ledger(pod(SMALL, on="a", ends_at=SOON), waits)) is None
    moved = better_than(current, demand(), ledger(pod(SMALL, on="a", ends_at=PAST), waits))
    assert moved is not None
    assert moved.resource == LARGE


@pytest.mark.parametrize(
    ("pods", "replicas", "expected"),
    [
        ([], 1, SMALL),
        ([], 2, None),
        ([pod(SMALL, on="a", of="other")], 1, None),
        ([pod(SMALL, on="a", of="other", ends_at=SOON)], 1, None),
    ],
)
def test_a_smaller_kind_must_be_free_now_for_all_pods(pods: list[Object], replicas: int, expected: str | None) -> None:
    current = choose(demand(), ledger(pod(SMALL, on="a", of="other")))
    assert current is not None
    assert current.resource == LARGE
    smaller = smaller_kind(current, demand(replicas=replicas), ledger(pod(LARGE, on="a", of="m9"), *pods))
    assert (smaller and smaller.resource) == expected


def test_a_smaller_device_that_is_kept_for_the_object_is_found_again() -> None:
    """Its update may have been postponed."""
    found = ledger(pod(LARGE, on="a", of="m9"))
    current = choose(demand(), ledger(pod(SMALL, on="a", of="other")))
    assert current is not None
    smaller = smaller_kind(current, demand(), found)
    assert smaller is not None
    found.enter(demand().claim(smaller))
    assert smaller_kind(current, demand(), found) == smaller
    assert smaller_kind(current, demand("second"), found) is None


def test_the_smallest_kind_has_no_smaller_one() -> None:
    current = choose(demand(), ledger())
    assert current is not None
    assert (current.resource, smaller_kind(current, demand(), ledger())) == (SMALL, None)
