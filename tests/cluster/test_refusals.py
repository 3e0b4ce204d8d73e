"""Children that a real API server refuses, and how the object's status reports it."""

import json
import time
from typing import Any

import pytest

from cluster.operators import LEASE, Site
from cluster.spaces import eventually

SECONDS_TO_TELL = 10.0


def server(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "server", **fields}]}}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "field": (
        {"podTemplate": server(imagePullPolice="Never")},
        "spec.podTemplate.spec.containers[server].imagePullPolice: field not declared in schema",
    ),
    "type": (
        {"podTemplate": {"spec": {"shareProcessNamespace": "yes"}}},
        "spec.podTemplate.spec.shareProcessNamespace: expected boolean, got &{yes}",
    ),
    "enum": (
        {"podTemplate": server(imagePullPolicy="Nevr")},
        'spec.podTemplate.spec.containers[server].imagePullPolicy: Unsupported value: "Nevr"',
    ),
    "item": (
        {"podTemplate": {"spec": {"topologySpreadConstraints": [{"maxSkew": 1}]}}},
        "spec.podTemplate.spec.topologySpreadConstraints[0].topologyKey: Required value",
    ),
    "affinity": (
        {"scheduling": {"affinity": {"nodeAffinity": {"requiredDuring": {}}}}},
        "spec.scheduling.affinity.nodeAffinity.requiredDuring: field not declared in schema",
    ),
    "variable": (
        {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.nonsense"}}}]},
        "spec.env[A].valueFrom.fieldRef.fieldPath: Invalid value",
    ),
    "resource": (
        {"resources": {"requests": {"example.com/fpga": "1"}}},
        "spec.resources.limits: Required value",
    ),
}


def condition_of(site: Site, name: str, kind: str) -> dict[str, Any]:
    conditions = (site.get("inferencemodel", name).get("status") or {}).get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def test_pod_template_mistakes_are_reported_and_change_no_child(site: Site) -> None:
    operator = site.start().ready()
    site.model("digits")
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    whole = site.children()
    begun = time.monotonic()
    for name, (spec, _) in MISTAKES.items():
        site.model(name, **spec)
    site.model("digits", serving={"ports": {"http": 9000}}, **MISTAKES["field"][0])
    eventually(lambda: site.settled("digits", *MISTAKES), "all to be reported", check=operator.check)
    assert time.monotonic() < begun + SECONDS_TO_TELL
    for name, message in {
        **{name: text for name, (_, text) in MISTAKES.items()},
        "digits": MISTAKES["field"][1],
    }.items():
        accepted = condition_of(site, name, "Accepted")
        assert (accepted["status"], accepted["reason"]) == ("False", "ApplyRefused")
        assert message in accepted["message"]
    assert site.children() == whole

    # Once each, and once more where a child was news.
    assert site.writes()["patch deployments 500"] <= 2 * 4
    site.model("field", podTemplate=server(imagePullPolicy="Never"))
    eventually(lambda: "Deployment field" in site.children(), "the children", SECONDS_TO_TELL, operator.check)


@pytest.mark.large
def test_taken_names_are_reported_and_retried_within_ten_seconds(site: Site) -> None:
    """And `delete --cascade=foreground` waits for the children."""
    operator = site.start().ready()
    site.kubectl("create", "service", "clusterip", "twice", "--tcp=80:80")
    for name in ("x", "twice"):
        site.model(name)
    eventually(lambda: site.settled("x", "twice"), "the status", check=operator.check)
    site.model("x-pods")
    eventually(lambda: site.settled("x-pods"), "the status", check=operator.check)
    messages = {name: condition_of(site, name, "Accepted")["message"] for name in ("twice", "x-pods")}
    assert "Service twice exists and belongs to somebody else" in messages["twice"]
    assert "Service x-pods exists and belongs to InferenceModel x" in messages["x-pods"]
    assert not [name for name in site.children() if name.endswith((" x-pods-pods", "Deployment x-pods"))]

    def asked() -> int:
        return sum(
            entry["verb"] == "get" and entry["requestURI"].endswith("/services/twice") for entry in site.audited()
        )

    # One GET for each look at the name that is taken.
    before, begun = asked(), time.monotonic()
    config_map = next(name for name in site.children() if name.startswith("ConfigMap x-config"))
    held = ("patch", "configmap", config_map.partition(" ")[2], "--type=merge")
    site.kubectl(*held, '--patch={"metadata":{"finalizers":["example.com/held"]}}')
    site.kubectl("delete", "inferencemodel", "x", "--cascade=foreground", "--wait=false")
    eventually(lambda: "Deployment x" not in site.children(), "its Deployment to go")
    time.sleep(2)  # longer than it takes where nothing is waited for
    assert site.get("inferencemodel", "x")["metadata"]["finalizers"] == ["foregroundDeletion"]
    site.kubectl("delete", "service", "twice")
    site.kubectl(*held, '--patch={"metadata":{"finalizers":null}}')
    for name in ("twice", "x-pods"):
        eventually(
            lambda name=name: f"Deployment {name}" in site.children(),
            f"{name} to be made",
            SECONDS_TO_TELL,
            operator.check,
        )
    assert asked() - before <= 2 + (time.monotonic() - begun) / 8


LIMITS = {"spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]}}
REFUSED_PODS: dict[str, tuple[dict[str, Any], str, str]] = {
    "priority": ({"scheduling": {"priorityClassName": "absent"}}, "PodsRefused", "no PriorityClass with name absent was found"),
    "runtime": ({"podTemplate": {"spec": {"runtimeClassName": "absent"}}}, "PodsRefused", 'RuntimeClass "absent" not found'),
    "security": ({"cache": {"medium": "HostPath"}}, "PodsRefused", "violates PodSecurity"),
    "large": ({"resources": {"limits": {"memory": "2Gi"}}}, "PodsRefused", "maximum memory usage per Container is 1Gi"),
    "quota": ({}, "QuotaExceeded", "exceeded quota: none"),
}  # fmt: skip
LONG_WAIT_S = 85.0
"""By then the controller of ReplicaSets waits for more than a minute before it tries again."""
SECONDS_TO_TRY_AGAIN = 40.0


@pytest.mark.large
def test_refused_pods_have_a_cause_and_are_tried_again_after_its_repair(site: Site) -> None:
    site.kubectl("label", "namespace", site.namespace, "pod-security.kubernetes.io/enforce=baseline")
    api = f"/api/v1/namespaces/{site.namespace}"
    site.own.api.create(f"{api}/limitranges", {"metadata": {"name": "limits"}, **LIMITS})
    site.own.api.create(f"{api}/resourcequotas", {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}})
    operator = site.start().ready()
    begun = time.monotonic()
    for name, (spec, _, _) in REFUSED_PODS.items():
        site.model(name, suspend=False, **spec)
    for name, (_, reason, words) in REFUSED_PODS.items():

        def is_told(name: str = name, reason: str = reason, words: str = words) -> bool:
            ready = condition_of(site, name, "Ready")
            return ready.get("reason") == reason and words in ready["message"]

        try:
            eventually(is_told, f"{name} to be {reason}: {words}", 60, operator.check)
        except AssertionError as error:
            error.add_note(str(condition_of(site, name, "Ready")))
            raise

    time.sleep(max(0.0, begun + LONG_WAIT_S - time.monotonic()))
    site.kubectl("patch", "resourcequota", "none", '--patch={"spec":{"hard":{"pods":"9"}}}')
    eventually(lambda: "quota" in _models_with_pods(site), "the pod", SECONDS_TO_TRY_AGAIN, operator.check)
    assert _models_with_pods(site) == {"quota"}


def _models_with_pods(site: Site) -> set[str]:
    pods = site.own.api.get(f"/api/v1/namespaces/{site.namespace}/pods")["items"]
    return {pod["metadata"]["labels"]["halimede.dev/model"] for pod in pods}


@pytest.mark.large
def test_another_releases_operator_writes_only_after_the_first_is_gone(site: Site) -> None:
    first = site.start().ready()
    site.model("digits")
    eventually(lambda: site.settled("digits"), "the status", check=first.check)
    rights = ("--verb=update", "--resource=leases", "--resource-name=other")
    site.kubectl("create", "role", "other", *rights)
    site.kubectl("create", "rolebinding", "other", "--role=other", f"--serviceaccount={site.namespace}:second")
    second = site.start("second", lease="other").ready()
    left = "halimede_operator_objects_of_others"
    eventually(lambda: second.metric(left) == 1, "the second to notice", SECONDS_TO_TELL, second.check)
    site.model("digits", replicas=3)
    site.model("new")
    eventually(lambda: site.settled("digits", "new"), "the status", check=first.check)
    eventually(lambda: second.metric(left) == 2, "the second to leave both", SECONDS_TO_TELL, second.check)
    assert site.writes("second") == {"create events 201": 2}
    events = json.loads(site.kubectl("get", "events", "--field-selector=reason=OtherOperator", "--output=json"))
    assert {event["involvedObject"]["name"] for event in events["items"]} == {"digits", "new"}
    mark = f"{site.namespace}/{LEASE}"
    assert all(mark in event["message"] for event in events["items"])
    assert second.log.read_text().count(mark) == 2

    # As `helm uninstall` leaves it.
    first.end()
    site.kubectl("delete", "lease", LEASE)
    eventually(lambda: second.metric(left) == 0, "the second to take over", 30, second.check)
    assert site.get("inferencemodel", "digits")["status"]["operator"] == f"{site.namespace}/other"
