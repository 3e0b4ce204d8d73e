"""Who sets a Deployment's replicas, with real server-side apply and a real HPA: no other number in between."""

import json
from typing import Any

import pytest

from cluster import resources
from cluster.fake_nodes import MARK
from cluster.metrics import PlayedMetrics
from cluster.operators import Operator, Site
from cluster.spaces import eventually

NOWHERE = {"nodeSelector": {"nowhere": "yes"}}
ON_FAKE_NODES = {"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
AT_ONCE = {"scaleUp": {"stabilizationWindowSeconds": 0}}


def scaled(site: Site, **spec: Any) -> None:
    site.model("digits", suspend=False, scheduling=NOWHERE, **spec)


def numbers_since(site: Site, version: str) -> list[int]:
    """The replicas that the Deployment asked for since a version, without repetitions."""
    path = f"/apis/apps/v1/namespaces/{site.namespace}/deployments?watch=1&resourceVersion={version}&timeoutSeconds=1"
    events = [json.loads(line) for line in site.own.api.send("GET", path).splitlines()]
    found = [event["object"]["spec"]["replicas"] for event in events]
    return [number for i, number in enumerate(found) if i == 0 or number != found[i - 1]]


def deployment(site: Site) -> dict[str, Any]:
    return site.get("deployment", "digits")


def replicas(site: Site) -> int:
    number: int = deployment(site)["spec"]["replicas"]
    return number


def hpas(site: Site) -> set[str]:
    return resources.names(site.own.api, site.namespace, "hpa")


def settled(site: Site, operator: Operator) -> None:
    eventually(lambda: site.settled("digits"), "the status", 30, operator.check)


def test_replicas_are_handed_over_and_back_without_another_number(site: Site) -> None:
    operator = site.start().ready()
    scaled(site, replicas=3)
    settled(site, operator)
    begun = deployment(site)["metadata"]["resourceVersion"]

    scaled(site, replicas=3, autoscaling={"maxReplicas": 6, "minReplicas": 2})
    settled(site, operator)
    eventually(lambda: hpas(site), "an HPA", 30, operator.check)
    site.kubectl("annotate", "deployment", "digits", "mark=1")
    assert numbers_since(site, begun) == [3]

    # Another number by hand stays, also when the operator applies another template.
    site.kubectl("scale", "deployment", "digits", "--replicas=5")
    scaled(site, replicas=3, autoscaling={"maxReplicas": 6, "minReplicas": 2}, env=[{"name": "A", "value": "1"}])
    settled(site, operator)
    eventually(lambda: '"A"' in json.dumps(deployment(site)), "another template", 30, operator.check)
    assert numbers_since(site, begun) == [3, 5]

    # The scaler goes first, then the spec's number is applied.
    scaled(site, replicas=3)
    eventually(lambda: replicas(site) == 3, "the spec's replicas", 30, operator.check)
    assert hpas(site) == set()
    assert numbers_since(site, begun) == [3, 5, 3]
    eventually(
        lambda: (
            not any(
                each["type"] == "AutoscalingActive"
                for each in site.get("inferencemodel", "digits")["status"]["conditions"]
            )
        ),
        "the condition gone",
        30,
        operator.check,
    )


def test_suspend_wins_and_the_object_comes_back_with_min_replicas(site: Site) -> None:
    operator = site.start().ready()
    autoscaling = {"maxReplicas": 6, "minReplicas": 2}
    scaled(site, autoscaling=autoscaling)
    settled(site, operator)
    eventually(lambda: hpas(site), "an HPA", 30, operator.check)
    assert replicas(site) == 2
    begun = deployment(site)["metadata"]["resourceVersion"]

    site.model("digits", suspend=True, scheduling=NOWHERE, autoscaling=autoscaling)
    eventually(lambda: replicas(site) == 0, "no replicas", 30, operator.check)
    assert hpas(site) == set()
    scaled(site, autoscaling=autoscaling)
    eventually(lambda: hpas(site), "the HPA again", 30, operator.check)
    assert numbers_since(site, begun)[-2:] == [0, 2]


@pytest.mark.large
def test_condition_quotes_the_hpa_and_rests(site: Site) -> None:
    operator = site.start().ready()
    scaled(site, autoscaling={"maxReplicas": 6})

    def reported() -> dict[str, Any] | None:
        conditions = (site.get("inferencemodel", "digits").get("status") or {}).get("conditions") or ()
        found = [each for each in conditions if each["type"] == "AutoscalingActive"]
        return found[0] if found and found[0]["reason"] == "FailedGetPodsMetric" else None

    # No server of custom.metrics.k8s.io is installed here.
    eventually(lambda: reported() is not None, "the HPA's own words", 60, operator.check)
    found = reported()
    assert found is not None
    assert found["status"] == "False"
    assert "halimede_queue_requests" in found["message"]
    assert replicas(site) == 1
    before = site.writes()
    hpa = site.get("hpa", "digits")["metadata"]["resourceVersion"]
    site.kubectl("annotate", "hpa", "digits", "theirs=1")
    eventually(lambda: site.get("hpa", "digits")["metadata"]["resourceVersion"] != hpa, "a change", 20)
    assert site.writes() - before == {}


@pytest.mark.large
def test_another_hpa_of_the_deployment_is_reported_and_left_alone(site: Site) -> None:
    theirs = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "theirs"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits"},
            "maxReplicas": 4,
        },
    }
    site.kubectl("create", "-f", "-", given=json.dumps(theirs))
    operator = site.start().ready()
    scaled(site, autoscaling={"maxReplicas": 6})
    settled(site, operator)
    accepted = next(
        each for each in site.get("inferencemodel", "digits")["status"]["conditions"] if each["type"] == "Accepted"
    )
    assert (accepted["status"], accepted["reason"]) == ("False", "Conflict")
    assert "HorizontalPodAutoscaler theirs exists" in accepted["message"]
    assert hpas(site) == {"horizontalpodautoscaler.autoscaling/theirs"}
    site.kubectl("delete", "hpa", "theirs")
    eventually(lambda: "digits" in str(hpas(site)), "our HPA", 40, operator.check)


@pytest.mark.large
def test_zero_by_the_hpa_is_used_or_its_refusal_reported(site: Site) -> None:
    operator = site.start().ready()
    scaled(site, autoscaling={"maxReplicas": 4, "scaleToZero": {"idleFor": "1m", "zeroBy": "HPA"}})
    settled(site, operator)
    eventually(lambda: hpas(site), "an HPA", 30, operator.check)
    least = site.get("hpa", "digits")["spec"]["minReplicas"]
    if least == 1:
        before = site.writes()
        site.kubectl("annotate", "hpa", "digits", "theirs=1")
        site.kubectl("annotate", "deployment", "digits", "theirs=1")
        settled(site, operator)
        refused = {what: count for what, count in (site.writes() - before).items() if "horizontal" in what}
        assert refused == {}
    assert least in (0, 1)


def test_the_operators_hpa_follows_played_metrics(site: Site, played_metrics: PlayedMetrics) -> None:
    own, operator = site.own, site.start().ready()
    own.fake_nodes.add(1)
    try:
        site.model(
            "digits", suspend=False, scheduling=ON_FAKE_NODES, autoscaling={"maxReplicas": 5, "behavior": AT_ONCE}
        )
        pods = f"/api/v1/namespaces/{site.namespace}/pods"

        def running() -> list[str]:
            return [
                each["metadata"]["name"]
                for each in own.api.get(pods)["items"]
                if each["status"].get("phase") == "Running"
            ]

        def active() -> dict[str, str]:
            found = (own.api.get(f"{site.models}/digits").get("status") or {}).get("conditions", [])
            return next((each for each in found if each["type"] == "AutoscalingActive"), {})

        first = eventually(running, "the first pod", 30, operator.check)[0]
        # Pods without a value count as 0 when replicas are added.
        both = {"halimede_queue_requests": {first: "11"}, "halimede_instance_busy_ratio": {first: "1"}}
        played_metrics.play(site.namespace, both)
        eventually(lambda: len(running()) == 3, "three replicas", 30, operator.check)
        eventually(lambda: active().get("status") == "True", "AutoscalingActive", 30, operator.check)
        # One metric fails, and the other one asks for no fewer replicas: only the message tells it.
        played_metrics.play(site.namespace, {**both, "halimede_instance_busy_ratio": None})
        eventually(
            lambda: "no value of halimede_instance_busy_ratio" in active()["message"],
            "it to be named",
            30,
            operator.check,
        )
        assert active()["status"] == "True"
    finally:
        site.kubectl("delete", "inferencemodels", "--all")
        own.fake_nodes.remove()
