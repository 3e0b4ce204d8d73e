"""Successive reconciles against an API server with injected faults. There are no kubelets and no controllers, so no pods."""

import asyncio
import datetime
import email.utils
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from halimede_operator.cluster.decoding import decode
from halimede_operator.cluster.kinds import BY_KIND, MODELS
from halimede_operator.cluster.other_operators import KEPT_S
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.operator_mark import FREE_AFTER_S
from halimede_operator.core.workqueue import Failure
from halimede_operator.queue import Done, Failed, Gone
from halimede_operator.reconcile.changes import ROLLOUT_SPACING_S
from halimede_operator.reconcile.observer import MOST_PODS_ASKED
from halimede_operator.reconcile.reconciler import (
    CONFLICT_AGAIN_S,
    DEADLINE_AGAIN_S,
    EVENTS_AFTER_S,
    OTHER_OPERATOR_AGAIN_S,
    REPORT_AFTER_S,
    UNCLAIMED_S,
    UNSCHEDULED_AGAIN_S,
)
from support.kube_api import Fault, deep
from support.operator_harness import CHILDREN, DIGITS, SPEC, Harness, beside, run

DEEP = '{"a":' * 9_000 + "1" + "}" * 9_000


def test_a_new_model_gets_children_and_a_status_then_no_more_writes(tmp_path: Path):
    async def story(harness: Harness) -> None:
        assert await harness.again() == Done()
        written = harness.api.writes()
        assert written == {
            "PATCH configmaps": 1,
            "PATCH serviceaccounts": 1,
            "PATCH services": 2,
            "PATCH deployments": 1,
            "PATCH inferencemodels": 1,
        }
        # What we wrote is known without a watch.
        assert await harness.reconcile(DIGITS) == Done()
        assert await harness.again() == Done()
        assert harness.api.writes() == written

    run(story, tmp_path)


def test_an_edited_or_deleted_child_is_restored(tmp_path: Path):
    """O-44."""

    async def story(harness: Harness) -> None:
        await harness.again()
        whole = harness.children()
        deployment = harness.api.objects["deployments", "prod", "digits"]
        harness.api.put("deployments", "prod", "digits", spec={**deployment["spec"], "replicas": 7})
        harness.api.remove("services", "prod", "digits")
        await harness.again()
        assert harness.children() == whole

    run(story, tmp_path)


def test_a_deleted_object_gets_no_children_from_an_old_cache(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.hear()
        harness.api.remove("inferencemodels", "prod", "digits")
        assert await harness.reconcile(DIGITS) == Done()
        assert (harness.api.writes(), await harness.reconcile(DIGITS)) == ({}, Gone())

    run(story, tmp_path)


def test_a_recreated_object_gets_no_children_of_the_old_one(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.hear()
        harness.api.remove("inferencemodels", "prod", "digits")
        new = harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/other"}})
        outcome = await harness.reconcile(DIGITS)
        assert (isinstance(outcome, Failed) and outcome.failure, harness.api.writes()) == (Failure.CONFLICT, {})
        # And the next time it is the new one, without any news.
        assert await harness.reconcile(DIGITS) == Done()
        deployment = harness.api.objects["deployments", "prod", "digits"]
        assert deployment["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]

    run(story, tmp_path)


def test_a_spec_changed_before_the_first_write_is_planned_anew(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.hear()
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
        outcome = await harness.reconcile(DIGITS)
        assert (isinstance(outcome, Failed) and outcome.failure, harness.api.writes()) == (Failure.CONFLICT, {})
        await harness.reconcile(DIGITS)
        assert harness.api.objects["deployments", "prod", "digits"]["spec"]["replicas"] == 3

    run(story, tmp_path)


def test_a_spec_changed_during_writes_is_not_reported_as_done(tmp_path: Path):
    async def story(harness: Harness) -> None:
        def edit() -> None:
            harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
            harness.hear()

        harness.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=edit))
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, "status" in harness.digits()) == (Failure.CONFLICT, False)
        assert await harness.reconcile(DIGITS) == Done()
        assert harness.digits()["status"]["observedGeneration"] == 2

    run(story, tmp_path)


def test_an_object_being_deleted_is_left_to_the_garbage_collector(tmp_path: Path):
    """O-40."""

    async def story(harness: Harness) -> None:
        harness.api.put("inferencemodels", "prod", "digits", metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"})
        assert (await harness.again(), harness.api.writes()) == (Done(), {})

    run(story, tmp_path)


@pytest.mark.parametrize("times", [1, 5])
def test_a_conflicting_status_is_written_again_from_current_state(tmp_path: Path, times: int):
    """O-06."""

    async def story(harness: Harness) -> None:
        harness.api.faults.append(Fault("PATCH .*/status", status=409, reason="Conflict", times=times))
        failures = [await harness.again() for _ in range(times)]
        assert [outcome.failure for outcome in failures if isinstance(outcome, Failed)] == [Failure.CONFLICT] * times
        assert await harness.reconcile(DIGITS) == Done()
        assert harness.digits()["status"]["observedGeneration"] == 1

    run(story, tmp_path)


def test_a_deployment_past_its_deadline_is_reconciled_again(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
        harness.api.put("deployments", "prod", "digits", status={"conditions": [late]})
        assert await harness.again() == Done(again_in=DEADLINE_AGAIN_S)

    run(story, tmp_path)


def test_an_unseen_status_is_not_overwritten(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        _an_unscheduled_pod(harness)
        harness.hear()
        harness.api.put("inferencemodels", "prod", "digits", status={"phase": "of somebody else"})
        outcome = await harness.reconcile(DIGITS)
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.digits()["status"]) == (Failure.CONFLICT, {"phase": "of somebody else"})
        assert await harness.reconcile(DIGITS) == Done(again_in=UNSCHEDULED_AGAIN_S)
        assert harness.digits()["status"]["phase"] == "Scheduling"

    run(story, tmp_path)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("2.5", 2.5),
        (email.utils.formatdate(4_102_444_800, usegmt=True), 600.0),
        (email.utils.formatdate(0, usegmt=True), 0.0),
        ("in a while", None),
        ("nan", None),
    ],
)
def test_retry_after_is_passed_to_the_queue(tmp_path: Path, header: str, seconds: float | None):
    """O-09."""

    async def story(harness: Harness) -> None:
        harness.api.faults.append(Fault("PATCH .*/deployments/", status=429, headers={"Retry-After": header}, times=1))
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, outcome.retry_after_s) == (Failure.TRANSIENT, seconds)
        assert await harness.again() == Done()

    run(story, tmp_path)


def test_a_renewed_token_is_used_at_once(tmp_path: Path):
    """O-10."""

    async def story(harness: Harness) -> None:
        harness.api.tokens = {"better"}
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.TRANSIENT
        (harness.folder / "token").write_text("better")
        assert await harness.again() == Done()

    run(story, tmp_path)


def test_proxies_and_passwords_of_the_environment_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def story(harness: Harness) -> None:
        assert await harness.again() == Done()

    run(story, tmp_path)


@pytest.mark.parametrize("plural", sorted(CHILDREN))
def test_a_forbidden_write_is_reported_and_retried_later(tmp_path: Path, plural: str):
    """O-11."""

    async def story(harness: Harness) -> None:
        message = f"{plural} is forbidden: User operator cannot patch resource {plural}"
        forbidden = Fault(f"PATCH .*/{plural}/", status=403, reason="Forbidden", message=message)
        harness.api.faults.append(forbidden)
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.PERMANENT
        degraded = harness.condition("Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "Forbidden")
        assert "patch" in degraded["message"]
        assert plural in degraded["message"]
        harness.api.faults.remove(forbidden)
        assert await harness.again() == Done()
        assert harness.condition("Degraded")["status"] == "False"

    run(story, tmp_path)


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


def test_an_edit_that_makes_our_apply_fail_is_undone(tmp_path: Path):
    """O-44."""

    async def story(harness: Harness) -> None:
        await harness.again()
        whole = harness.children()
        _edited_variable(harness)
        harness.api.faults.append(_two_sources(times=1))
        assert await harness.again() == Done()
        assert (harness.children(), harness.api.counted(OWNERS)) == (whole, 1)
        ours, theirs = harness.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"]
        assert ours["manager"] == "halimede-operator"
        assert ours["fieldsV1"] == _in_server({"f:env": {'k:{"name":"POD_IP"}': {"f:value": {}}}})
        assert theirs["fieldsV1"] == _in_server({"f:stdin": {}}), "what is in nobody's way"
        assert harness.condition("Accepted")["status"] == "True"

    run(story, tmp_path)


def test_a_lasting_refusal_is_reported_and_no_more_fields_are_taken(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        _edited_variable(harness)
        harness.api.faults.append(_two_sources(times=None))
        outcomes = [await harness.again() for _ in range(3)]
        assert [outcome.failure for outcome in outcomes if isinstance(outcome, Failed)] == [Failure.PERMANENT] * 3
        accepted = harness.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
        assert "may not be specified" in accepted["message"]
        # The first one of four was the model's making, and one reconcile tried twice.
        assert (harness.api.counted(OWNERS), harness.api.counted(f"PATCH {APPLY}")) == (1, 1 + 4)

    run(story, tmp_path)


def test_no_fields_are_taken_from_a_child_that_changes_meanwhile(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        whole = harness.children()
        before = _edited_variable(harness)["metadata"]["managedFields"]
        refusal = _two_sources(times=2)
        edit = Fault(
            OWNERS, times=1, then=lambda: harness.api.put("deployments", "prod", "digits", metadata={"x": "y"})
        )
        harness.api.faults += [refusal, edit]
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.CONFLICT
        assert harness.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"] == before
        assert await harness.again() == Done()
        assert harness.children() == whole

    run(story, tmp_path)


def test_no_fields_are_taken_from_another_owners_object(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        _edited_variable(harness)
        harness.hear()
        theirs = {"name": "web", "kind": "Harness", "uid": "x", "controller": True}
        harness.api.put("deployments", "prod", "digits", metadata={"ownerReferences": [theirs]})
        harness.api.faults.append(_two_sources(times=None))
        assert isinstance(await harness.reconcile(DIGITS), Failed)
        assert harness.api.counted(OWNERS) == 0

    run(story, tmp_path)


@pytest.mark.parametrize("status", [500, 503, 504])
def test_server_errors_are_retried(tmp_path: Path, status: int):
    async def story(harness: Harness) -> None:
        harness.api.faults.append(Fault("PATCH .*/services/", status=status, times=1))
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.TRANSIENT
        assert await harness.again() == Done()

    run(story, tmp_path)


TYPED = (
    "failed to create typed patch object (prod/digits; apps/v1, Kind=Deployment): "
    '.spec.template.spec.containers[name="server"].imagePullPolice: field not declared in schema'
)
MISTAKE = {**SPEC, "podTemplate": {"spec": {"containers": [{"name": "server", "imagePullPolice": "Never"}]}}}
STATUS_WRITES = "PATCH .*/status"


@pytest.mark.parametrize("made_before", [False, True])
def test_a_pod_template_mistake_is_reported_and_changes_no_child(tmp_path: Path, made_before: bool):
    async def story(harness: Harness) -> None:
        if made_before:
            await harness.again()
        whole = harness.children()
        harness.api.put("inferencemodels", "prod", "digits", spec=MISTAKE)
        harness.api.faults.append(Fault("PATCH .*/deployments/", status=500, message=TYPED))
        for _ in range(3):
            outcome = await harness.again()
            assert isinstance(outcome, Failed)
            assert outcome.failure is Failure.PERMANENT
        assert harness.children() == whole
        accepted = harness.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
        assert accepted["message"] == (
            "Deployment prod/digits: spec.podTemplate.spec.containers[server].imagePullPolice: field not declared in schema"
        )
        assert harness.api.counted(STATUS_WRITES) == 1 + made_before

    run(story, tmp_path)


def test_a_valid_pod_template_needs_one_dry_run(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "podTemplate": {"spec": {"hostname": "a"}}})
        assert await harness.again() == Done()
        assert await harness.again() == Done()
        assert (harness.api.counted("dryRun=All"), len(harness.children())) == (1, 5)

    run(story, tmp_path)


def test_a_lasting_failure_is_reported_once_until_it_is_over(tmp_path: Path):
    async def story(harness: Harness) -> None:
        message = 'Internal error occurred: failed calling webhook "w": dial tcp 10.0.0.1:443: connect: refused'
        webhook = Fault("PATCH .*/services/", status=500, reason="InternalError", message=message)
        harness.api.faults.append(webhook)
        for _ in range(5):
            outcome = await harness.again()
            assert isinstance(outcome, Failed)
            assert (outcome.failure, "status" in harness.digits()) == (Failure.TRANSIENT, False)
            harness.now += REPORT_AFTER_S / 5
        for _ in range(5):
            assert isinstance(await harness.again(), Failed)
            harness.now += 60
        ready = harness.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")
        assert ready["message"] == f"Service prod/digits-pods: {message}; it is tried again"
        assert (harness.condition("Accepted")["status"], harness.api.counted(STATUS_WRITES)) == ("True", 1)

        harness.api.faults.remove(webhook)
        assert await harness.again() == Done()
        assert harness.condition("Ready")["reason"] == "Pending"

    run(story, tmp_path)


def test_a_failed_rollout_is_retried_and_not_postponed(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": "1"}]})
        harness.api.faults.append(Fault("PATCH .*/deployments/", status=503, times=3))
        outcomes = [await harness.again() for _ in range(3)]
        assert [outcome.failure for outcome in outcomes if isinstance(outcome, Failed)] == [Failure.TRANSIENT] * 3
        assert await harness.again() == Done()

    run(story, tmp_path)


TERMINATING = {
    "by cause": Fault("PATCH", status=403, reason="Forbidden", message="no", causes=({"reason": "NamespaceTerminating"},)),
    "by message": Fault(
        "PATCH", status=403, reason="Forbidden", message="unable to create new content in namespace prod because it is being terminated"
    ),
    "gone": Fault("PATCH", status=404, reason="NotFound", message='namespaces "prod" not found'),
}  # fmt: skip


@pytest.mark.parametrize("fault", TERMINATING.values(), ids=TERMINATING.keys())
def test_a_namespace_being_deleted_gets_one_write_attempt(tmp_path: Path, fault: Fault):
    """O-42."""

    async def story(harness: Harness) -> None:
        harness.api.faults.append(fault)
        assert await harness.again() == Done()
        assert harness.api.writes().total() == 1

    run(story, tmp_path)


def test_another_owners_object_is_not_taken_over(tmp_path: Path):
    async def story(harness: Harness) -> None:
        theirs = harness.api.put("services", "prod", "digits", spec={"selector": {"app": "theirs"}})
        assert await harness.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.api.objects["services", "prod", "digits"] == theirs
        assert "digits" in harness.api.named("deployments"), "the others are made"
        assert any("digits" in condition["message"] and "Service" in condition["message"] for condition in harness.digits()["status"]["conditions"])  # fmt: skip

    run(story, tmp_path)


def test_a_taken_name_costs_one_request_per_check(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.hear()
        # No watch tells of it: it has no label of ours.
        harness.api.put("services", "prod", "digits", spec={})
        assert await harness.reconcile(DIGITS) == Done(again_in=CONFLICT_AGAIN_S)
        before = list(harness.api.requests)
        for _ in range(3):
            assert await harness.reconcile(DIGITS) == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.api.requests[len(before) :] == ["GET /api/v1/namespaces/prod/services/digits"] * 3

        harness.api.remove("services", "prod", "digits")
        assert await harness.reconcile(DIGITS) == Done()
        assert harness.condition("Accepted")["status"] == "True"
        assert harness.children().keys() >= {("services", "prod", "digits")}

    run(story, tmp_path)


def test_of_two_objects_with_one_child_name_the_older_gets_it(tmp_path: Path):
    async def story(harness: Harness) -> None:
        younger = Key(Kind.INFERENCE_MODEL, "prod", "digits-pods")
        harness.api.put("inferencemodels", "prod", "digits", metadata={"creationTimestamp": "2030-01-01T00:00:00Z"})
        harness.api.put(
            "inferencemodels", "prod", "digits-pods", spec=SPEC, metadata={"creationTimestamp": "2030-01-01T00:00:01Z"}
        )
        assert await harness.again(younger) == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.children() == {}
        status = harness.api.objects["inferencemodels", "prod", "digits-pods"]["status"]
        accepted = next(each for each in status["conditions"] if each["type"] == "Accepted")
        assert (accepted["reason"], accepted["message"]) == (
            "Conflict",
            "Service digits-pods exists and belongs to InferenceModel digits; rename this object, or delete what is in its way",
        )
        assert await harness.again() == Done()
        whole = harness.children()
        assert await harness.again(younger) == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.children() == whole

        harness.api.remove("inferencemodels", "prod", "digits")
        for plural, namespace, name in whole:
            harness.api.remove(plural, namespace, name)
        assert await harness.again(younger) == Done()
        assert len(harness.children()) == len(whole)

    run(story, tmp_path)


def test_an_object_created_meanwhile_by_others_is_not_taken_over(tmp_path: Path):
    async def story(harness: Harness) -> None:
        come = Fault(
            "PATCH .*/configmaps", times=1, then=lambda: harness.api.put("services", "prod", "digits", spec={})
        )
        harness.api.faults.append(come)
        assert await harness.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.api.objects["services", "prod", "digits"]["spec"] == {}
        assert "digits" in harness.api.named("deployments"), "the others are made"

    run(story, tmp_path)


def test_a_taken_name_is_found_while_another_child_is_deleted(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 2})
        await harness.again()
        theirs = harness.api.put("networkpolicies", "prod", "digits", spec={})
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
        assert await harness.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert harness.api.objects["networkpolicies", "prod", "digits"] == theirs
        assert harness.api.named("poddisruptionbudgets") == set()

    run(story, tmp_path)


def test_without_taken_names_only_the_model_is_read(tmp_path: Path):
    async def story(harness: Harness) -> None:
        assert await harness.again() == Done()
        assert [request for request in harness.api.requests if request.startswith("GET")] == [f"GET {MODELS.path('prod', 'digits')}"]  # fmt: skip

    run(story, tmp_path)


def test_our_child_that_the_watch_has_not_reported_is_kept(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        before = deepcopy(harness.api.objects)
        async with beside(harness) as other:
            other.cache.put(MODELS, harness.digits())
            assert await other.reconcile(DIGITS) == Done()
        assert harness.api.objects == before

    run(story, tmp_path)


def test_without_the_lease_nothing_is_written(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.leads = False
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert harness.api.writes() == {}

    run(story, tmp_path)


def test_the_lease_is_checked_before_every_write(tmp_path: Path):
    async def story(harness: Harness) -> None:
        def lose() -> None:
            harness.leads = False

        harness.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=lose))
        await harness.again()
        assert harness.api.writes() == {"PATCH configmaps": 1, "PATCH serviceaccounts": 1}

    run(story, tmp_path)


def test_a_hundred_quick_edits_make_few_rollouts_and_the_last_one_wins(tmp_path: Path):
    """O-43."""

    async def story(harness: Harness) -> None:
        await harness.again()
        for n in range(100):
            harness.now += 0.1
            harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(n)}]})
            await harness.again()
        harness.now += 10
        assert await harness.again() == Done()
        assert harness.api.writes()["PATCH deployments"] <= 6
        container = harness.api.objects["deployments", "prod", "digits"]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "N", "value": "99"} in container["env"]
        assert harness.digits()["status"]["observedGeneration"] == harness.digits()["metadata"]["generation"]

    run(story, tmp_path)


def test_a_postponed_rollout_is_reported_as_progressing(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        _a_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"})
        for number in range(2):
            harness.now += 1
            harness.api.put("deployments", "prod", "digits", status={"observedGeneration": number + 1})
            harness.api.put(
                "inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(number)}]}
            )
            outcome = await harness.again()
        assert outcome == Done(again_in=ROLLOUT_SPACING_S)
        assert harness.digits()["status"]["observedGeneration"] == 3
        assert (harness.condition("Progressing")["reason"], harness.condition("Ready")["reason"]) == (
            "Applying",
            "Progressing",
        )

    run(story, tmp_path)


def test_a_spec_that_is_too_deep_is_reported_in_its_status(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        whole = harness.children()
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "podTemplate": {"spec": {"x": deep(9_000)}}})
        harness.cache.put(MODELS, decode(json.dumps(harness.digits()).replace('"@deep 9000@"', DEEP).encode()))
        assert await harness.reconcile(DIGITS) == Done()
        assert "within one another" in harness.condition("Accepted")["message"]
        # The answer to that write was read too.
        written = harness.api.writes()
        assert (await harness.reconcile(DIGITS), harness.api.writes(), harness.children()) == (Done(), written, whole)

    run(story, tmp_path)


def test_an_invalid_spec_changes_no_child(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        whole = harness.children()
        harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
        assert await harness.again() == Done()
        assert harness.children() == whole
        assert harness.condition("Ready")["status"] == "False"

    run(story, tmp_path)


def test_a_failure_is_an_event_and_a_failed_post_is_no_error(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
        assert await harness.again() == Done()
        (event,) = [value for (plural, _, _), value in harness.api.objects.items() if plural == "events"]
        assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", harness.digits()["metadata"]["uid"])
        assert event["message"] in harness.condition("Ready")["message"]

        harness.api.faults.append(Fault("POST .*/events", status=403, reason="Forbidden"))
        harness.api.put("inferencemodels", "prod", "other", spec={"model": {"uri": "file:///etc"}})
        assert await harness.again(Key(Kind.INFERENCE_MODEL, "prod", "other")) == Done()

    run(story, tmp_path)


def test_nodes_are_read_for_unscheduled_pods_and_not_too_often(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        assert harness.api.counted("GET /api/v1/nodes") == 0
        _an_unscheduled_pod(harness)
        for _ in range(3):
            assert await harness.again() == Done(again_in=UNSCHEDULED_AGAIN_S)
        assert harness.api.counted("GET /api/v1/nodes") == 1
        harness.now += 10
        await harness.again()
        assert harness.api.counted("GET /api/v1/nodes") == 2

    run(story, tmp_path)


def test_a_reconcile_works_without_the_right_to_read_nodes(tmp_path: Path):
    async def story(harness: Harness) -> None:
        harness.api.faults.append(Fault("GET /api/v1/nodes", status=403, reason="Forbidden"))
        await harness.again()
        _an_unscheduled_pod(harness)
        for _ in range(3):
            assert await harness.again() == Done(again_in=UNSCHEDULED_AGAIN_S)
            harness.now += 60
        assert harness.api.counted("GET /api/v1/nodes") == 1

    run(story, tmp_path)


def test_lost_devices_are_reported(tmp_path: Path):
    """O-63."""
    resource = "nvidia.com/mig-1g.10gb"

    async def story(harness: Harness) -> None:
        accelerator = {"type": "MIG", "mig": {"profile": "1g.10gb"}}
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator})
        await harness.again()
        # Nodes have no namespace.
        harness.api.put("nodes", None, "node-1", status={"capacity": {resource: "0"}})  # type: ignore[arg-type]
        _a_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="node-1")
        await harness.again()
        harness.woken.clear()
        looking = asyncio.create_task(harness.nodes.run())
        await harness.api.until(lambda: harness.woken == [DIGITS])
        await harness.again()
        assert harness.digits()["status"]["lastFailure"]["reason"] == "DeviceLost"

        harness.api.remove("inferencemodels", "prod", "digits")
        await harness.again()
        await harness.api.until(lambda: harness.api.counted("GET /api/v1/nodes/") > 0)
        before = harness.api.counted("GET /api/v1/nodes/")
        await asyncio.sleep(0.2)  # twenty times its period
        assert harness.api.counted("GET /api/v1/nodes/") <= before + 1
        looking.cancel()
        await asyncio.wait({looking})

    run(story, tmp_path)


def test_events_of_a_pod_without_volumes_are_read_ever_more_rarely(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        begun = harness.today
        uid = _a_pod_that_waits(harness, begun)
        _an_event(harness, "it", uid, 'configmap "corp-ca" not found')
        _an_event(harness, "another", "uid-of-another", 'secret "other" not found')
        asked = "GET /api/v1/namespaces/prod/events"
        assert (await harness.again(), harness.api.counted(asked)) == (Done(again_in=EVENTS_AFTER_S), 0)
        assert harness.condition("ModelFetched")["reason"] == "Fetching"
        waits = {}
        for age_s in (3, 60, 3600):
            harness.today = begun + datetime.timedelta(seconds=age_s)
            outcome = await harness.again()
            assert isinstance(outcome, Done)
            waits[age_s] = outcome.again_in
            assert harness.condition("ModelFetched")["reason"] == "ConfigMapMissing"
        assert waits == {3: EVENTS_AFTER_S, 60: 15, 3600: 60}
        assert harness.api.counted(asked) == 3

        _a_pod_that_waits(harness, begun, does=False)
        assert (await harness.again(), harness.api.counted(asked)) == (Done(), 3)
        assert harness.condition("ModelFetched")["reason"] == "Fetching"

    run(story, tmp_path)


@pytest.mark.parametrize(("status", "told"), [(403, "Fetching"), (503, None)])
def test_a_reconcile_works_without_the_right_to_read_events(tmp_path: Path, status: int, told: str | None):
    """Without the right, the status lacks this part; while there is no answer, the status stays as it is."""

    async def story(harness: Harness) -> None:
        await harness.again()
        _a_pod_that_waits(harness, harness.today - datetime.timedelta(seconds=10))
        harness.api.faults.append(Fault("GET .*/events", status=status))
        before = harness.digits()["status"]
        outcome = await harness.again()
        if told is None:
            assert isinstance(outcome, Failed)
            assert (outcome.failure, harness.digits()["status"]) == (Failure.TRANSIENT, before)
        else:
            assert harness.condition("ModelFetched")["reason"] == told

    run(story, tmp_path)


def test_events_are_read_for_a_few_of_many_waiting_pods(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        for number in range(20):
            _a_pod_that_waits(harness, harness.today - datetime.timedelta(seconds=10), f"digits-1-{number:02}")
        await harness.again()
        assert harness.api.counted("GET .*/events") == MOST_PODS_ASKED

    run(story, tmp_path)


def _an_event(harness: Harness, name: str, uid: str, message: str) -> None:
    harness.api.put(
        "events", "prod", name, involvedObject={"uid": uid}, reason="FailedMount", message=message,
        lastTimestamp="2030-01-01T00:00:01Z",
    )  # fmt: skip


def _a_pod_that_waits(harness: Harness, since: datetime.datetime, name: str = "digits-1-x", does: bool = True) -> str:
    """Create a pod that waits for its volumes; return its uid."""
    at = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    has_sandbox = {"type": "PodReadyToStartContainers", "status": str(not does), "lastTransitionTime": at}
    return _a_pod(harness, name, {"type": "PodScheduled", "status": "True"}, has_sandbox)


def _an_unscheduled_pod(harness: Harness) -> None:
    message = {"reason": "Unschedulable", "message": "0/2 nodes"}
    _a_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "False", **message})


def _a_pod(harness: Harness, name: str, *conditions: dict[str, str], node: str = "") -> str:
    def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
        name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "name": name, "uid": uid, "controller": True}
        return {"labels": owner["metadata"]["labels"], "ownerReferences": [reference]}

    deployment = harness.api.objects["deployments", "prod", "digits"]
    template = deployment["spec"]["template"]
    replica_set = harness.api.put(
        "replicasets", "prod", "digits-1", spec={"template": template}, metadata=owned_by(deployment)
    )
    pod = harness.api.put(
        "pods", "prod", name, spec={**template["spec"], "nodeName": node}, metadata=owned_by(replica_set),
        status={"phase": "Pending", "conditions": list(conditions)},
    )  # fmt: skip
    return str(pod["metadata"]["uid"])


def test_a_delete_names_the_uid_and_version_that_were_read(tmp_path: Path):
    """O-21."""

    async def story(harness: Harness) -> None:
        harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
        await harness.again()
        harness.api.put("inferencemodels", "prod", "digits", spec=SPEC)

        def keep() -> None:
            harness.api.put("networkpolicies", "prod", "digits", metadata={"ownerReferences": [], "labels": {}})

        harness.api.faults.append(Fault("DELETE .*/networkpolicies/", times=1, then=keep))
        outcome = await harness.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, harness.api.named("networkpolicies")) == (Failure.CONFLICT, {"digits"})

    run(story, tmp_path)


def test_an_ensemble_is_not_built_from_an_old_member(tmp_path: Path):
    """O-21."""
    key = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")
    step = {"name": "a", "modelRef": {"name": "digits"}, "inputs": {"X": "request.X"}, "outputs": {"Y": "y"}}
    tensor = {"dataType": "FP32", "shape": [1]}
    spec = {
        "inputs": [{"name": "X", **tensor}], "outputs": [{"name": "Y", "from": "a.y", **tensor}], "steps": [step],
    }  # fmt: skip

    async def story(harness: Harness) -> None:
        harness.api.put("modelensembles", "prod", "chain", spec=spec)
        assert await harness.again(key) == Done()
        old = harness.api.version
        harness.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/newer"}})
        harness.now += ROLLOUT_SPACING_S
        assert [await harness.again(key), await harness.again(key)] == [Done(), Done()]
        whole = harness.children()
        async with beside(harness) as other:
            other.hear({"inferencemodels": old})
            outcome = await other.reconcile(key)
            assert isinstance(outcome, Failed)
            assert (outcome.failure, harness.children()) == (Failure.CONFLICT, whole)
            assert await other.reconcile(key) == Done()
            # And of one that is gone.
            old = harness.api.version
            harness.api.remove("inferencemodels", "prod", "digits")
            harness.api.put("modelensembles", "prod", "chain", spec={**spec, "replicas": 2})
            other.hear({"inferencemodels": old})
            outcome = await other.reconcile(key)
            assert isinstance(outcome, Failed)
            assert (outcome.failure, harness.children()) == (Failure.CONFLICT, whole)

    run(story, tmp_path)


@pytest.mark.parametrize("is_done", [False, True])
def test_the_next_operator_completes_writes_cut_off_at_any_point(tmp_path: Path, is_done: bool):
    """O-20. The connection breaks at the k-th write, which is made or not, and a new operator continues."""
    more = {**SPEC, "replicas": 2, "networkPolicy": {"enabled": True}}

    async def live(harness: Harness) -> None:
        for spec in (SPEC, more):
            harness.api.put("inferencemodels", "prod", "digits", spec=spec)
            for _ in range(2):
                async with beside(harness) as other:
                    await other.again()

    async def story(harness: Harness) -> None:
        await live(harness)
        whole, writes = harness.children(), harness.api.writes().total()
        for k in range(writes):
            for where in list(harness.api.objects):
                harness.api.remove(*where)
            fault = Fault("^(PATCH|POST|DELETE)", drop=not is_done, lose=is_done, after=k, times=1)
            harness.api.faults[:] = [fault]
            await live(harness)
            assert fault.times == 0
            async with beside(harness) as other:
                await other.again()
            assert harness.children() == whole, f"at write {k}"

    run(story, tmp_path)


OTHER = "elsewhere/other"


def _lease(harness: Harness, renewed: int) -> None:
    harness.api.put("leases", "halimede", "this", spec={"holderIdentity": "a", "renewTime": str(renewed)})


def test_an_object_of_another_release_is_left_alone_and_reported_once(tmp_path: Path):
    async def story(harness: Harness) -> None:
        _lease(harness, 1)
        await harness.again()
        assert harness.digits()["status"]["operator"] == "halimede/this"
        before = deepcopy(harness.api.objects)
        async with beside(harness, OTHER) as other:
            for renewed in range(2, 5):
                assert await other.again() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
                _lease(harness, renewed)
                harness.now += FREE_AFTER_S - 1
            (event,) = [value for (plural, _, _), value in harness.api.objects.items() if plural == "events"]
            assert (event["type"], event["reason"]) == ("Warning", "OtherOperator")
            assert "halimede/this" in event["message"]
            kept = {
                where: value for where, value in harness.api.objects.items() if where[0] not in ("events", "leases")
            }
            assert kept == {where: value for where, value in before.items() if where[0] != "leases"}

    run(story, tmp_path)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_an_object_of_a_removed_release_is_taken_over(tmp_path: Path, is_deleted: bool):
    async def story(harness: Harness) -> None:
        _lease(harness, 1)
        await harness.again()
        async with beside(harness, OTHER) as other:
            assert await other.again() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
            if is_deleted:
                harness.api.remove("leases", "halimede", "this")
            other.now = harness.now = harness.now + (KEPT_S if is_deleted else FREE_AFTER_S)
            assert await other.again() == Done()
            assert harness.digits()["status"]["operator"] == OTHER
            # The one that comes back sees it before it writes.
            harness.api.put("leases", "elsewhere", "other", spec={"holderIdentity": "b"})
            harness.api.remove("services", "prod", "digits")
            # Its watches have not told yet: it still believes that the object is its own, and misses a child.
            version = int(harness.api.objects["leases", "elsewhere", "other"]["metadata"]["resourceVersion"])
            harness.cache.listed(BY_KIND["Service"], None, version + 1, frozenset())
            outcome = await harness.reconcile(DIGITS)
            assert isinstance(outcome, Failed)
            assert outcome.failure is Failure.CONFLICT
            assert await harness.reconcile(DIGITS) == Done(again_in=OTHER_OPERATOR_AGAIN_S)
            assert ("services", "prod", "digits") not in harness.api.objects

    run(story, tmp_path)


def test_an_unreadable_lease_counts_as_renewed(tmp_path: Path):
    async def story(harness: Harness) -> None:
        await harness.again()
        harness.api.faults.append(Fault("GET .*/leases/", status=403, reason="Forbidden"))
        async with beside(harness, OTHER) as other:
            for _ in range(3):
                assert await other.again() == Done(again_in=OTHER_OPERATOR_AGAIN_S)
                harness.now += FREE_AFTER_S

    run(story, tmp_path)


def test_a_new_object_is_first_left_to_other_running_operators(tmp_path: Path):
    async def story(harness: Harness) -> None:
        _lease(harness, 1)
        await harness.again()
        async with beside(harness, OTHER) as other:
            await other.again()
            key = Key(Kind.INFERENCE_MODEL, "prod", "new")
            harness.api.put("inferencemodels", "prod", "new", spec=SPEC)
            before = harness.api.writes()
            assert await other.again(key) == Done(again_in=UNCLAIMED_S)
            assert harness.api.writes() == before
            harness.now += UNCLAIMED_S
            assert await other.again(key) == Done()
            assert harness.api.objects["inferencemodels", "prod", "new"]["status"]["operator"] == OTHER

    run(story, tmp_path)
