"""Updates that fail, `kubectl rollout undo`, and a changed operator: what pods remain, and what the status says."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.installed import Platform, Tenant
from cluster.models import QUESTION, START_LIMIT_S, Object, apply, model
from cluster.spaces import eventually
from support.models import add_scaled

ROLLBACK_LIMIT_S = 180.0
PAUSE_S = 0.5
"""Between two requests to a model that is updated."""
DOUBLED, TRIPLED = {"OUT": [2, 4, 6, 8]}, {"OUT": [3, 6, 9, 12]}


@pytest.fixture
def broken(platform: Platform, tmp_path: Path) -> str:
    """The URI of a model whose file cannot be loaded."""
    add_scaled(tmp_path, "broken", 2)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    return platform.store.put("broken", tmp_path / "broken")


@pytest.fixture
def tripled(platform: Platform, tmp_path: Path) -> str:
    add_scaled(tmp_path, "thrice", 3)
    return platform.store.put("thrice", tmp_path / "thrice")


@pytest.fixture
def upgrade(platform: Platform) -> Iterator[Callable[..., None]]:
    """Upgrades the operator with one changed value of the chart; after the test it has its values again."""
    yield platform.upgrade
    platform.upgrade()


def test_a_failed_update_is_rolled_back_and_the_fix_goes_live(
    tenant: Tenant, scaled: str, broken: str, tripled: str
) -> None:
    apply(tenant, model("only", scaled))
    tenant.wait_ready("im/only", START_LIMIT_S)
    first = tenant.names("pods")

    def still_serves() -> None:
        assert tenant.infer("only", QUESTION) == DOUBLED

    apply(tenant, model("only", broken, rollout={"progressDeadline": "30s"}))
    eventually(
        lambda: outcomes(tenant)[:1] == ["RolledBack (ModelLoadFailed)"],
        "the rollback",
        ROLLBACK_LIMIT_S,
        still_serves,
        PAUSE_S,
    )
    eventually(lambda: tenant.names("pods") == first, "the failed pod to go", check=still_serves)
    eventually(lambda: tenant.condition("im/only")["status"] == "True", "Ready", check=still_serves)

    status = tenant.get("im/only")["status"]
    conditions = {each["type"]: each for each in status["conditions"]}
    assert [conditions[each]["reason"] for each in ("Degraded", "Stalled")] == ["RolledBack"] * 2
    assert status["observedGeneration"] == 2
    assert outcomes(tenant) == ["RolledBack (ModelLoadFailed)", "Serving"]
    assert status["lastFailure"]["reason"] == "ModelLoadFailed"
    for text in (conditions["Stalled"]["message"], status["lastFailure"]["message"]):
        assert "Protobuf parsing failed" in text
    assert [each["type"] for each in events(tenant, "RolledBack")] == ["Warning"]

    apply(tenant, model("only", tripled))
    tenant.wait_ready("im/only", START_LIMIT_S)
    # Nodes hear a moment later that the pod of before goes.
    eventually(lambda: tenant.infer("only", QUESTION) == TRIPLED, "the fixed model")
    assert outcomes(tenant) == ["Serving", "RolledBack (ModelLoadFailed)", "Superseded"]
    assert tenant.condition("im/only", "Stalled") == {}

    # `kubectl rollout undo` has no effect.
    eventually(lambda: len(tenant.names("pods")) == 1, "the pod of before to end")
    pods = tenant.names("pods")
    tenant.kubectl("rollout", "undo", "deployment/only")
    eventually(lambda: events(tenant, "RolloutUndone"), "the event")
    eventually(lambda: tenant.names("pods") == pods, "no other pods")
    tenant.wait_ready("im/only", START_LIMIT_S)
    (event,) = events(tenant, "RolloutUndone")
    assert "kubectl edit inferencemodel/only" in event["message"]
    assert tenant.infer("only", QUESTION) == TRIPLED


@pytest.mark.large
def test_an_operator_with_another_image_replaces_no_pod(
    tenant: Tenant, scaled: str, upgrade: Callable[[str], None]
) -> None:
    apply(tenant, model("only", scaled))
    tenant.wait_ready("im/only", START_LIMIT_S)
    before = standing(tenant)

    upgrade("--set=server.image.tag=another")
    eventually(lambda: "upgradeAvailable" in tenant.get("im/only")["status"], "the upgrade to be reported")
    assert "server image" in tenant.condition("im/only", "UpgradeAvailable")["message"]
    assert standing(tenant) == before
    assert tenant.infer("only", QUESTION) == DOUBLED

    # With Auto the pods follow at once. No node has that image.
    apply(tenant, model("only", scaled, rollout={"upgradePolicy": "Auto"}))
    tenant.wait_for_reason("im/only", "ImagePullFailed")
    assert tenant.infer("only", QUESTION) == DOUBLED


def standing(tenant: Tenant) -> Object:
    """The pods with their restarts, and the Deployment's template."""
    pods = {
        each["metadata"]["name"]: [status["restartCount"] for status in each["status"]["containerStatuses"]]
        for each in tenant.get("pods")["items"]
    }
    return {"pods": pods, "template": tenant.get("deployment/only")["spec"]["template"]}


def outcomes(tenant: Tenant) -> list[str]:
    status = tenant.get("im/only").get("status", {})
    return [each.partition(": ")[2] for each in status.get("revisions", [])]


def events(tenant: Tenant, reason: str) -> list[Object]:
    found: list[Object] = tenant.get("events", f"--field-selector=reason={reason}")["items"]
    return found
