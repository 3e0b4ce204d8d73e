"""Reconciles whose requests the API server refuses or does not answer."""

import dataclasses
import email.utils
from pathlib import Path

import pytest

from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.observer import OWNER_KNOWN_S
from halimede_operator.reconcile.reconciler import REPORT_AFTER_S
from support.kube_api import Fault
from support.loops import in_a_loop
from support.operator_harness import CHILDREN, DIGITS, SPEC, Harness, open_harness, with_harness


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
@with_harness
async def test_retry_after_is_passed_to_the_queue(harness: Harness, header: str, seconds: float | None):
    """O-09."""
    harness.api.faults.append(Fault("PATCH .*/deployments/", status=429, headers={"Retry-After": header}, times=1))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.retry_after_s) == (Failure.TRANSIENT, seconds)
    assert await harness.sync() == Done()


@with_harness
async def test_a_renewed_token_is_used_at_once(harness: Harness):
    """O-10."""
    harness.api.tokens = {"better"}
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.TRANSIENT
    (harness.folder / "token").write_text("better")
    assert await harness.sync() == Done()


@in_a_loop
async def test_proxies_and_passwords_of_the_environment_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with open_harness(tmp_path) as harness:
        assert await harness.sync() == Done()


@pytest.mark.parametrize("plural", sorted(CHILDREN))
@with_harness
async def test_a_forbidden_write_is_reported_and_retried_later(harness: Harness, plural: str):
    """O-11."""
    message = f"{plural} is forbidden: User operator cannot patch resource {plural}"
    forbidden = Fault(f"PATCH .*/{plural}/", status=403, reason="Forbidden", message=message)
    harness.api.faults.append(forbidden)
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.PERMANENT
    degraded = harness.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "Forbidden")
    assert "patch" in degraded["message"]
    assert plural in degraded["message"]
    harness.api.faults.remove(forbidden)
    assert await harness.sync() == Done()
    assert "Degraded" not in {each["type"] for each in harness.digits()["status"]["conditions"]}


@pytest.mark.parametrize("status", [500, 503, 504])
@with_harness
async def test_server_errors_are_retried(harness: Harness, status: int):
    harness.api.faults.append(Fault("PATCH .*/services/", status=status, times=1))
    outcome = await harness.sync()
    assert isinstance(outcome, Failed)
    assert outcome.failure is Failure.TRANSIENT
    assert await harness.sync() == Done()


TYPED = (
    "failed to create typed patch object (prod/digits; apps/v1, Kind=Deployment): "
    '.spec.template.spec.containers[name="server"].imagePullPolice: field not declared in schema'
)
MISTAKE = {**SPEC, "podTemplate": {"spec": {"containers": [{"name": "server", "imagePullPolice": "Never"}]}}}
STATUS_WRITES = "PATCH .*/status"


@pytest.mark.parametrize("made_before", [False, True])
@with_harness
async def test_a_pod_template_mistake_is_reported_and_changes_no_child(harness: Harness, made_before: bool):
    if made_before:
        await harness.sync()
    whole = harness.children()
    harness.api.put("inferencemodels", "prod", "digits", spec=MISTAKE)
    harness.api.faults.append(Fault("PATCH .*/deployments/", status=500, message=TYPED))
    for _ in range(3):
        outcome = await harness.sync()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.PERMANENT
    assert harness.children() == whole
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
    assert accepted["message"] == (
        "Deployment prod/digits: spec.podTemplate.spec.containers[server].imagePullPolice: field not declared in schema"
    )
    assert harness.api.counted(STATUS_WRITES) == 1 + made_before


@with_harness
async def test_a_valid_pod_template_needs_one_dry_run(harness: Harness):
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "podTemplate": {"spec": {"hostname": "a"}}})
    assert await harness.sync() == Done()
    assert await harness.sync() == Done()
    assert (harness.api.counted("dryRun=All"), len(harness.children())) == (1, 5)


@with_harness
async def test_a_lasting_failure_is_reported_once_until_it_is_over(harness: Harness):
    message = 'Internal error occurred: failed calling webhook "w": dial tcp 10.0.0.1:443: connect: refused'
    webhook = Fault("PATCH .*/services/", status=500, reason="InternalError", message=message)
    harness.api.faults.append(webhook)
    for _ in range(5):
        outcome = await harness.sync()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, "status" in harness.digits()) == (Failure.TRANSIENT, False)
        harness.now += REPORT_AFTER_S / 5
    for _ in range(5):
        assert isinstance(await harness.sync(), Failed)
        harness.now += 60
    ready = harness.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")
    assert ready["message"] == f"Service prod/digits-pods: {message}; it is tried again"
    assert (harness.condition("Accepted")["status"], harness.api.counted(STATUS_WRITES)) == ("True", 1)

    harness.api.faults.remove(webhook)
    assert await harness.sync() == Done()
    assert harness.condition("Ready")["reason"] == "Pending"

    # Another failure counts from its own beginning.
    harness.api.faults.append(dataclasses.replace(webhook, what="PATCH .*/deployments/"))
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 2})
    assert isinstance(await harness.sync(), Failed)
    assert harness.condition("Ready")["reason"] == "Pending"


@with_harness
async def test_a_failed_rollout_is_retried_and_not_postponed(harness: Harness):
    await harness.sync()
    harness.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": "1"}]})
    harness.api.faults.append(Fault("PATCH .*/deployments/", status=503, times=3))
    outcomes = [await harness.sync() for _ in range(3)]
    assert [outcome.failure for outcome in outcomes if isinstance(outcome, Failed)] == [Failure.TRANSIENT] * 3
    assert await harness.sync() == Done()


UNKNOWN_OWNER = Fault(
    "PATCH .*(configmaps|deployments)/",
    status=403,
    reason="Forbidden",
    message='configmaps "a" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping for '
    "APIVersion halimede.dev/v1alpha1 Kind InferenceModel",
)


@with_harness
async def test_children_of_a_new_kind_are_made_at_once(harness: Harness, caplog: pytest.LogCaptureFixture):
    """One write is refused for all objects. That the owner's deletion waits for the children is written later."""

    def blocking() -> int:
        owners = [harness.api.objects[where]["metadata"]["ownerReferences"] for where in harness.children()]
        return sum(owner.get("blockOwnerDeletion", False) for each in owners for owner in each)

    keys = [DIGITS, *(Key(Kind.INFERENCE_MODEL, "prod", f"model-{number}") for number in range(3))]
    for key in keys[1:]:
        harness.api.put("inferencemodels", "prod", key.name, spec=SPEC)
    unknown = dataclasses.replace(UNKNOWN_OWNER, times=1)
    harness.api.faults.append(unknown)
    for _ in range(2):
        for key in keys:
            assert await harness.sync(key) == Done(again_in=OWNER_KNOWN_S)
    made = harness.children()
    assert harness.api.counted("PATCH .*/configmaps/") == len(keys) + 1
    assert (len(made), blocking()) == (5 * len(keys), 0)
    assert (harness.api.named("events"), caplog.records) == (set(), [])

    # It takes longer in another API server. What is known already stays.
    harness.now += OWNER_KNOWN_S
    assert await harness.sync(DIGITS) == Done()
    unknown.times = 1
    for key in keys[1:]:
        assert await harness.sync(key) == Done(again_in=OWNER_KNOWN_S)
    assert (await harness.sync(DIGITS), blocking()) == (Done(again_in=OWNER_KNOWN_S), 5)
    harness.now += OWNER_KNOWN_S
    for key in keys:
        assert await harness.sync(key) == Done()
    assert (harness.children(), blocking()) == (made, 5 * len(keys))


TERMINATING = {
    "by cause": Fault("PATCH", status=403, reason="Forbidden", message="no", causes=({"reason": "NamespaceTerminating"},)),
    "by message": Fault(
        "PATCH", status=403, reason="Forbidden", message="unable to create new content in namespace prod because it is being terminated"
    ),
    "gone": Fault("PATCH", status=404, reason="NotFound", message='namespaces "prod" not found'),
}  # fmt: skip


@pytest.mark.parametrize("fault", TERMINATING.values(), ids=TERMINATING.keys())
@with_harness
async def test_a_namespace_being_deleted_gets_one_write_attempt(harness: Harness, fault: Fault):
    """O-42."""
    harness.api.faults.append(fault)
    assert await harness.sync() == Done()
    assert harness.api.writes().total() == 1
