"""What an operator writes without the lease, and of the objects of another release."""

from copy import deepcopy

import pytest

from halimede_operator.cluster.kinds import BY_KIND
from halimede_operator.cluster.other_operators import KEPT_S
from halimede_operator.core.process.operator_mark import FREE_AFTER_S
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.reconciler import (
    OTHER_OPERATOR_AGAIN_S,
    UNCLAIMED_S,
)
from support.kube_api import Fault
from support.operator_harness import DIGITS, SPEC, Harness, second_operator, with_harness


@with_harness
async def test_without_the_lease_nothing_is_written(harness: Harness):
    harness.leads = False
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert harness.api.writes() == {}


@with_harness
async def test_the_lease_is_checked_before_every_write(harness: Harness):
    def lose() -> None:
        harness.leads = False

    harness.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=lose))
    await harness.sync()
    assert harness.api.writes() == {"PATCH configmaps": 1, "PATCH serviceaccounts": 1}


OTHER = "elsewhere/other"


def _lease(harness: Harness, renewed: int) -> None:
    harness.api.put("leases", "halimede", "this", spec={"holderIdentity": "a", "renewTime": str(renewed)})


@with_harness
async def test_an_object_of_another_release_is_left_alone_and_reported_once(harness: Harness):
    _lease(harness, 1)
    await harness.sync()
    assert harness.digits()["status"]["operator"] == "halimede/this"
    before = deepcopy(harness.api.objects)
    async with second_operator(harness, OTHER) as other:
        for renewed in range(2, 5):
            assert await other.sync() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
            _lease(harness, renewed)
            harness.now += FREE_AFTER_S - 1
        (event,) = [value for (plural, _, _), value in harness.api.objects.items() if plural == "events"]
        assert (event["type"], event["reason"]) == ("Warning", "OtherOperator")
        assert "halimede/this" in event["message"]
        kept = {where: value for where, value in harness.api.objects.items() if where[0] not in ("events", "leases")}
        assert kept == {where: value for where, value in before.items() if where[0] != "leases"}


@pytest.mark.parametrize("is_deleted", [True, False])
@with_harness
async def test_an_object_of_a_removed_release_is_taken_over(harness: Harness, is_deleted: bool):
    _lease(harness, 1)
    await harness.sync()
    async with second_operator(harness, OTHER) as other:
        assert await other.sync() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
        if is_deleted:
            harness.api.remove("leases", "halimede", "this")
        other.now = harness.now = harness.now + (KEPT_S if is_deleted else FREE_AFTER_S)
        assert await other.sync() == Done()
        assert harness.digits()["status"]["operator"] == OTHER
        # The one that comes back sees it before it writes.
        harness.api.put("leases", "elsewhere", "other", spec={"holderIdentity": "b"})
        harness.api.remove("services", "prod", "digits")
        # Its watches have not reported the change yet: its cache still has the object as its own, without a child.
        version = int(harness.api.objects["leases", "elsewhere", "other"]["metadata"]["resourceVersion"])
        harness.cache.listed(BY_KIND["Service"], None, version + 1, frozenset())
        outcome = await harness.reconcile(DIGITS)
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.CONFLICT
        assert await harness.reconcile(DIGITS) == Done(again_in=OTHER_OPERATOR_AGAIN_S)
        assert ("services", "prod", "digits") not in harness.api.objects


@with_harness
async def test_an_unreadable_lease_counts_as_renewed(harness: Harness):
    await harness.sync()
    harness.api.faults.append(Fault("GET .*/leases/", status=403, reason="Forbidden"))
    async with second_operator(harness, OTHER) as other:
        for _ in range(3):
            assert await other.sync() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
            harness.now += FREE_AFTER_S


@with_harness
async def test_a_new_object_is_first_left_to_other_running_operators(harness: Harness):
    _lease(harness, 1)
    await harness.sync()
    async with second_operator(harness, OTHER) as other:
        await other.sync()
        key = Key(Kind.INFERENCE_MODEL, "prod", "new")
        harness.api.put("inferencemodels", "prod", "new", spec=SPEC)
        before = harness.api.writes()
        assert await other.sync(key) == Done(again_in=UNCLAIMED_S)
        assert harness.api.writes() == before
        harness.now += UNCLAIMED_S
        assert await other.sync(key) == Done()
        assert harness.api.objects["inferencemodels", "prod", "new"]["status"]["operator"] == OTHER
