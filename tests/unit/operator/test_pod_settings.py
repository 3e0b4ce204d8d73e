"""When changed settings of the platform reach pods."""

import json
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.diff import Apply
from halimede_operator.core.events import events_of
from halimede_operator.core.labels import POD_SETTINGS, REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.plan import Plan, plan
from halimede_operator.core.platform import Platform
from halimede_operator.core.pod_settings import read, written
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.status import status_of

OLD = Platform(server_image="server:1", gpu_server_image="gpu:1", s3_endpoint="https://store.example")
NEW = replace(OLD, server_image="server:2", s3_endpoint="https://other.example")
KEY = Key(Kind.INFERENCE_MODEL, "prod", "digits")
NOW = "2026-11-23T08:00:00Z"


def seen(children: tuple[Object, ...], *, ready: bool = True, **spec: Any) -> Snapshot:
    """A model whose only pod has the Deployment's template."""
    value = {
        "apiVersion": "halimede.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"namespace": "prod", "name": "digits", "uid": "1", "generation": 1},
        "spec": {"model": {"uri": "s3://models/digits"}, **spec},
    }
    pods = [
        {
            "metadata": {"name": "digits-1", "uid": "2", "labels": child["spec"]["template"]["metadata"]["labels"]},
            "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
        }
        for child in children
        if child["kind"] == "Deployment"
    ]
    return Snapshot(KEY, value, {}, children, (), tuple(pods), {})


def applied(planned: Plan) -> tuple[Object, ...]:
    return tuple(change.object for change in planned.changes if isinstance(change, Apply))


def deployment_in(children: tuple[Object, ...]) -> Object:
    (found,) = (child for child in children if child["kind"] == "Deployment")
    return found


def image_in(children: tuple[Object, ...]) -> str:
    return str(deployment_in(children)["spec"]["template"]["spec"]["containers"][0]["image"])


@pytest.fixture
def standing() -> tuple[Object, ...]:
    return applied(plan(seen(()), OLD))


def test_ready_pods_keep_their_settings_and_the_new_ones_are_reported(standing: tuple[Object, ...]) -> None:
    planned = plan(seen(standing), NEW)

    assert (planned.changes, planned.waiting_settings) == ((), "server image, s3 endpoint")


def test_the_next_template_change_brings_the_new_settings(standing: tuple[Object, ...]) -> None:
    annotated = {"metadata": {"annotations": {"example.com/restarted": "now"}}}
    planned = plan(seen(standing, podTemplate=annotated), NEW)

    children = applied(planned)
    assert (image_in(children), planned.waiting_settings) == ("server:2", "")
    assert "other.example" in children[0]["data"]["plan.json"]
    (account, *services) = (child for child in standing if child["kind"] in ("ServiceAccount", "Service"))
    after = seen((account, *services, *children), podTemplate=annotated)
    assert (plan(after, NEW).changes, plan(after, NEW).waiting_settings) == ((), "")


def test_a_change_outside_the_template_keeps_the_old_settings(standing: tuple[Object, ...]) -> None:
    children = applied(plan(seen(standing, replicas=2), NEW))

    assert (image_in(children), deployment_in(children)["spec"]["replicas"]) == ("server:1", 2)


def test_without_a_ready_pod_the_new_settings_apply_at_once(standing: tuple[Object, ...]) -> None:
    planned = plan(seen(standing, ready=False), NEW)

    assert (image_in(applied(planned)), planned.waiting_settings) == ("server:2", "")


def test_ready_pods_of_another_revision_do_not_delay_settings(standing: tuple[Object, ...]) -> None:
    snapshot = seen(standing)
    snapshot.pods[0]["metadata"]["labels"] = {REVISION_LABEL: "before"}

    assert image_in(applied(plan(snapshot, NEW))) == "server:2"


def test_hand_edits_are_corrected_with_the_kept_settings(standing: tuple[Object, ...]) -> None:
    by_hand = json.loads(json.dumps(standing))
    deployment_in(by_hand)["spec"]["replicas"] = 7

    children = applied(plan(seen(tuple(by_hand)), NEW))

    assert (image_in(children), deployment_in(children)["spec"]["replicas"]) == ("server:1", 1)


def test_settings_that_pods_do_not_use_change_only_the_annotation(standing: tuple[Object, ...]) -> None:
    planned = plan(seen(standing), replace(OLD, gpu_server_image="gpu:2"))

    (child,) = applied(planned)
    (before,) = (each for each in standing if each["kind"] == "Deployment")
    assert (child["spec"], planned.waiting_settings) == (before["spec"], "")


def test_a_setting_outside_pods_applies_at_once(standing: tuple[Object, ...]) -> None:
    assert plan(seen(standing), replace(OLD, schemes=frozenset({"https"}))).problems != ()
    policy = {"networkPolicy": {"enabled": True}}
    children = applied(plan(seen((), **policy), OLD))
    (changed,) = applied(plan(seen(children, **policy), replace(OLD, operator_namespace="moved")))
    assert changed["kind"] == "NetworkPolicy"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON",
        "[1]",
        '{"server_image": {}, "image_pull_secrets": 5, "node_lost_toleration_seconds": "x"}',
        "[" * 9000,
    ],
)
def test_an_invalid_annotation_does_not_delay_settings(standing: tuple[Object, ...], text: str) -> None:
    deployment_in(standing)["metadata"]["annotations"][POD_SETTINGS] = text

    assert image_in(applied(plan(seen(standing), NEW))) == "server:2"


def test_a_foreign_template_hash_does_not_delay_settings(standing: tuple[Object, ...]) -> None:
    deployment_in(standing)["metadata"]["annotations"][TEMPLATE_HASH] = "0"

    assert image_in(applied(plan(seen(standing), NEW))) == "server:2"


def test_settings_are_read_as_they_were_written() -> None:
    platform = replace(NEW, image_pull_secrets=("a", "b"), node_lost_toleration_seconds=0, s3_secret="keys")

    assert read(written(platform), Platform("", "")) == platform


def test_waiting_settings_are_a_condition_and_one_event(standing: tuple[Object, ...]) -> None:
    snapshot = seen(standing)
    planned = plan(snapshot, NEW)

    def status_with(waiting_settings: str) -> Object:
        return status_of(snapshot, planned.spec, (), (), (), NOW, waiting_settings=waiting_settings)

    before, after = status_with(""), status_with(planned.waiting_settings)
    (condition,) = (each for each in after["conditions"] if each["type"] == "UpgradeAvailable")
    assert (condition["status"], condition["reason"]) == ("True", "PlatformChanged")
    assert "(server image, s3 endpoint)" in condition["message"]
    assert [(draft.type, draft.reason, draft.message) for draft in events_of(before, after)] == [
        ("Normal", "UpgradeAvailable", condition["message"])
    ]
    assert events_of(after, after) == events_of(after, before) == ()
