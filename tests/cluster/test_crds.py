"""The schemas in crds/ in a real API server: what it accepts, what it refuses with which message, and what kubectl shows."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, config

from cluster.access import Cluster
from support.bad_custom_resources import BAD, Bad
from support.custom_resources import GOOD, Json, changed, ensemble, model

pytestmark = pytest.mark.usefixtures("crds")
PLURALS = {"InferenceModel": "inferencemodels", "ModelEnsemble": "modelensembles"}


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[client.CustomObjectsApi]:
    with config.new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield client.CustomObjectsApi(connection)


def dry_run(api: client.CustomObjectsApi, given: Json) -> str:
    """What the API server has against an object; "" for nothing."""
    body = changed(given, {"metadata.namespace": "default"})
    plural = PLURALS[given["kind"]]
    try:
        api.create_namespaced_custom_object(
            "halimede.dev", "v1alpha1", "default", plural, body, dry_run="All", field_validation="Strict"
        )
    except client.ApiException as refusal:
        return str(json.loads(refusal.body or "")["message"])
    return ""


def test_good_objects_are_accepted(api: client.CustomObjectsApi) -> None:
    assert {name: message for name, example in GOOD.items() if (message := dry_run(api, example))} == {}


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_an_invalid_object_is_refused_with_path_and_valid_values(bad: Bad, api: client.CustomObjectsApi) -> None:
    message = dry_run(api, bad.object)
    assert bad.path in message
    assert bad.message in message


def test_an_unknown_field_is_refused(api: client.CustomObjectsApi) -> None:
    misspelt = changed(model(), {"spec.model.versionPolice": {}, "spec.autoscalling": {"provider": "HPA"}})
    message = dry_run(api, misspelt)
    assert 'unknown field "spec.model.versionPolice"' in message
    assert 'unknown field "spec.autoscalling"' in message


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("im", "A trained model. The operator creates pods that serve it"),
        ("im.spec.model.uri", "For instance s3://models/bert."),
        ("imodel.spec.accelerator.mig.profile", "for instance 1g.10gb"),
        ("mens.spec.steps.inputs", "as request.TENSOR or STEP.OUTPUT"),
        ("mens.status.readySteps", "for instance 3/3"),
    ],
)
def test_kubectl_explains_fields(field: str, text: str, cluster: Cluster) -> None:
    assert text in " ".join(cluster.kubectl("explain", field).split())


def apply(cluster: Cluster, namespace: str, *objects: Json) -> None:
    for each in objects:
        document = changed(each, {"metadata.namespace": namespace})
        cluster.kubectl("apply", f"--namespace={namespace}", "-f", "-", given=json.dumps(document))


def patch_status(cluster: Cluster, namespace: str, target: str, status: Json) -> Any:
    patch = json.dumps({"status": status})
    answer = cluster.kubectl(
        "patch", f"--namespace={namespace}", target, "--subresource=status", "--type=merge", "--patch", patch, "-ojson"
    )
    return json.loads(answer)["status"]


READY = {
    "type": "Ready",
    "status": "True",
    "reason": "Serving",
    "message": "3/3 replicas serve version 2",
    "lastTransitionTime": "2026-11-01T00:00:00Z",
}
STATUS = {
    "observedGeneration": 1,
    "conditions": [READY],
    "phase": "Serving",
    "url": "http://bert.prod.svc:8000/v2/models/bert",
    "addresses": {"http": "http://bert.prod.svc:8000", "grpc": "bert.prod.svc:8001"},
    "replicas": 3,
    "readyReplicas": 2,
    "desiredReplicas": 3,
    "operator": "halimede/halimede",
    "selector": "halimede.dev/model=bert",
    "current": {"versions": [2], "templateHash": "6f9c", "image": "halimede:1"},
    "effective": {
        "resourceName": "nvidia.com/mig-1g.10gb",
        "profile": "1g.10gb",
        "nodes": "gpu-1",
        "serverImage": "halimede:1",
    },
    "placements": ["bert-6f9c-x on node-1: 1g.10gb MIG-1"],
    "memory": {
        "devicePeak": "3000Mi",
        "deviceTotal": "9856Mi",
        "hostPeak": "900Mi",
        "templateHash": "6f9c",
        "measuredAt": "2026-11-01T00:00:00Z",
    },
    "placementsTruncated": True,
    "autoscaling": {
        "desiredReplicas": 3,
        "lastDecision": "2 -> 3: halimede_queue_requests 6 of 4",
        "lastScaleTime": "2026-11-01T00:00:00Z",
        "idle": {"since": "2026-11-01T00:00:00Z", "of": "6f9c"},
    },
    "startup": "bert-6f9c-x created 2026-11-01T00:00:00Z: scheduled +0 s",
    "revisions": ["6f9c of generation 1: Serving"],
    "upgradeAvailable": True,
    "lastFailure": {
        "reason": "ModelFetchFailed",
        "message": "no such bucket",
        "pod": "bert-6f9c-x",
        "container": "fetch",
        "exitCode": 11,
        "time": "2026-11-01T00:00:00Z",
    },
}
FETCHED = {"digest": f"sha256:{'0' * 64}", "sizeBytes": 438000000, "fetchedAt": "2026-11-01T00:00:00Z"}


@pytest.mark.usefixtures("alone")
def test_a_status_is_kept_whole_and_shown_in_columns(cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, model(), ensemble())
    of_model = {**STATUS, "model": FETCHED}
    of_ensemble = {**STATUS, "members": ["bert: sha256:00, 438000000 bytes"], "readySteps": "3/3"}
    assert patch_status(cluster, namespace, "im/bert", of_model) == of_model
    assert patch_status(cluster, namespace, "mens/search", of_ensemble) == of_ensemble

    def table(what: str, *options: str) -> list[list[str]]:
        return [
            line.split() for line in cluster.kubectl("get", what, f"--namespace={namespace}", *options).splitlines()
        ]

    head, row = table("im")
    assert head == ["NAME", "READY", "REASON", "REPLICAS", "DESIRED", "GPU", "VERSION", "AGE"]
    assert row[:-1] == ["bert", "True", "Serving", "2", "3", "nvidia.com/mig-1g.10gb", "[2]"]
    head, row = table("imodel", "--output=wide")
    assert row[head.index("URL")] == "http://bert.prod.svc:8000/v2/models/bert"
    head, row = table("mens")
    assert head == ["NAME", "READY", "REASON", "STEPS", "MODE", "URL", "AGE"]
    assert row[:-1] == ["search", "True", "Serving", "3/3", "Colocate", "http://bert.prod.svc:8000/v2/models/bert"]
    assert {row[0] for row in table("halimede", "--no-headers") if row} == {
        "inferencemodel.halimede.dev/bert",
        "modelensemble.halimede.dev/search",
    }


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("target", "example"), [("im/bert", model()), ("mens/search", ensemble())])
def test_kubectl_scales(target: str, example: Json, cluster: Cluster, namespace: str) -> None:
    apply(cluster, namespace, example)
    patch_status(cluster, namespace, target, STATUS)
    cluster.kubectl("scale", f"--namespace={namespace}", target, "--current-replicas=1", "--replicas=5")
    plural, name = PLURALS[example["kind"]], example["metadata"]["name"]
    path = f"/apis/halimede.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 3, "selector": "halimede.dev/model=bert"}
