"""Kinds that may be missing from the cluster: nothing waits for them, and they are watched as soon as they can be."""

import json
from pathlib import Path

import pytest

from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.core.status.events import LASTING_S
from halimede_operator.queue import Done
from support.kube_api import Fault, KubeApi, kube_api
from support.loops import in_a_loop
from support.operator_harness import DIGITS, SPEC, Harness, with_harness
from support.operator_processes import running
from support.operator_watches import Watched, a_few, run

GROUP = "resource.k8s.io"
TEMPLATES = rf"GET /apis/{GROUP}/v1/resourceclaimtemplates"
LABELS = {"app.kubernetes.io/managed-by": "halimede-operator"}
OWNER = {
    "apiVersion": "halimede.dev/v1alpha1", "kind": "InferenceModel", "name": "a", "uid": "1", "controller": True
}  # fmt: skip
OURS = {Key(Kind.INFERENCE_MODEL, "prod", name) for name in ("a", "b", "c")}


def add_template(api: KubeApi) -> None:
    api.put("resourceclaimtemplates", "prod", "t", metadata={"labels": LABELS, "ownerReferences": [OWNER]})


def with_template(api: KubeApi) -> None:
    a_few(api)
    add_template(api)


def without_the_kind(api: KubeApi) -> None:
    a_few(api)
    api.missing_groups = {GROUP}


def knows_template(watched: Watched) -> bool:
    return watched.cache.find("ResourceClaimTemplate", "prod", "t") is not None


def test_an_optional_kind_is_watched_like_the_others(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        assert knows_template(watched)
        assert watched.cache.unavailable == {}
        watched.api.remove("resourceclaimtemplates", "prod", "t")
        await watched.api.until(lambda: not knows_template(watched))
        assert watched.api.counted(rf"{TEMPLATES}\?(?!.*watch=true)(?!.*limit=1&|.*limit=1$)") == 1

    run(scenario, tmp_path, before=with_template)


def test_a_missing_kind_delays_nothing_and_is_watched_when_it_appears(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        assert watched.watch_health.unlisted() == []
        assert "does not serve ResourceClaimTemplate" in watched.cache.unavailable["ResourceClaimTemplate"]
        assert watched.api.counted(TEMPLATES) == 0
        watched.woken.clear()
        add_template(watched.api)
        watched.api.missing_groups = set()
        await watched.api.until(lambda: knows_template(watched))
        assert watched.cache.unavailable == {}
        assert set(watched.woken) >= OURS, "any of them may want a child of this kind"

    run(scenario, tmp_path, before=without_the_kind, look_again_s=0.1)


def test_the_children_of_a_kind_that_goes_are_forgotten(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        watched.woken.clear()
        watched.api.missing_groups = {GROUP}
        await watched.api.until(lambda: not knows_template(watched))
        await watched.api.until(lambda: set(watched.woken) >= OURS)
        assert watched.knows()
        # The same objects come back with the kind, because only the operator's rights or the API were missing.
        watched.api.missing_groups = set()
        await watched.api.until(lambda: knows_template(watched))
        watched.api.put("inferencemodels", "prod", "new", spec={})
        await watched.api.until(watched.knows)

    run(scenario, tmp_path, before=with_template, look_again_s=0.1)


def test_without_rights_the_reason_names_the_chart_value(tmp_path: Path):
    def forbidden(api: KubeApi) -> None:
        with_template(api)
        api.faults.append(Fault(TEMPLATES, status=403, reason="Forbidden"))

    async def scenario(watched: Watched) -> None:
        assert "rbac.dra" in watched.cache.unavailable["ResourceClaimTemplate"]
        assert watched.knows()
        watched.api.faults.clear()
        await watched.api.until(lambda: knows_template(watched))

    run(scenario, tmp_path, before=forbidden, look_again_s=0.1)


def test_with_namespaces_all_of_them_must_be_readable(tmp_path: Path):
    def forbidden(api: KubeApi) -> None:
        with_template(api)
        api.faults.append(Fault("/namespaces/other/resourceclaimtemplates", status=403, reason="Forbidden"))

    async def scenario(watched: Watched) -> None:
        assert set(watched.cache.unavailable) == {"ResourceClaimTemplate"}
        assert watched.api.counted(rf"GET /apis/{GROUP}/v1/resourceclaimtemplates") == 0, "not of the whole cluster"

    run(scenario, tmp_path, before=forbidden, namespaces=("prod", "other"))


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_kind_whose_api_fails_delays_no_other_kind(tmp_path: Path, status: int):
    def failing(api: KubeApi) -> None:
        with_template(api)
        api.faults.append(Fault(f"{GROUP}/v1", status=status))

    async def scenario(watched: Watched) -> None:
        assert str(status) in watched.cache.unavailable["ResourceClaimTemplate"]
        await watched.api.until(watched.knows)
        watched.api.faults.clear()
        await watched.api.until(lambda: knows_template(watched))

    run(scenario, tmp_path, before=failing, look_again_s=0.1)


def test_an_outage_does_not_make_a_kind_go(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        outage = Fault(f"{GROUP}/v1", status=503, times=5)
        watched.api.faults.append(outage)
        lists = watched.api.counted(rf"{TEMPLATES}\?.*limit=10")
        await watched.api.until(lambda: outage.times == 0)
        assert knows_template(watched)
        assert watched.api.counted(rf"{TEMPLATES}\?.*limit=10") == lists, "kopf was not restarted"

    run(scenario, tmp_path, before=with_template, look_again_s=0.1)


def test_a_kind_that_kopf_did_not_find_is_looked_for_again(tmp_path: Path):
    """The servers of one API may disagree for a moment about what they serve."""

    def hidden_from_kopf(api: KubeApi) -> None:
        with_template(api)
        hidden = {"kind": "APIResourceList", "groupVersion": f"{GROUP}/v1", "resources": []}
        api.faults.append(Fault(rf"GET /apis/{GROUP}/v1$", body=hidden, after=1, times=1))

    async def scenario(watched: Watched) -> None:
        assert knows_template(watched)

    run(scenario, tmp_path, before=hidden_from_kopf, look_again_s=0.5)


@in_a_loop
async def test_the_process_starts_without_the_kind_and_logs_it_once(tmp_path: Path):
    async with kube_api() as api:
        api.missing_groups = {GROUP}
        async with running(api, tmp_path) as operator:
            await operator.until_ready()
            assert await operator.metric('halimede_operator_watch_age_seconds{kind="Pod"}') > 0
            assert await operator.metric('halimede_operator_watch_age_seconds{kind="ResourceClaimTemplate"}') == 0
            # kopf starts again.
            lists = api.counted(r"/inferencemodels\?.*limit=10")
            api.faults.append(Fault(r"/inferencemodels\?.*watch=true", status=404, times=1))
            api.cut()
            await api.until(lambda: api.counted(r"/inferencemodels\?.*limit=10") > lists)
            assert await operator.end() == 0
            lines = [json.loads(line)["message"] for line in operator.log.read_text().splitlines()]
            assert [line for line in lines if "ResourceClaimTemplate" in line] == [
                "optional kinds that cannot be used: the cluster does not serve ResourceClaimTemplate of "
                "resource.k8s.io/v1"
            ]


@with_harness
async def test_an_object_that_wants_a_missing_kind_says_so(harness: Harness):
    """All other children are applied. With the kind, the child is created and the object is accepted."""
    api = harness.api
    api.put("inferencemodels", "prod", "digits", spec={**SPEC, "networkPolicy": {"enabled": True}})
    harness.relist()
    why = "the cluster does not serve NetworkPolicy of networking.k8s.io/v1"
    assert harness.cache.set_unavailable({"NetworkPolicy": why}) == {DIGITS}
    assert await harness.reconcile(DIGITS) == Done(again_in=LASTING_S)
    assert set(harness.children()) >= {("deployments", "prod", "digits"), ("services", "prod", "digits")}
    assert api.named("networkpolicies") == set()
    accepted = harness.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "FeatureUnavailable")
    assert accepted["message"] == f"NetworkPolicy prod/digits: {why}"
    before = api.writes()
    assert await harness.sync() == Done(again_in=LASTING_S)
    assert api.writes() == before, "nothing is written again"

    assert harness.cache.set_unavailable({}) == {DIGITS}
    assert await harness.sync() == Done()
    assert api.named("networkpolicies") == {"digits"}
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_an_object_without_such_a_child_does_not_mind_a_missing_kind(harness: Harness):
    harness.relist()
    harness.cache.set_unavailable({"NetworkPolicy": "it is missing"})
    assert await harness.reconcile(DIGITS) == Done()
    assert harness.condition("Accepted")["status"] == "True"
