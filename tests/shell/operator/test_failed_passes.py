"""Reconciles that fail before, between or after the writes of children: the object's status says why."""

from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.reconciler import REPORT_AFTER_S
from support.kube_api import Fault
from support.loops import with_opened
from support.operator_harness import SPEC, Harness, open_harness, with_harness

SLEEPS = {**SPEC, "autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "10m", "zeroBy": "HPA"}}}
MISSPELLED = {"scaleUp": {"stabilisationWindowSeconds": 60}}
TYPED = (
    "failed to create typed patch object (prod/digits; autoscaling/v2, Kind=HorizontalPodAutoscaler): "
    ".spec.behavior.scaleUp.stabilisationWindowSeconds: field not declared in schema"
)
HPAS = "horizontalpodautoscalers"
NO_RIGHT = f'{HPAS}.autoscaling is forbidden: User "operator" cannot list resource "{HPAS}"'
REFUSED_READS = {
    "the scalers of others": (f"GET .*/{HPAS}\\?", NO_RIGHT),
    "the object itself": (
        "GET .*/inferencemodels/digits",
        'inferencemodels.halimede.dev "digits" is forbidden: User "operator" cannot get resource "inferencemodels"',
    ),
}


@pytest.mark.parametrize("made_before", [False, True])
@with_harness
async def test_a_scaler_that_a_check_refuses_is_in_the_status(harness: Harness, made_before: bool):
    if made_before:
        harness.api.put("inferencemodels", "prod", "digits", spec=SPEC)
        await harness.sync()
    autoscaling = {**SLEEPS["autoscaling"], "behavior": MISSPELLED}
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "autoscaling": autoscaling})
    harness.api.faults.append(Fault(f"PATCH .*/{HPAS}/", status=500, message=TYPED))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.PERMANENT
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
    assert harness.digits()["status"]["observedGeneration"] == harness.digits()["metadata"]["generation"]
    assert accepted["message"] == (
        "HorizontalPodAutoscaler prod/digits: spec.autoscaling.behavior.scaleUp.stabilisationWindowSeconds: "
        "field not declared in schema"
    )
    assert harness.api.named("deployments") == {"digits"}


@pytest.mark.parametrize("what", REFUSED_READS)
@with_harness
async def test_a_refused_read_is_in_the_status_until_it_is_allowed(harness: Harness, what: str):
    requests, message = REFUSED_READS[what]
    harness.api.put("inferencemodels", "prod", "digits", spec=SLEEPS)
    harness.api.faults.append(Fault(requests, status=403, reason="Forbidden", message=message))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.PERMANENT
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "Forbidden")
    assert message in accepted["message"]
    assert accepted["message"].startswith("GET /apis/")
    harness.api.faults.clear()
    assert isinstance(await harness.sync(), Done)
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_a_read_that_keeps_failing_is_reported_after_a_while(harness: Harness):
    """Its cause is over by itself, so it is not reported at once."""
    assert await harness.sync() == Done()
    harness.api.put("inferencemodels", "prod", "digits", spec=SLEEPS)
    whole = harness.children()
    harness.api.faults.append(Fault(f"GET .*/{HPAS}\\?", status=503, message="the server is busy"))
    for _ in range(3):
        outcome = await harness.sync()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.condition("Ready")["reason"]) == (Failure.TRANSIENT, "Pending")
        harness.now += REPORT_AFTER_S / 3
    harness.now += REPORT_AFTER_S
    await harness.sync()
    ready = harness.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")
    assert ready["message"].endswith("the server is busy; it is tried again")
    assert harness.children() == whole


@with_harness
async def test_a_conflict_is_tried_again_and_is_not_in_the_status(harness: Harness):
    await harness.sync()
    before = harness.digits()["status"]
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 2})
    harness.api.faults.append(Fault("PATCH .*/deployments/", status=409, reason="Conflict", times=1))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert (outcome.failure, harness.digits()["status"]) == (Failure.CONFLICT, before)


@with_harness
async def test_a_fault_of_the_operator_itself_is_in_the_status(harness: Harness, caplog: pytest.LogCaptureFixture):
    harness.api.put("inferencemodels", "prod", "digits", spec=SLEEPS)
    # No API server answers with such a target.
    harness.api.faults.append(Fault(f"GET .*/{HPAS}\\?", body={"items": [{"spec": {"scaleTargetRef": 1}}]}))
    outcomes = []
    for _ in range(2):
        outcomes.append(await harness.sync())
        harness.now += REPORT_AFTER_S
    assert [each.failure for each in outcomes if isinstance(each, Failed)] == [Failure.TRANSIENT] * 2
    ready = harness.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")
    assert ready["message"].startswith("the operator failed: ")
    assert "Traceback" in caplog.text


# Settings of which no plan can be made: those of the plan are missing.
@with_opened(partial(open_harness, platform=cast(Platform, SimpleNamespace(max_replicas=500))))
async def test_a_plan_that_cannot_be_made_is_in_the_status(harness: Harness):
    for _ in range(2):
        assert isinstance(await harness.sync(), Failed)
        harness.now += REPORT_AFTER_S
    assert harness.condition("Ready")["message"].startswith("the operator failed: AttributeError")


@with_harness
async def test_the_status_of_an_object_of_another_operator_is_left_alone(harness: Harness):
    await harness.sync()
    lease = {"spec": {"holderIdentity": "other"}}
    harness.api.put("leases", "halimede", "other", **lease)
    status = {**harness.digits()["status"], "operator": "halimede/other"}
    harness.api.put("inferencemodels", "prod", "digits", status=status)
    harness.api.faults.append(Fault("GET .*/leases/other", status=503, times=1))
    assert isinstance(await harness.sync(), Failed)
    harness.now += 2 * REPORT_AFTER_S
    harness.api.faults.append(Fault("GET .*/leases/other", status=503, times=1))
    assert isinstance(await harness.sync(), Failed)
    assert harness.digits()["status"] == status
