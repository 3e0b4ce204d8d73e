"""Hand edits that make a real API server refuse our apply: they are undone nevertheless."""

import json
from collections import Counter
from typing import Any

import pytest

from cluster.operators import Site
from cluster.spaces import eventually
from halimede_operator.core.labels import labels_of
from halimede_operator.core.spec.types import Key, Kind


def in_server(**fields: Any) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": [{"name": "server", **fields}]}}}}


def port(field: str) -> list[dict[str, Any]]:
    return [{"op": "replace", "path": field, "value": 9999}]


EDITS: tuple[tuple[str, str, Any], ...] = (
    ("deployment", "strategic", in_server(env=[{"name": "POD_IP", "valueFrom": None, "value": "1.2.3.4"}])),
    ("deployment", "strategic", in_server(resources={"limits": {"cpu": "8"}, "requests": {"cpu": "4"}})),
    ("deployment", "strategic", in_server(livenessProbe={"httpGet": None, "exec": {"command": ["true"]}})),
    ("deployment", "json", port("/spec/template/spec/containers/0/ports/0/containerPort")),
    ("service", "json", port("/spec/ports/0/port")),
    ("poddisruptionbudget", "merge", {"spec": {"maxUnavailable": None, "minAvailable": 1}}),
)


def test_conflicting_edits_are_undone_and_additions_of_others_stay(site: Site) -> None:
    """O-44."""
    operator = site.start().ready()
    site.model("digits", replicas=2, resources={"requests": {"memory": "64Mi"}, "limits": {"cpu": "2"}})
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    site.kubectl("annotate", "deployment", "digits", "theirs=kept")
    site.kubectl("set", "env", "deployment/digits", "--containers=server", "THEIRS=kept")
    site.kubectl("patch", "service", "digits", '--patch={"spec":{"sessionAffinity":"ClientIP"}}')
    whole = site.children()
    theirs = json.dumps([whole["Deployment digits"], whole["Service digits"]])
    assert all(f'"{what}"' in theirs for what in ("theirs", "THEIRS", "ClientIP"))

    for kind, form, edit in EDITS:
        before = site.writes()
        site.kubectl("patch", kind, "digits", f"--type={form}", f"--patch={json.dumps(edit)}")
        eventually(lambda: site.children() == whole, f"{kind} without {edit}", 20, operator.check)
        refused = {what: count for what, count in (site.writes() - before).items() if what.endswith(" 422")}
        assert refused, f"not what this test is about: {kind} with {edit}"
        # One more where its controller wrote at the same time.
        assert sum(refused.values()) <= 2

    accepted = next(
        each for each in site.get("inferencemodel", "digits")["status"]["conditions"] if each["type"] == "Accepted"
    )
    assert accepted["status"] == "True"


@pytest.mark.large
def test_a_lasting_refusal_is_reported_once(site: Site) -> None:
    """A Deployment that was left with our labels and another selector, which nobody can change."""
    labels = labels_of(Key(Kind.INFERENCE_MODEL, site.namespace, "digits"))
    pod = {"containers": [{"name": "server", "image": "nothing"}]}
    template = {"metadata": {"labels": {"theirs": "yes"}}, "spec": pod}
    spec = {"replicas": 0, "selector": {"matchLabels": {"theirs": "yes"}}, "template": template}
    metadata = {"name": "digits", "labels": labels}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    site.kubectl("create", "-f", "-", given=json.dumps(deployment))
    site.model("digits")
    operator = site.start().ready()
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)

    conditions = {each["type"]: each for each in site.get("inferencemodel", "digits")["status"]["conditions"]}
    assert (conditions["Accepted"]["status"], conditions["Accepted"]["reason"]) == ("False", "ApplyRefused")
    assert "immutable" in conditions["Accepted"]["message"]
    site.kubectl("annotate", "deployment", "digits", "news=1")
    site.model("after")
    eventually(lambda: site.settled("after"), "another model", check=operator.check)
    assert site.writes()["patch deployments 422"] == 1


@pytest.mark.large
def test_a_child_no_longer_wanted_is_deleted_even_if_edited(site: Site) -> None:
    operator = site.start().ready()
    site.model("digits", replicas=2)
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    site.kubectl("annotate", "poddisruptionbudget", "digits", "theirs=yes")
    site.model("digits", replicas=1, model={"uri": "s3://models/other"})
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)

    def is_gone() -> bool:
        kinds = Counter(name.partition(" ")[0] for name in site.children())
        # The plan before is kept with its ReplicaSet.
        return kinds == {"ConfigMap": 2, "ServiceAccount": 1, "Service": 2, "Deployment": 1}

    eventually(is_gone, "the budget to go", 20, operator.check)


@pytest.mark.large
def test_orphans_that_are_not_wanted_are_deleted(site: Site) -> None:
    """An HPA that stays after `delete --cascade=orphan` would scale the new object's Deployment."""
    site.model("digits", suspend=False, autoscaling={"minReplicas": 2, "maxReplicas": 4}, scheduling={"nodeSelector": {"no": "where"}})  # fmt: skip
    operator = site.start().ready()
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    site.kubectl("delete", "inferencemodel", "digits", "--cascade=orphan")
    left = site.kubectl("get", "hpa,pdb,deployment", "--output=name").split()
    assert len(left) == 3, left

    site.model("digits")
    eventually(lambda: site.settled("digits"), "the status", check=operator.check)
    # When no scaler exists any more, the replicas are the operator's again.
    eventually(lambda: site.get("deployment", "digits")["spec"]["replicas"] == 0, "0 replicas", check=operator.check)

    assert site.kubectl("get", "hpa,pdb,deployment", "--output=name").split() == ["deployment.apps/digits"]
    deployment = site.get("deployment", "digits")
    assert [each["name"] for each in deployment["metadata"]["ownerReferences"]] == ["digits"]
