"""Updates whose new pods a real API server would refuse: the old pods stay until that is repaired."""

from typing import Any

from cluster.operators import Site
from cluster.spaces import eventually

SECONDS_TO_TELL = 20.0
SECONDS_TO_TRY_AGAIN = 40.0
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "priority": ({"scheduling": {"priorityClassName": "absent"}}, "no PriorityClass with name absent was found"),
    "security": ({"cache": {"medium": "HostPath"}}, 'violates PodSecurity "baseline'),
    "large": ({"resources": {"limits": {"memory": "2Gi"}}}, "maximum memory usage per Container is 1Gi"),
    "webhook": ({"env": [{"name": "A", "value": "B"}]}, "failed calling webhook"),
}
LIMITS = {"metadata": {"name": "limits"}, "spec": {"limits": [{"type": "Container", "max": {"memory": "1Gi"}}]}}


def test_old_pods_stay_while_new_ones_would_be_refused(site: Site) -> None:
    site.kubectl("label", "namespace", site.namespace, "pod-security.kubernetes.io/enforce=baseline")
    site.own.api.create(f"/api/v1/namespaces/{site.namespace}/limitranges", LIMITS)
    operator = site.start().ready()
    first = {name: {"suspend": False, "rollout": {"policy": "InPlace"}} for name in CHANGES}
    for name, spec in first.items():
        site.model(name, **spec)
    old = eventually(lambda: pods if len(pods := pods_of(site)) == len(CHANGES) else None, "pods", check=operator.check)
    hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    site.own.api.create(hooks, webhook(site.namespace))
    try:
        for name, (change, _) in CHANGES.items():
            site.model(name, **first[name], **change)
        for name, (_, words) in CHANGES.items():
            eventually(lambda name=name, words=words: is_told(site, name, words), f"{name}: {words}", SECONDS_TO_TELL)
        assert pods_of(site) == old
    finally:
        site.own.api.send("DELETE", f"{hooks}/{site.namespace}")

    eventually(
        lambda: pods_of(site).get("webhook") not in (None, old["webhook"]),
        "the new pod after the repair",
        SECONDS_TO_TRY_AGAIN,
        operator.check,
    )
    assert pods_of(site).items() >= {name: old[name] for name in CHANGES if name != "webhook"}.items()


def pods_of(site: Site) -> dict[str, str]:
    """The names of the pods that are to stay, by model."""
    pods = site.own.api.get(f"/api/v1/namespaces/{site.namespace}/pods")["items"]
    return {
        pod["metadata"]["labels"]["halimede.dev/model"]: pod["metadata"]["name"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def is_told(site: Site, name: str, words: str) -> bool:
    conditions = (site.get("inferencemodel", name).get("status") or {}).get("conditions", ())
    return any(
        (each["type"], each["status"], each["reason"]) == ("Accepted", "False", "PodsRefused")
        and words in each["message"]
        for each in conditions
    )


def webhook(namespace: str) -> dict[str, Any]:
    """Nobody answers. It is asked about pods of the model `webhook` only."""
    hook = {
        "name": "absent.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "objectSelector": {"matchLabels": {"halimede.dev/model": "webhook"}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    return {"metadata": {"name": namespace}, "webhooks": [hook]}
