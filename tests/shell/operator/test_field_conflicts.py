"""Fields of others that make our apply fail are taken over, and no more than these."""

from copy import deepcopy
from typing import Any

from halimede_operator.core.process.workqueue import Failure
from halimede_operator.queue import Done, Failed
from support.kube_api import Fault
from support.operator_harness import DIGITS, Harness, with_harness


def _edited_variable(harness: Harness) -> dict[str, Any]:
    """Somebody sets a value for the server's POD_IP; the API server refuses our source beside it."""
    deployment = deepcopy(harness.api.objects["deployments", "prod", "digits"])
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    (variable,) = (each for each in server["env"] if each["name"] == "POD_IP")
    del variable["valueFrom"]
    variable["value"] = "1.2.3.4"
    fields = _in_server({"f:env": {'k:{"name":"POD_IP"}': {"f:value": {}}}, "f:stdin": {}})
    entry = {"manager": "kubectl-set", "operation": "Update", "apiVersion": "apps/v1", "fieldsV1": fields}
    return harness.api.put(
        "deployments", "prod", "digits", spec=deployment["spec"], metadata={"managedFields": [entry]}
    )  # fmt: skip


def _in_server(fields: dict[str, Any]) -> dict[str, Any]:
    return {"f:spec": {"f:template": {"f:spec": {"f:containers": {'k:{"name":"server"}': fields}}}}}


def _two_sources(times: int | None) -> Fault:
    cause = {"reason": "FieldValueInvalid", "field": "spec.template.spec.containers[0].env[2].valueFrom"}
    message = "valueFrom: may not be specified when `value` is not empty"
    return Fault(f"PATCH {APPLY}", status=422, reason="Invalid", message=message, causes=(cause,), times=times)


APPLY = r".*/deployments/digits\?.*force=true"
OWNERS = r"^PATCH .*/deployments/digits\?(?!.*force=true)"


@with_harness
async def test_an_edit_that_makes_our_apply_fail_is_undone(harness: Harness):
    """O-44."""
    await harness.sync()
    whole = harness.children()
    _edited_variable(harness)
    harness.api.faults.append(_two_sources(times=1))
    assert await harness.sync() == Done()
    assert (harness.children(), harness.api.counted(OWNERS)) == (whole, 1)
    ours, theirs = harness.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"]
    assert ours["manager"] == "halimede-operator"
    assert ours["fieldsV1"] == _in_server({"f:env": {'k:{"name":"POD_IP"}': {"f:value": {}}}})
    assert theirs["fieldsV1"] == _in_server({"f:stdin": {}}), "what is in nobody's way"
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_a_lasting_refusal_is_reported_and_no_more_fields_are_taken(harness: Harness):
    await harness.sync()
    _edited_variable(harness)
    harness.api.faults.append(_two_sources(times=None))
    outcomes = [await harness.sync() for _ in range(3)]
    assert [outcome.failure for outcome in outcomes if isinstance(outcome, Failed)] == [Failure.PERMANENT] * 3
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
    assert "may not be specified" in accepted["message"]
    # The first one of four was the model's making, and one reconcile tried twice.
    assert (harness.api.counted(OWNERS), harness.api.counted(f"PATCH {APPLY}")) == (1, 1 + 4)


@with_harness
async def test_no_fields_are_taken_from_a_child_that_changes_meanwhile(harness: Harness):
    await harness.sync()
    whole = harness.children()
    before = _edited_variable(harness)["metadata"]["managedFields"]
    refusal = _two_sources(times=2)
    edit = Fault(OWNERS, times=1, then=lambda: harness.api.put("deployments", "prod", "digits", metadata={"x": "y"}))
    harness.api.faults += [refusal, edit]
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.CONFLICT
    assert harness.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"] == before
    assert await harness.sync() == Done()
    assert harness.children() == whole


@with_harness
async def test_no_fields_are_taken_from_another_owners_object(harness: Harness):
    await harness.sync()
    _edited_variable(harness)
    harness.relist()
    theirs = {"name": "web", "kind": "Harness", "uid": "x", "controller": True}
    harness.api.put("deployments", "prod", "digits", metadata={"ownerReferences": [theirs]})
    harness.api.faults.append(_two_sources(times=None))
    assert isinstance(await harness.reconcile(DIGITS), Failed)
    assert harness.api.counted(OWNERS) == 0
