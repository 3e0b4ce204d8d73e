"""Which revision the Deployment has: pins, upgrades, rollbacks, and what `kubectl rollout undo` changes."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.labels import GENERATION, INPUTS, POD_SETTINGS, REVISION_LABEL, ROLLED_BACK, TEMPLATE_HASH
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.pod_settings import read, written
from halimede_operator.core.revisions.revision import MAX_BYTES, THIS_CONFIG_MAP, revision
from halimede_operator.core.snapshot import Object
from support.operator_children import fetch_of
from support.operator_rollouts import FIXED, PLATFORM, SPEC, STEPS, World, load_failed, served_world
from support.operator_specs import ensemble_key

NEWER = replace(PLATFORM, server_image="server:2", s3_endpoint="https://other.example")


# Pins and upgrades.


def test_ready_pods_keep_their_revision_and_the_upgrade_is_reported() -> None:
    world = served_world()
    children = copy.deepcopy(world.children)
    world.platform = NEWER

    events = world.reconcile()

    assert world.children == children
    assert world.status["upgradeAvailable"] is True
    assert world.condition("UpgradeAvailable") == "True PlatformChanged"
    assert "(changed: server image, s3 endpoint)" in world.message("UpgradeAvailable")
    assert [each.reason for each in events] == ["UpgradeAvailable"]
    assert world.reconcile() == []


def test_a_template_of_another_operator_version_is_kept_exactly() -> None:
    """The pinned template is read, not built again."""
    world = served_world()
    other = revision("{}", {**json.loads(stored_template(world)), "another": "version"}, {})
    pinned = replace(other, annotations={name: world.annotation(name) for name in (INPUTS, GENERATION, POD_SETTINGS)})
    adopt(world, pinned.hash, pinned.data)

    assert world.decide().waiting == ("version",)
    world.deployment["spec"]["replicas"] = 7
    world.reconcile()
    assert (world.deployment["spec"]["replicas"], world.revision) == (1, pinned.name)
    assert "another" in world.deployment["spec"]["template"]


def adopt(world: World, hash_: str, data: dict[str, str]) -> None:
    """Give the Deployment a revision that another version of the operator has made."""
    (old,) = (where for where in world.children if where[0] == "ConfigMap")
    config_map = world.children.pop(old)
    name = f"bert-config-{hash_[:8]}"
    config_map["metadata"]["name"], config_map["data"] = name, data
    world.children["ConfigMap", name] = config_map
    world.deployment["metadata"]["annotations"][TEMPLATE_HASH] = hash_
    world.deployment["spec"]["template"]["metadata"]["labels"][REVISION_LABEL] = hash_[:8]
    world.serve(hash_[:8])


def stored_template(world: World) -> str:
    (config_map,) = (value for (kind, _), value in world.children.items() if kind == "ConfigMap")
    return str(config_map["data"]["pod-template.json"])


def test_the_next_change_of_inputs_brings_the_new_settings() -> None:
    world = served_world()
    world.platform = NEWER
    world.edit(env=[{"name": "A", "value": "b"}])
    world.reconcile()

    assert (world.image, "upgradeAvailable" in world.status) == ("server:2", False)
    assert world.annotation(GENERATION) == "2"


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 2},
        {"disruption": {"maxUnavailable": 2}},
        {"networkPolicy": {"enabled": True}},
        {"rollout": {"policy": "Recreate", "autoRollback": False}},
    ],
)
def test_a_change_outside_the_template_keeps_the_revision(change: Object) -> None:
    world = served_world()
    before, generation = world.revision, world.annotation(GENERATION)
    world.platform = NEWER
    world.edit(**change)
    world.reconcile()

    assert (world.revision, world.annotation(GENERATION)) == (before, generation)
    assert world.status["observedGeneration"] == 2


def test_a_change_that_gives_the_same_template_rolls_nothing() -> None:
    world = served_world()
    before = world.revision
    world.edit(image={"pullPolicy": "IfNotPresent"})
    world.reconcile()

    assert (world.revision, world.annotation(GENERATION)) == (before, "2")


def test_the_progress_deadline_is_an_input() -> None:
    world = served_world()
    before = world.revision
    world.edit(rollout={"progressDeadline": "1h"})
    world.reconcile()

    assert world.revision != before


def test_without_a_ready_pod_the_new_settings_apply_at_once() -> None:
    world = served_world()
    world.have(load_failed(world.revision))
    world.platform = NEWER
    world.reconcile()

    assert (world.image, "upgradeAvailable" in world.status) == ("server:2", False)


def test_with_manual_only_the_policy_brings_new_settings() -> None:
    world = served_world({**SPEC, "rollout": {"upgradePolicy": "Manual"}})
    world.platform = NEWER
    world.have(load_failed(world.revision))
    world.reconcile()
    assert world.image == "server:1"

    world.edit(env=[{"name": "A", "value": "b"}])
    world.reconcile()
    template = world.deployment["spec"]["template"]
    assert (world.image, world.annotation(GENERATION)) == ("server:1", "2")
    assert fetch_of(template["spec"])["env"] == [{"name": "A", "value": "b"}]
    assert world.status["upgradeAvailable"] is True
    assert world.message("UpgradeAvailable").endswith("until spec.rollout.upgradePolicy is no longer Manual")

    world.edit(rollout={"upgradePolicy": "Auto"})
    world.reconcile()
    assert (world.image, "upgradeAvailable" in world.status) == ("server:2", False)


def test_with_auto_new_settings_apply_at_once() -> None:
    world = served_world({**SPEC, "rollout": {"upgradePolicy": "Auto"}})
    world.platform = NEWER
    world.reconcile()

    assert world.image == "server:2"


def test_settings_that_pods_do_not_use_change_nothing() -> None:
    world = served_world()
    children = copy.deepcopy(world.children)
    world.platform = replace(PLATFORM, gpu_server_image="gpu:2")

    assert world.reconcile() == []
    assert (world.children, "upgradeAvailable" in world.status) == (children, False)


def test_a_setting_outside_pods_applies_at_once() -> None:
    world = served_world({**SPEC, "networkPolicy": {"enabled": True}})
    world.platform = replace(PLATFORM, operator_namespace="moved")

    assert [change.object["kind"] for change in world.decide().changes] == ["NetworkPolicy"]


FORGED = {"the template": "pod-template.json", "the plan": "plan.json"}


@pytest.mark.parametrize("case", [*FORGED, "missing", "malformed"])
def test_a_config_map_with_other_content_is_no_pin(case: str) -> None:
    """Users who may write ConfigMaps do not choose the operator's pods."""
    world = served_world()
    (where,) = (each for each in world.children if each[0] == "ConfigMap")
    data = world.children[where]["data"]
    match case:
        case "missing":
            del world.children[where]
        case "malformed":
            world.children[where]["data"] = {"pod-template.json": 7}
        case _:
            data[FORGED[case]] = data[FORGED[case]].replace("s3://models/bert", "s3://x").replace("fetch", "other")
    world.platform = NEWER

    assert world.decide().waiting == ()
    world.children.pop(where, None)
    world.reconcile()
    assert world.image == "server:2"


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"server_image": {}, "image_pull_secrets": 5}', "[" * 9000])
def test_malformed_annotations_do_not_raise(text: str) -> None:
    world = served_world({**SPEC, "rollout": {"upgradePolicy": "Manual"}})
    before = world.revision
    for name in (INPUTS, GENERATION, POD_SETTINGS, ROLLED_BACK, TEMPLATE_HASH):
        world.deployment["metadata"]["annotations"][name] = text
    world.reconcile()

    assert world.revision == before
    assert world.annotation(ROLLED_BACK) == ""


def test_settings_are_read_as_they_were_written() -> None:
    platform = replace(NEWER, image_pull_secrets=("a", "b"), node_lost_toleration_seconds=0, s3_secret="keys")

    assert read(written(platform), Platform("", "")) == platform


def test_a_template_too_large_for_a_config_map_is_not_stored() -> None:
    template = {"metadata": {"labels": {}}, "spec": {"volumes": [{"configMap": {"name": THIS_CONFIG_MAP}}]}}
    large = revision("x" * MAX_BYTES, template, {})

    assert set(large.data) == {"plan.json"}
    assert set(revision("{}", template, {}).data) == {"plan.json", "pod-template.json"}
    assert large.pod_template("mine")["spec"]["volumes"] == [{"configMap": {"name": "mine"}}]


# Ensembles.


def member(**spec: Any) -> Object:
    metadata = {"namespace": "prod", "name": "digits", "uid": "m", "generation": 1}
    return {"metadata": metadata, "spec": {"model": {"uri": "s3://models/digits"}, **spec}}


def test_an_ensemble_rolls_when_a_members_model_changes_and_only_then() -> None:
    world = served_world(STEPS, key=ensemble_key("bert"), members={"digits": member()})
    before = world.revision
    world.platform = NEWER
    world.members = {"digits": member(replicas=3, env=[{"name": "A", "value": "b"}], resources={})}
    world.reconcile()
    assert world.revision == before

    world.members = {"digits": member(model=FIXED)}
    world.reconcile()
    assert (world.revision != before, world.image) == (True, "server:2")
    assert world.outcomes() == [f"{world.revision} 1 RollingOut", f"{before} 1 Superseded"]
