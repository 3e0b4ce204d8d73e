"""One reconcile after the other, against an API server that has faults at a given time. There are no pods: no kubelet, no controllers."""

import asyncio
import datetime
import email.utils
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from halimede_operator.cluster.decoding import decode
from halimede_operator.cluster.kinds import MODELS
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.workqueue import Failure
from halimede_operator.queue import Done, Failed, Gone
from halimede_operator.reconcile import (
    CONFLICT_AGAIN_S,
    MOST_PODS_ASKED,
    MOUNT_PATIENCE_S,
    ROLLOUT_SPACING_S,
    UNSCHEDULED_AGAIN_S,
)
from support.kube_api import Fault, deep
from support.operator_shop import CHILDREN, DIGITS, SPEC, Shop, beside, run

DEEP = '{"a":' * 9_000 + "1" + "}" * 9_000


def test_a_new_model_gets_its_children_and_a_status_and_then_nothing_more_is_written(tmp_path: Path):
    async def story(shop: Shop) -> None:
        assert await shop.again() == Done()
        written = shop.api.writes()
        assert written == {
            "PATCH configmaps": 1,
            "PATCH serviceaccounts": 1,
            "PATCH services": 2,
            "PATCH deployments": 1,
            "PATCH inferencemodels": 1,
        }
        # What we wrote is known without a watch.
        assert await shop.reconcile(DIGITS) == Done()
        assert await shop.again() == Done()
        assert shop.api.writes() == written

    run(story, tmp_path)


def test_a_child_that_was_edited_or_deleted_is_made_as_it_was(tmp_path: Path):
    """O-44."""

    async def story(shop: Shop) -> None:
        await shop.again()
        whole = shop.children()
        deployment = shop.api.objects["deployments", "prod", "digits"]
        shop.api.put("deployments", "prod", "digits", spec={**deployment["spec"], "replicas": 7})
        shop.api.remove("services", "prod", "digits")
        await shop.again()
        assert shop.children() == whole

    run(story, tmp_path)


def test_an_object_that_was_deleted_gets_nothing_though_the_watch_did_not_tell(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.hear()
        shop.api.remove("inferencemodels", "prod", "digits")
        assert await shop.reconcile(DIGITS) == Done()
        assert (shop.api.writes(), await shop.reconcile(DIGITS)) == ({}, Gone())

    run(story, tmp_path)


def test_another_object_of_the_same_name_gets_nothing_of_the_old_one(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.hear()
        shop.api.remove("inferencemodels", "prod", "digits")
        new = shop.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/other"}})
        outcome = await shop.reconcile(DIGITS)
        assert (isinstance(outcome, Failed) and outcome.failure, shop.api.writes()) == (Failure.CONFLICT, {})
        # And the next time it is the new one, without any news.
        assert await shop.reconcile(DIGITS) == Done()
        deployment = shop.api.objects["deployments", "prod", "digits"]
        assert deployment["metadata"]["ownerReferences"][0]["uid"] == new["metadata"]["uid"]

    run(story, tmp_path)


def test_a_spec_that_changed_meanwhile_is_not_served_by_the_old_plan(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.hear()
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
        outcome = await shop.reconcile(DIGITS)
        assert (isinstance(outcome, Failed) and outcome.failure, shop.api.writes()) == (Failure.CONFLICT, {})
        await shop.reconcile(DIGITS)
        assert shop.api.objects["deployments", "prod", "digits"]["spec"]["replicas"] == 3

    run(story, tmp_path)


def test_a_spec_that_changes_while_children_are_made_is_not_told_as_done(tmp_path: Path):
    async def story(shop: Shop) -> None:
        def edit() -> None:
            shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 3})
            shop.hear()

        shop.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=edit))
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, "status" in shop.digits()) == (Failure.CONFLICT, False)
        assert await shop.reconcile(DIGITS) == Done()
        assert shop.digits()["status"]["observedGeneration"] == 2

    run(story, tmp_path)


def test_what_is_being_deleted_is_left_to_the_garbage_collector(tmp_path: Path):
    """O-40."""

    async def story(shop: Shop) -> None:
        shop.api.put("inferencemodels", "prod", "digits", metadata={"deletionTimestamp": "2030-01-01T00:00:00Z"})
        assert (await shop.again(), shop.api.writes()) == (Done(), {})

    run(story, tmp_path)


@pytest.mark.parametrize("times", [1, 5])
def test_a_status_that_conflicts_is_written_again_from_what_is_there(tmp_path: Path, times: int):
    """O-06."""

    async def story(shop: Shop) -> None:
        shop.api.faults.append(Fault("PATCH .*/status", status=409, reason="Conflict", times=times))
        failures = [await shop.again() for _ in range(times)]
        assert [outcome.failure for outcome in failures if isinstance(outcome, Failed)] == [Failure.CONFLICT] * times
        assert await shop.reconcile(DIGITS) == Done()
        assert shop.digits()["status"]["observedGeneration"] == 1

    run(story, tmp_path)


def test_a_status_is_not_written_over_one_that_was_not_seen(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        _an_unscheduled_pod(shop)
        shop.hear()
        shop.api.put("inferencemodels", "prod", "digits", status={"phase": "of somebody else"})
        outcome = await shop.reconcile(DIGITS)
        assert isinstance(outcome, Failed)
        assert (outcome.failure, shop.digits()["status"]) == (Failure.CONFLICT, {"phase": "of somebody else"})
        assert await shop.reconcile(DIGITS) == Done(again_in=UNSCHEDULED_AGAIN_S)
        assert shop.digits()["status"]["phase"] == "Scheduling"

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
def test_what_the_api_server_asks_for_is_handed_to_the_queue(tmp_path: Path, header: str, seconds: float | None):
    """O-09."""

    async def story(shop: Shop) -> None:
        shop.api.faults.append(Fault("PATCH .*/deployments/", status=429, headers={"Retry-After": header}, times=1))
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, outcome.retry_after_s) == (Failure.TRANSIENT, seconds)
        assert await shop.again() == Done()

    run(story, tmp_path)


def test_a_token_that_was_renewed_in_its_file_is_used_at_once(tmp_path: Path):
    """O-10."""

    async def story(shop: Shop) -> None:
        shop.api.tokens = {"better"}
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.TRANSIENT
        (shop.folder / "token").write_text("better")
        assert await shop.again() == Done()

    run(story, tmp_path)


def test_the_environments_proxies_and_passwords_are_not_for_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    async def story(shop: Shop) -> None:
        assert await shop.again() == Done()

    run(story, tmp_path)


@pytest.mark.parametrize("plural", sorted(CHILDREN))
def test_what_may_not_be_written_is_told_in_the_status_and_tried_again_later(tmp_path: Path, plural: str):
    """O-11."""

    async def story(shop: Shop) -> None:
        message = f"{plural} is forbidden: User operator cannot patch resource {plural}"
        forbidden = Fault(f"PATCH .*/{plural}/", status=403, reason="Forbidden", message=message)
        shop.api.faults.append(forbidden)
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.PERMANENT
        degraded = shop.condition("Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "Forbidden")
        assert "patch" in degraded["message"]
        assert plural in degraded["message"]
        shop.api.faults.remove(forbidden)
        assert await shop.again() == Done()
        assert shop.condition("Degraded")["status"] == "False"

    run(story, tmp_path)


def _edited_variable(shop: Shop) -> dict[str, Any]:
    """POD_IP of the server with a value of somebody's, beside which our source of it is refused."""
    deployment = deepcopy(shop.api.objects["deployments", "prod", "digits"])
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    (variable,) = (each for each in server["env"] if each["name"] == "POD_IP")
    del variable["valueFrom"]
    variable["value"] = "1.2.3.4"
    fields = _in_server({"f:env": {'k:{"name":"POD_IP"}': {"f:value": {}}}, "f:stdin": {}})
    entry = {"manager": "kubectl-set", "operation": "Update", "apiVersion": "apps/v1", "fieldsV1": fields}
    return shop.api.put(
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


def test_an_edit_beside_which_ours_is_refused_is_undone(tmp_path: Path):
    """O-44."""

    async def story(shop: Shop) -> None:
        await shop.again()
        whole = shop.children()
        _edited_variable(shop)
        shop.api.faults.append(_two_sources(times=1))
        assert await shop.again() == Done()
        assert (shop.children(), shop.api.counted(OWNERS)) == (whole, 1)
        ours, theirs = shop.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"]
        assert ours["manager"] == "halimede-operator"
        assert ours["fieldsV1"] == _in_server({"f:env": {'k:{"name":"POD_IP"}': {"f:value": {}}}})
        assert theirs["fieldsV1"] == _in_server({"f:stdin": {}}), "what is in nobody's way"
        assert shop.condition("Accepted")["status"] == "True"

    run(story, tmp_path)


def test_what_is_refused_all_the_same_is_told_and_nothing_more_is_taken(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        _edited_variable(shop)
        shop.api.faults.append(_two_sources(times=None))
        outcomes = [await shop.again() for _ in range(3)]
        assert [outcome.failure for outcome in outcomes if isinstance(outcome, Failed)] == [Failure.PERMANENT] * 3
        accepted = shop.condition("Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
        assert "may not be specified" in accepted["message"]
        # The first one of four was the model's making, and one reconcile tried twice.
        assert (shop.api.counted(OWNERS), shop.api.counted(f"PATCH {APPLY}")) == (1, 1 + 4)

    run(story, tmp_path)


def test_nothing_is_taken_from_a_child_that_changes_meanwhile(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        whole = shop.children()
        before = _edited_variable(shop)["metadata"]["managedFields"]
        refusal = _two_sources(times=2)
        edit = Fault(OWNERS, times=1, then=lambda: shop.api.put("deployments", "prod", "digits", metadata={"x": "y"}))
        shop.api.faults += [refusal, edit]
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.CONFLICT
        assert shop.api.objects["deployments", "prod", "digits"]["metadata"]["managedFields"] == before
        assert await shop.again() == Done()
        assert shop.children() == whole

    run(story, tmp_path)


def test_nothing_is_taken_from_a_stranger_who_has_the_name_now(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        _edited_variable(shop)
        shop.hear()
        theirs = {"name": "web", "kind": "Shop", "uid": "x", "controller": True}
        shop.api.put("deployments", "prod", "digits", metadata={"ownerReferences": [theirs]})
        shop.api.faults.append(_two_sources(times=None))
        assert isinstance(await shop.reconcile(DIGITS), Failed)
        assert shop.api.counted(OWNERS) == 0

    run(story, tmp_path)


@pytest.mark.parametrize("status", [500, 503, 504])
def test_an_api_server_in_trouble_is_asked_again(tmp_path: Path, status: int):
    async def story(shop: Shop) -> None:
        shop.api.faults.append(Fault("PATCH .*/services/", status=status, times=1))
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert outcome.failure is Failure.TRANSIENT
        assert await shop.again() == Done()

    run(story, tmp_path)


TERMINATING = {
    "by cause": Fault("PATCH", status=403, reason="Forbidden", message="no", causes=({"reason": "NamespaceTerminating"},)),
    "by message": Fault(
        "PATCH", status=403, reason="Forbidden", message="unable to create new content in namespace prod because it is being terminated"
    ),
    "gone": Fault("PATCH", status=404, reason="NotFound", message='namespaces "prod" not found'),
}  # fmt: skip


@pytest.mark.parametrize("fault", TERMINATING.values(), ids=TERMINATING.keys())
def test_in_a_namespace_that_goes_one_write_is_tried_and_no_more(tmp_path: Path, fault: Fault):
    """O-42."""

    async def story(shop: Shop) -> None:
        shop.api.faults.append(fault)
        assert await shop.again() == Done()
        assert shop.api.writes().total() == 1

    run(story, tmp_path)


def test_a_strangers_object_is_not_taken_over(tmp_path: Path):
    async def story(shop: Shop) -> None:
        theirs = shop.api.put("services", "prod", "digits", spec={"selector": {"app": "theirs"}})
        assert await shop.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert shop.api.objects["services", "prod", "digits"] == theirs
        assert "digits" in shop.api.named("deployments"), "the others are made"
        assert any("digits" in condition["message"] and "Service" in condition["message"] for condition in shop.digits()["status"]["conditions"])  # fmt: skip

    run(story, tmp_path)


def test_a_stranger_who_comes_meanwhile_is_not_taken_over(tmp_path: Path):
    async def story(shop: Shop) -> None:
        come = Fault("PATCH .*/configmaps", times=1, then=lambda: shop.api.put("services", "prod", "digits", spec={}))
        shop.api.faults.append(come)
        assert await shop.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert shop.api.objects["services", "prod", "digits"]["spec"] == {}
        assert "digits" in shop.api.named("deployments"), "the others are made"

    run(story, tmp_path)


def test_a_stranger_is_seen_while_something_else_is_deleted(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "replicas": 2})
        await shop.again()
        theirs = shop.api.put("networkpolicies", "prod", "digits", spec={})
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
        assert await shop.again() == Done(again_in=CONFLICT_AGAIN_S)
        assert shop.api.objects["networkpolicies", "prod", "digits"] == theirs
        assert shop.api.named("poddisruptionbudgets") == set()

    run(story, tmp_path)


def test_where_nothing_has_the_childrens_names_the_model_alone_is_read(tmp_path: Path):
    async def story(shop: Shop) -> None:
        assert await shop.again() == Done()
        assert [request for request in shop.api.requests if request.startswith("GET")] == [f"GET {MODELS.path('prod', 'digits')}"]  # fmt: skip

    run(story, tmp_path)


def test_a_child_of_ours_that_the_watch_did_not_tell_of_is_left_as_it_is(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        before = deepcopy(shop.api.objects)
        async with beside(shop) as other:
            other.cache.put(MODELS, shop.digits())
            assert await other.reconcile(DIGITS) == Done()
        assert shop.api.objects == before

    run(story, tmp_path)


def test_who_does_not_hold_the_lease_writes_nothing(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.leads = False
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert shop.api.writes() == {}

    run(story, tmp_path)


def test_the_lease_is_looked_at_before_every_write(tmp_path: Path):
    async def story(shop: Shop) -> None:
        def lose() -> None:
            shop.leads = False

        shop.api.faults.append(Fault("PATCH .*/serviceaccounts/", times=1, then=lose))
        await shop.again()
        assert shop.api.writes() == {"PATCH configmaps": 1, "PATCH serviceaccounts": 1}

    run(story, tmp_path)


def test_a_hundred_edits_in_ten_seconds_make_a_few_rollouts_and_the_last_one_wins(tmp_path: Path):
    """O-43."""

    async def story(shop: Shop) -> None:
        await shop.again()
        for n in range(100):
            shop.now += 0.1
            shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(n)}]})
            await shop.again()
        shop.now += 10
        assert await shop.again() == Done()
        assert shop.api.writes()["PATCH deployments"] <= 6
        container = shop.api.objects["deployments", "prod", "digits"]["spec"]["template"]["spec"]["containers"][0]
        assert {"name": "N", "value": "99"} in container["env"]
        assert shop.digits()["status"]["observedGeneration"] == shop.digits()["metadata"]["generation"]

    run(story, tmp_path)


def test_a_rollout_that_has_to_wait_is_told_as_one(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        for number in range(2):
            shop.now += 1
            shop.api.put("deployments", "prod", "digits", status={"observedGeneration": number + 1})
            shop.api.put(
                "inferencemodels", "prod", "digits", spec={**SPEC, "env": [{"name": "N", "value": str(number)}]}
            )
            outcome = await shop.again()
        assert outcome == Done(again_in=ROLLOUT_SPACING_S)
        assert shop.digits()["status"]["observedGeneration"] == 3
        assert (shop.condition("Progressing")["reason"], shop.condition("Ready")["reason"]) == (
            "Applying",
            "Progressing",
        )

    run(story, tmp_path)


def test_a_spec_that_is_nested_too_deep_is_told_to_whoever_wrote_it(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        whole = shop.children()
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "podTemplate": {"spec": {"x": deep(9_000)}}})
        shop.cache.put(MODELS, decode(json.dumps(shop.digits()).replace('"@deep 9000@"', DEEP).encode()))
        assert await shop.reconcile(DIGITS) == Done()
        assert "within one another" in shop.condition("Accepted")["message"]
        # The answer to that write was read too.
        written = shop.api.writes()
        assert (await shop.reconcile(DIGITS), shop.api.writes(), shop.children()) == (Done(), written, whole)

    run(story, tmp_path)


def test_a_bad_spec_changes_no_child(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        whole = shop.children()
        shop.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
        assert await shop.again() == Done()
        assert shop.children() == whole
        assert shop.condition("Ready")["status"] == "False"

    run(story, tmp_path)


def test_what_went_wrong_is_an_event_and_that_it_cannot_be_posted_is_no_error(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "file:///etc"}})
        assert await shop.again() == Done()
        (event,) = [value for (plural, _, _), value in shop.api.objects.items() if plural == "events"]
        assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", shop.digits()["metadata"]["uid"])
        assert event["message"] in shop.condition("Ready")["message"]

        shop.api.faults.append(Fault("POST .*/events", status=403, reason="Forbidden"))
        shop.api.put("inferencemodels", "prod", "other", spec={"model": {"uri": "file:///etc"}})
        assert await shop.again(Key(Kind.INFERENCE_MODEL, "prod", "other")) == Done()

    run(story, tmp_path)


def test_nodes_are_asked_for_where_a_pod_has_none_and_not_too_often(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        assert shop.api.counted("GET /api/v1/nodes") == 0
        _an_unscheduled_pod(shop)
        for _ in range(3):
            assert await shop.again() == Done(again_in=UNSCHEDULED_AGAIN_S)
        assert shop.api.counted("GET /api/v1/nodes") == 1
        shop.now += 10
        await shop.again()
        assert shop.api.counted("GET /api/v1/nodes") == 2

    run(story, tmp_path)


def test_where_nodes_may_not_be_read_it_goes_without(tmp_path: Path):
    async def story(shop: Shop) -> None:
        shop.api.faults.append(Fault("GET /api/v1/nodes", status=403, reason="Forbidden"))
        await shop.again()
        _an_unscheduled_pod(shop)
        for _ in range(3):
            assert await shop.again() == Done(again_in=UNSCHEDULED_AGAIN_S)
            shop.now += 60
        assert shop.api.counted("GET /api/v1/nodes") == 1

    run(story, tmp_path)


def test_devices_that_pods_hold_and_nodes_have_no_more_are_told_of(tmp_path: Path):
    """O-63."""
    resource = "nvidia.com/mig-1g.10gb"

    async def story(shop: Shop) -> None:
        accelerator = {"type": "MIG", "mig": {"profile": "1g.10gb"}}
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "accelerator": accelerator})
        await shop.again()
        # Nodes have no namespace.
        shop.api.put("nodes", None, "node-1", status={"capacity": {resource: "0"}})  # type: ignore[arg-type]
        _a_pod(shop, "digits-1-x", {"type": "PodScheduled", "status": "True"}, node="node-1")
        await shop.again()
        shop.woken.clear()
        looking = asyncio.create_task(shop.nodes.run())
        await shop.api.until(lambda: shop.woken == [DIGITS])
        await shop.again()
        assert shop.digits()["status"]["lastFailure"]["reason"] == "DeviceLost"

        shop.api.remove("inferencemodels", "prod", "digits")
        await shop.again()
        await shop.api.until(lambda: shop.api.counted("GET /api/v1/nodes/") > 0)
        before = shop.api.counted("GET /api/v1/nodes/")
        await asyncio.sleep(0.2)  # twenty times its period
        assert shop.api.counted("GET /api/v1/nodes/") <= before + 1
        looking.cancel()
        await asyncio.wait({looking})

    run(story, tmp_path)


def test_why_a_pod_waits_for_its_volumes_is_asked_after_a_while_and_ever_more_rarely(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        begun = shop.today
        uid = _a_pod_that_waits(shop, begun)
        _an_event(shop, "it", uid, 'configmap "corp-ca" not found')
        _an_event(shop, "another", "uid-of-another", 'secret "other" not found')
        asked = "GET /api/v1/namespaces/prod/events"
        assert (await shop.again(), shop.api.counted(asked)) == (Done(again_in=MOUNT_PATIENCE_S), 0)
        assert shop.condition("ModelFetched")["reason"] == "Fetching"
        waits = {}
        for age_s in (3, 60, 3600):
            shop.today = begun + datetime.timedelta(seconds=age_s)
            outcome = await shop.again()
            assert isinstance(outcome, Done)
            waits[age_s] = outcome.again_in
            assert shop.condition("ModelFetched")["reason"] == "ConfigMapMissing"
        assert waits == {3: MOUNT_PATIENCE_S, 60: 15, 3600: 60}
        assert shop.api.counted(asked) == 3

        _a_pod_that_waits(shop, begun, does=False)
        assert (await shop.again(), shop.api.counted(asked)) == (Done(), 3)
        assert shop.condition("ModelFetched")["reason"] == "Fetching"

    run(story, tmp_path)


@pytest.mark.parametrize(("status", "told"), [(403, "Fetching"), (503, None)])
def test_where_events_cannot_be_read_nothing_is_made_up(tmp_path: Path, status: int, told: str | None):
    """Without the right to it, the status goes without; while there is no answer, it stays as it is."""

    async def story(shop: Shop) -> None:
        await shop.again()
        _a_pod_that_waits(shop, shop.today - datetime.timedelta(seconds=10))
        shop.api.faults.append(Fault("GET .*/events", status=status))
        before = shop.digits()["status"]
        outcome = await shop.again()
        if told is None:
            assert isinstance(outcome, Failed)
            assert (outcome.failure, shop.digits()["status"]) == (Failure.TRANSIENT, before)
        else:
            assert shop.condition("ModelFetched")["reason"] == told

    run(story, tmp_path)


def test_of_many_pods_that_wait_a_few_are_asked_about(tmp_path: Path):
    async def story(shop: Shop) -> None:
        await shop.again()
        for number in range(20):
            _a_pod_that_waits(shop, shop.today - datetime.timedelta(seconds=10), f"digits-1-{number:02}")
        await shop.again()
        assert shop.api.counted("GET .*/events") == MOST_PODS_ASKED

    run(story, tmp_path)


def _an_event(shop: Shop, name: str, uid: str, message: str) -> None:
    shop.api.put(
        "events", "prod", name, involvedObject={"uid": uid}, reason="FailedMount", message=message,
        lastTimestamp="2030-01-01T00:00:01Z",
    )  # fmt: skip


def _a_pod_that_waits(shop: Shop, since: datetime.datetime, name: str = "digits-1-x", does: bool = True) -> str:
    """For its volumes; returns its uid."""
    at = since.strftime("%Y-%m-%dT%H:%M:%SZ")
    has_sandbox = {"type": "PodReadyToStartContainers", "status": str(not does), "lastTransitionTime": at}
    return _a_pod(shop, name, {"type": "PodScheduled", "status": "True"}, has_sandbox)


def _an_unscheduled_pod(shop: Shop) -> None:
    message = {"reason": "Unschedulable", "message": "0/2 nodes"}
    _a_pod(shop, "digits-1-x", {"type": "PodScheduled", "status": "False", **message})


def _a_pod(shop: Shop, name: str, *conditions: dict[str, str], node: str = "") -> str:
    def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
        name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "name": name, "uid": uid, "controller": True}
        return {"labels": owner["metadata"]["labels"], "ownerReferences": [reference]}

    deployment = shop.api.objects["deployments", "prod", "digits"]
    template = deployment["spec"]["template"]
    replica_set = shop.api.put(
        "replicasets", "prod", "digits-1", spec={"template": template}, metadata=owned_by(deployment)
    )
    pod = shop.api.put(
        "pods", "prod", name, spec={**template["spec"], "nodeName": node}, metadata=owned_by(replica_set),
        status={"phase": "Pending", "conditions": list(conditions)},
    )  # fmt: skip
    return str(pod["metadata"]["uid"])


def test_what_is_wanted_no_more_is_deleted_only_as_it_was_looked_at(tmp_path: Path):
    """O-21."""

    async def story(shop: Shop) -> None:
        shop.api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
        await shop.again()
        shop.api.put("inferencemodels", "prod", "digits", spec=SPEC)

        def keep() -> None:
            shop.api.put("networkpolicies", "prod", "digits", metadata={"ownerReferences": [], "labels": {}})

        shop.api.faults.append(Fault("DELETE .*/networkpolicies/", times=1, then=keep))
        outcome = await shop.again()
        assert isinstance(outcome, Failed)
        assert (outcome.failure, shop.api.named("networkpolicies")) == (Failure.CONFLICT, {"digits"})

    run(story, tmp_path)


def test_an_ensemble_is_not_made_of_what_a_member_was(tmp_path: Path):
    """O-21."""
    key = Key(Kind.MODEL_ENSEMBLE, "prod", "chain")
    step = {"name": "a", "modelRef": {"name": "digits"}, "inputs": {"X": "request.X"}, "outputs": {"Y": "y"}}
    tensor = {"dataType": "FP32", "shape": [1]}
    spec = {
        "inputs": [{"name": "X", **tensor}], "outputs": [{"name": "Y", "from": "a.y", **tensor}], "steps": [step],
    }  # fmt: skip

    async def story(shop: Shop) -> None:
        shop.api.put("modelensembles", "prod", "chain", spec=spec)
        assert await shop.again(key) == Done()
        old = shop.api.version
        shop.api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/newer"}})
        shop.now += ROLLOUT_SPACING_S
        assert [await shop.again(key), await shop.again(key)] == [Done(), Done()]
        whole = shop.children()
        async with beside(shop) as other:
            other.hear({"inferencemodels": old})
            outcome = await other.reconcile(key)
            assert isinstance(outcome, Failed)
            assert (outcome.failure, shop.children()) == (Failure.CONFLICT, whole)
            assert await other.reconcile(key) == Done()
            # And of one that is gone.
            old = shop.api.version
            shop.api.remove("inferencemodels", "prod", "digits")
            shop.api.put("modelensembles", "prod", "chain", spec={**spec, "replicas": 2})
            other.hear({"inferencemodels": old})
            outcome = await other.reconcile(key)
            assert isinstance(outcome, Failed)
            assert (outcome.failure, shop.children()) == (Failure.CONFLICT, whole)

    run(story, tmp_path)


@pytest.mark.parametrize("is_done", [False, True])
def test_an_operator_that_ends_at_any_write_is_made_good_by_the_next(tmp_path: Path, is_done: bool):
    """O-20. The connection breaks at the k-th write, done or not, and another operator with an empty memory goes on."""
    more = {**SPEC, "replicas": 2, "networkPolicy": {"enabled": True}}

    async def live(shop: Shop) -> None:
        for spec in (SPEC, more):
            shop.api.put("inferencemodels", "prod", "digits", spec=spec)
            for _ in range(2):
                async with beside(shop) as other:
                    await other.again()

    async def story(shop: Shop) -> None:
        await live(shop)
        whole, writes = shop.children(), shop.api.writes().total()
        for k in range(writes):
            for where in list(shop.api.objects):
                shop.api.remove(*where)
            fault = Fault("^(PATCH|POST|DELETE)", drop=not is_done, lose=is_done, after=k, times=1)
            shop.api.faults[:] = [fault]
            await live(shop)
            assert fault.times == 0
            async with beside(shop) as other:
                await other.again()
            assert shop.children() == whole, f"at write {k}"

    run(story, tmp_path)
