"""Classification of errors. The messages are those of a real Kubernetes 1.36 API server."""

import pytest

from halimede_operator.core.api_errors import Cause, Meaning, meaning_of, message_for_author
from halimede_operator.core.platform import Platform
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Key, Kind
from support.operator_desired import children_of_spec

TYPED = "failed to create typed patch object (prod/digits; apps/v1, Kind=Deployment): "
CONVERTED = (
    "failed to convert new object (prod/digits; apps/v1, Kind=Deployment) to proper version: "
    "unable to convert unstructured object to apps/v1, Kind=Deployment: "
)
WEBHOOK = 'Internal error occurred: failed calling webhook "w.example.com": failed to call webhook: Post "https://w": '
ENDS = "unable to create new content in namespace prod because it is being terminated"
MEANINGS: dict[str, tuple[int, str, Meaning]] = {
    "unknown field": (500, TYPED + '.spec.template.spec.containers[name="server"].imagePullPolice: field not declared in schema', Meaning.REFUSED),
    "wrong type": (500, TYPED + ".spec.template.spec.terminationGracePeriodSeconds: expected numeric (int or float), got string", Meaning.REFUSED),
    "item twice": (500, TYPED + '.spec.ports: duplicate entries for key [port=80,protocol="TCP"]', Meaning.REFUSED),
    "bad quantity": (500, CONVERTED + "quantities must match the regular expression", Meaning.REFUSED),
    "what stands is broken": (500, "failed to convert live object (prod/digits; apps/v1, Kind=Deployment) to proper version: x", Meaning.REFUSED),
    "bad enum": (422, 'Deployment.apps "digits" is invalid: spec.template.spec.containers[0].imagePullPolicy: Unsupported value: "Nevr"', Meaning.REFUSED),
    "immutable field": (422, 'Deployment.apps "digits" is invalid: spec.selector: Invalid value: {}: field is immutable', Meaning.REFUSED),
    "admission policy": (422, "deployments.apps \"digits\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no", Meaning.REFUSED),
    "admission webhook": (403, 'admission webhook "w.example.com" denied the request: no', Meaning.REFUSED),
    "words of a webhook": (403, 'admission webhook "w.example.com" denied the request: team a cannot create resource of this kind', Meaning.REFUSED),
    "no such kind": (404, "the server could not find the requested resource", Meaning.REFUSED),
    "too large": (413, "Request entity too large: limit is 3145728", Meaning.REFUSED),
    "too large for etcd": (500, "etcdserver: request is too large", Meaning.REFUSED),
    "quota": (403, 'deployments.apps "digits" is forbidden: exceeded quota: q, requested: count/deployments.apps=1', Meaning.OVER_QUOTA),
    "rights": (403, 'services "digits" is forbidden: User "system:serviceaccount:halimede:halimede" cannot patch resource "services" in API group ""', Meaning.FORBIDDEN),
    "right to block the owner's end": (403, "services \"digits\" is forbidden: cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on: , <nil>", Meaning.FORBIDDEN),
    "kind that is new": (403, 'deployments.apps "digits" is forbidden: cannot set blockOwnerDeletion in this case because cannot find RESTMapping for APIVersion halimede.dev/v1alpha1 Kind InferenceModel: no matches for kind "InferenceModel" in version "halimede.dev/v1alpha1"', Meaning.TRANSIENT),
    "namespace ends": (403, f'configmaps "digits" is forbidden: {ENDS}', Meaning.NAMESPACE_TERMINATING),
    "namespace is gone": (404, 'namespaces "prod" not found', Meaning.NAMESPACE_TERMINATING),
    "another version": (409, 'Operation cannot be fulfilled on deployments.apps "digits": the object has been modified', Meaning.CONFLICT),
    "exists": (409, 'services "digits" already exists', Meaning.CONFLICT),
    "no answer": (0, "TimeoutError", Meaning.TRANSIENT),
    "expired token": (401, "Unauthorized", Meaning.TRANSIENT),
    "too many requests": (429, "the server has received too many requests and has asked us to try again later", Meaning.TRANSIENT),
    "webhook unreachable": (500, WEBHOOK + "dial tcp 127.0.0.1:1: connect: connection refused", Meaning.TRANSIENT),
    "webhook in trouble": (500, 'admission webhook "w.example.com" denied the request: cache is not synced', Meaning.TRANSIENT),
    "internal error": (500, "Internal error occurred: resource quota evaluation timed out", Meaning.TRANSIENT),
    "etcd": (500, "etcdserver: leader changed", Meaning.TRANSIENT),
    "not ready": (503, "apiserver is shutting down", Meaning.TRANSIENT),
    "timeout": (504, "Timeout: request did not complete within requested timeout - context deadline exceeded", Meaning.TRANSIENT),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
def test_errors_are_classified_by_status_and_message(case: str):
    status, message, meaning = MEANINGS[case]
    assert meaning_of(status, message) is meaning


def test_the_cause_namespace_terminating_is_enough():
    assert meaning_of(403, "no", (Cause("NamespaceTerminating"),)) is Meaning.NAMESPACE_TERMINATING


AFFINITY = {"nodeAffinity": {"requiredDuring": {}, "terms": [{"weight": 1000}]}}
SPEC = {
    "model": {"uri": "s3://models/digits"},
    "env": [{"name": "LEVEL", "valueFrom": {"fieldRef": {"fieldPath": "status.nonsense"}}}],
    "resources": {"requests": {"example.com/fpga": "1"}},
    "scheduling": {"affinity": AFFINITY},
    "podTemplate": {
        "spec": {
            "shareProcessNamespace": "yes",
            "topologySpreadConstraints": [{"maxSkew": 1}],
            "containers": [{"name": "server", "imagePullPolice": "Never", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}, {"name": "side", "resources": {"limits": {"cpu": "1"}}}],
        }
    },
}  # fmt: skip
PATHS: dict[str, tuple[str, str]] = {
    "a named item": (
        TYPED + '.spec.template.spec.containers[name="server"].imagePullPolice: field not declared in schema',
        "spec.podTemplate.spec.containers[server].imagePullPolice: field not declared in schema",
    ),
    "a number of the whole list": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[0].volumeMounts[4].name: Not found: "x"',
        'spec.podTemplate.spec.containers[server].volumeMounts[/x].name: Not found: "x"',
    ),
    "two fields": (
        'Deployment.apps "digits" is invalid: [spec.template.spec.shareProcessNamespace: bad, spec.selector: bad]',
        "[spec.podTemplate.spec.shareProcessNamespace: bad, spec.selector: bad]",
    ),
    "a field that is missing": (
        'Deployment.apps "digits" is invalid: spec.template.spec.topologySpreadConstraints[0].topologyKey: Required value',
        "spec.podTemplate.spec.topologySpreadConstraints[0].topologyKey: Required value",
    ),
    "affinity": (
        TYPED + ".spec.template.spec.affinity.nodeAffinity.requiredDuring: field not declared in schema",
        "spec.scheduling.affinity.nodeAffinity.requiredDuring: field not declared in schema",
    ),
    "an item without a name": (
        'Deployment.apps "digits" is invalid: spec.template.spec.affinity.nodeAffinity.terms[0].weight: Invalid value: 1000',
        "spec.scheduling.affinity.nodeAffinity.terms[0].weight: Invalid value: 1000",
    ),
    "a variable": (
        'Deployment.apps "digits" is invalid: spec.template.spec.initContainers[0].env[0].valueFrom.fieldRef.fieldPath: no',
        "spec.env[LEVEL].valueFrom.fieldRef.fieldPath: no",
    ),
    "resources": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[0].resources.requests[example.com/fpga]: no',
        "spec.resources.requests[example.com/fpga]: no",
    ),
    "resources that are missing": (
        'Deployment.apps "digits" is invalid: spec.template.spec.initContainers[0].resources.limits: Required value: Limit',
        "spec.resources.limits: Required value: Limit",
    ),
    "resources of another container": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[1].resources.limits[cpu]: no',
        "spec.podTemplate.spec.containers[side].resources.limits[cpu]: no",
    ),
    "what is missing in another container": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[1].resources.requests: Required value',
        "spec.podTemplate.spec.containers[side].resources.requests: Required value",
    ),
    "what is in neither container's part of the spec": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[1].resources.claims[0]: no',
        "spec.template.spec.containers[1].resources.claims[0]: no",
    ),
    "devices": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[0].resources.limits[nvidia.com/gpu]: no',
        "spec.template.spec.containers[0].resources.limits[nvidia.com/gpu]: no",
    ),
    "what is not of the spec": (
        'Deployment.apps "digits" is invalid: spec.template.spec.containers[0].command: no',
        "spec.template.spec.containers[0].command: no",
    ),
    "no path": (CONVERTED + "cannot convert float64 to int64", "cannot convert float64 to int64"),
    "other words": (WEBHOOK + "refused", WEBHOOK + "refused"),
}


@pytest.mark.parametrize("case", PATHS)
def test_paths_in_messages_are_those_of_the_spec(case: str):
    message, expected = PATHS[case]
    assert message_for_author(500, message, _deployment(), SPEC) == expected


def test_a_missing_answer_is_reported_as_such():
    assert message_for_author(0, "TimeoutError", _deployment(), SPEC) == "no answer from the API server: TimeoutError"


def _deployment() -> Object:
    platform = Platform(server_image="server:1", gpu_server_image="gpu:1")
    value = {"metadata": {"name": "digits", "namespace": "prod"}, "spec": SPEC}
    spec, problems = parse(Kind.INFERENCE_MODEL, value, platform)
    assert spec is not None, problems
    children = children_of_spec(Key(Kind.INFERENCE_MODEL, "prod", "digits"), "uid", spec, {}, platform)
    return next(child for child in children if child["kind"] == "Deployment")
