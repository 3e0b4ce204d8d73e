"""InferenceModels and ModelEnsembles that the schema and the operator refuse."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from support.bad_accelerators import BAD_ACCELERATORS
from support.bad_autoscaling import BAD_AUTOSCALING
from support.custom_resources import ABSENT, Json, changed, ensemble, model


@dataclass(frozen=True)
class Bad:
    """An object that the API server refuses, and the operator too; `message` is a part of the API server's message."""

    name: str
    object: Json
    path: str
    message: str


_Rows = Mapping[str, tuple[str, Any, str, str]]
"""By name: a field, its value, the path of the refused part below the field, and a part of the message."""
_LONG = "x" * 2000
_BAD_MODELS: _Rows = {
    "name-digit": ("metadata.name", "7b", "", "start with a letter"),
    "name-long": ("metadata.name", "m" * 51, "", "at most 50 lower case letters"),
    "no-model": ("spec.model", ABSENT, "", "Required value"),
    "no-uri": ("spec.model", {}, ".uri", "Required value"),
    "uri-number": ("spec.model.uri", 7, "", "must be of type string"),
    "uri-empty": ("spec.model.uri", "", "", "at least 1 chars long"),
    "uri-long": ("spec.model.uri", f"s3://{_LONG}", "", "Too long"),
    "uri-scheme": ("spec.model.uri", "ftp://models/bert", "", "must be a URI such as s3://models/bert"),
    "uri-path": ("spec.model.uri", "/models/bert", "", "must be a URI such as s3://models/bert"),
    "uri-space": ("spec.model.uri", "https://example.com/my bert", "", "must be a URI such as s3://models/bert"),
    "uri-bucket": ("spec.model.uri", "s3:///bert", "", "must be a URI such as s3://models/bert"),
    "uri-password": ("spec.model.uri", "https://me:secret@example.com/m", "", "must not carry a user"),
    "uri-parent": ("spec.model.uri", "pvc://models/../other", "", "must have a path without '.', '..'"),
    "uri-here": ("spec.model.uri", "s3://models/./bert", "", "must have a path without '.', '..'"),
    "uri-nothing": ("spec.model.uri", "file:///srv//models", "", "must have a path without '.', '..'"),
    "uri-backslash": ("spec.model.uri", "gs://models/a\\b", "", "must have a path without '.', '..'"),
    "uri-container": ("spec.model.uri", "azure://a?b/c", "", "must be a URI such as s3://models/bert"),
    "uri-account": ("spec.model.uri", "as://a/b/c", "", "must be a URI such as s3://models/bert"),
    "uri-host-file": ("spec.model.uri", "file://models/bert", "", "must be a URI such as s3://models/bert"),
    "model-name": ("spec.model.name", "a/b", "", "must be of letters, digits"),
    "model-dots": ("spec.model.name", "a..b", "", "not contain '..'"),
    "digest": ("spec.model.digest", "md5:00", "", "must be sha256: and 64 digits"),
    "format": ("spec.model.format", "caffe", "", 'supported values: "onnx", "python", "torch"'),
    "secret": (
        "spec.model.credentials",
        {"secretRef": {"name": "a_b"}},
        ".secretRef.name",
        "must be a name of lower case letters",
    ),
    "secret-none": ("spec.model.credentials", {"secretRef": {}}, ".secretRef.name", "Required value"),
    "ca-none": ("spec.model.credentials", {"caBundle": {"key": "x"}}, ".caBundle.configMapName", "Required value"),
    "ca-key": (
        "spec.model.credentials",
        {"caBundle": {"configMapName": "ca", "key": "../x"}},
        ".caBundle.key",
        "must be a key of a ConfigMap",
    ),
    "volume-credentials": (
        "spec.model",
        {"uri": "pvc://models/bert", "credentials": {"secretRef": {"name": "store"}}},
        "",
        "takes no credentials",
    ),
    "policy-none": ("spec.model.versionPolicy", {}, "", "must have exactly one of latest, all"),
    "policy-two": ("spec.model.versionPolicy", {"latest": 1, "all": {}}, "", "must have exactly one of latest, all"),
    "policy-latest": ("spec.model.versionPolicy", {"latest": 0}, ".latest", "greater than or equal to 1"),
    "policy-empty": ("spec.model.versionPolicy", {"specific": []}, ".specific", "at least 1 items"),
    "policy-twice": ("spec.model.versionPolicy", {"specific": [1, 1]}, ".specific[1]", "Duplicate value"),
    "config": ("spec.model.config", [1], "", "must be of type object"),
}
_BAD_WORKLOADS: _Rows = {
    **{name: ("spec.autoscaling", *row) for name, row in BAD_AUTOSCALING.items()},
    "replicas-negative": ("spec.replicas", -1, "", "greater than or equal to 0"),
    "replicas-text": ("spec.replicas", "two", "", "must be of type integer"),
    "suspend-text": ("spec.suspend", "yes", "", "must be of type boolean"),
    **{name: ("spec.accelerator", *row) for name, row in BAD_ACCELERATORS.items()},
    "quantity": ("spec.resources", {"limits": {"memory": "8 GB"}}, ".limits[memory]", "must be a quantity"),
    "quantity-negative": ("spec.resources", {"requests": {"cpu": "-1"}}, ".requests[cpu]", "must be a quantity"),
    "quantity-negative-number": ("spec.resources", {"requests": {"cpu": -1}}, ".requests[cpu]", "must be a quantity"),
    "request-above-limit": (
        "spec.resources",
        {"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}},
        "",
        "a request must not be above the limit",
    ),
    "gpu-resource": ("spec.resources", {"limits": {"nvidia.com/gpu": 1}}, ".limits", "use spec.accelerator"),
    "node-selector": ("spec.scheduling", {"nodeSelector": {"a b": "c"}}, ".nodeSelector", "names of labels"),
    "toleration-effect": (
        "spec.scheduling",
        {"tolerations": [{"key": "a", "effect": "Never"}]},
        ".tolerations[0].effect",
        "supported values",
    ),
    "toleration-key": (
        "spec.scheduling",
        {"tolerations": [{"value": "a"}]},
        ".tolerations[0]",
        "the operator must be Exists",
    ),
    "toleration-value": (
        "spec.scheduling",
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        ".tolerations[0]",
        "operator Exists takes no value",
    ),
    "toleration-seconds": (
        "spec.scheduling",
        {"tolerations": [{"key": "a", "operator": "Exists", "tolerationSeconds": 5}]},
        ".tolerations[0]",
        "tolerationSeconds is for effect NoExecute",
    ),
    "affinity": ("spec.scheduling", {"affinity": {"nodeAffinity": 1}}, ".affinity.nodeAffinity", "of type object"),
    "spread": ("spec.scheduling", {"topologySpread": "Rack"}, ".topologySpread", "supported values"),
    "priority-class": ("spec.scheduling", {"priorityClassName": "High!"}, ".priorityClassName", "lower case letters"),
    "protocol": ("spec.serving", {"protocols": ["smtp"]}, ".protocols[0]", 'supported values: "http", "grpc"'),
    "protocols-none": ("spec.serving", {"protocols": []}, ".protocols", "at least 1 items"),
    "port-low": ("spec.serving", {"ports": {"http": 80}}, ".ports.http", "greater than or equal to 1024"),
    "port-high": ("spec.serving", {"ports": {"grpc": 65536}}, ".ports.grpc", "less than or equal to 65535"),
    "ports-equal": ("spec.serving", {"ports": {"http": 8001}}, ".ports", "three different ports"),
    "message-size": ("spec.serving", {"maxMessageSize": "64MB"}, ".maxMessageSize", "for instance 64Mi"),
    "message-size-large": ("spec.serving", {"maxMessageSize": "2Gi"}, ".maxMessageSize", "just below 2Gi"),
    "message-size-small": ("spec.serving", {"maxMessageSize": 5}, ".maxMessageSize", "from 1Ki"),
    "drain": ("spec.serving", {"drainTimeout": "2h"}, ".drainTimeout", "at most 1h"),
    "flag": ("spec.serving", {"args": ["-v"]}, ".args[0]", "must be a flag of the server as --name=value"),
    "flag-value": ("spec.serving", {"args": ["--log-verbose 1"]}, ".args[0]", "must be a flag of the server"),
    "policy": ("spec.rollout", {"policy": "Fast"}, ".policy", "supported values"),
    "deadline": ("spec.rollout", {"progressDeadline": "25h"}, ".progressDeadline", "at most 24h"),
    "deadline-short": ("spec.rollout", {"progressDeadline": "9s"}, ".progressDeadline", "at least 10s"),
    "paused": ("spec.rollout", {"paused": "yes"}, ".paused", "must be of type boolean"),
    "roll-back": ("spec.rollout", {"autoRollback": "no"}, ".autoRollback", "must be of type boolean"),
    "rebalance": ("spec.rollout", {"rebalance": "no"}, ".rebalance", "must be of type boolean"),
    "upgrade": ("spec.rollout", {"upgradePolicy": "Never"}, ".upgradePolicy", "supported values"),
    "image": ("spec.image", {"reference": "my image"}, ".reference", "must be an image such as"),
    "pull-policy": ("spec.image", {"pullPolicy": "Sometimes"}, ".pullPolicy", "supported values"),
    "pull-secret": ("spec.image", {"pullSecrets": [{"name": "A"}]}, ".pullSecrets[0].name", "lower case letters"),
    "env-name": ("spec.env", [{"name": "1A", "value": ""}], "[0].name", "not start with a digit"),
    "env-none": ("spec.env", [{"value": "x"}], "[0].name", "Required value"),
    "env-twice": ("spec.env", [{"name": "A", "value": "x"}, {"name": "A", "value": "y"}], "[1]", "Duplicate value"),
    "env-both": (
        "spec.env",
        [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "[0]",
        "must have value or valueFrom, not both",
    ),
    "env-source": ("spec.env", [{"name": "A", "valueFrom": {}}], "[0].valueFrom", "must have exactly one of"),
    "env-devices": (
        "spec.env",
        [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
        "[0].name",
        "would open devices of other pods",
    ),
    "account": ("spec.serviceAccountName", "Admin", "", "lower case letters"),
    "template-labels": ("spec.podTemplate", {"metadata": {"labels": {"a": 1}}}, ".metadata.labels", "of type string"),
    "template-spec": ("spec.podTemplate", {"spec": []}, ".spec", "must be of type object"),
    "unavailable": ("spec.disruption", {"maxUnavailable": "about half"}, ".maxUnavailable", "or a share such as 25%"),
    "unavailable-quoted": ("spec.disruption", {"maxUnavailable": "1"}, ".maxUnavailable", "without quotes"),
    "unavailable-negative": ("spec.disruption", {"maxUnavailable": -1}, ".maxUnavailable", "or a share such as 25%"),
    "unavailable-disabled": (
        "spec.disruption",
        {"maxUnavailable": 1, "disabled": True},
        "",
        "maxUnavailable has no meaning with disabled",
    ),
    "allow-open": ("spec.networkPolicy", {"allowFrom": [{"podSelector": {}}]}, "", "allowFrom needs enabled"),
    "allow-nothing": (
        "spec.networkPolicy",
        {"enabled": True, "allowFrom": [{}]},
        ".allowFrom[0]",
        "either ipBlock or selectors",
    ),
    "allow-operator": (
        "spec.networkPolicy",
        {"enabled": True, "allowFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]},
        ".allowFrom[0].podSelector.matchExpressions[0]",
        "In and NotIn need values",
    ),
    "allow-cidr": (
        "spec.networkPolicy",
        {"enabled": True, "allowFrom": [{"ipBlock": {"cidr": "10.0.0.0"}}]},
        ".allowFrom[0].ipBlock.cidr",
        "must be a block of addresses",
    ),
    "allow-hole": (
        "spec.networkPolicy",
        {"enabled": True, "allowFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]},
        ".allowFrom[0].ipBlock",
        "within cidr",
    ),
    "cache-claim": ("spec.cache", {"medium": "PVC"}, "", "medium PVC needs pvc.claimName"),
    "cache-medium": ("spec.cache", {"pvc": {"claimName": "models"}}, "", "no other medium may have it"),
    "cache-path": (
        "spec.cache",
        {"medium": "PVC", "pvc": {"claimName": "models", "subPath": "../other"}},
        ".pvc.subPath",
        "without '..'",
    ),
    "cache-size": ("spec.cache", {"sizeLimit": "0"}, ".sizeLimit", "must be a quantity above 0"),
}
_STEPS = ensemble()["spec"]["steps"]
_BAD_ENSEMBLES: _Rows = {
    "no-steps": ("spec.steps", ABSENT, "", "Required value"),
    "steps-none": ("spec.steps", [], "", "at least 1 items"),
    "steps-many": ("spec.steps", [{**_STEPS[0], "name": f"s{i}"} for i in range(33)], "", "Too many"),
    "step-twice": ("spec.steps[1]", {**_STEPS[1], "name": "tok"}, "", "Duplicate value"),
    "step-name": ("spec.steps[1].name", "Bert", "", "lower case letters"),
    "step-reserved": ("spec.steps[1].name", "request", "", "neither request nor parameters"),
    "step-model": ("spec.steps[1].modelRef", {}, ".name", "Required value"),
    "step-version": ("spec.steps[1].modelRef.version", 0, "", "greater than or equal to 1"),
    "step-inputs": ("spec.steps[1].inputs", {}, "", "at least 1 properties"),
    "step-input": ("spec.steps[1].inputs", {"ids": "ids"}, "", "as request.TENSOR or STEP.OUTPUT"),
    "step-input-name": ("spec.steps[1].inputs", {"": "tok.ids"}, "", "as request.TENSOR or STEP.OUTPUT"),
    "step-output-name": ("spec.steps[1].outputs", {"": "hidden"}, "", "does not start with a digit"),
    "step-outputs": ("spec.steps[1].outputs", ABSENT, "", "Required value"),
    "step-output": ("spec.steps[1].outputs", {"state": "a b"}, "", "does not start with a digit"),
    "when-long": ("spec.steps[1].when", "a" * 1025, "", "Too long"),
    "tensor-type": ("spec.inputs[0].dataType", "TEXT", "", "supported values"),
    "tensor-shape": ("spec.inputs[0].shape", [0], "", "or -1 for one that varies"),
    "tensor-negative": ("spec.inputs[0].shape", [-2], "[0]", "greater than or equal to -1"),
    "tensor-scalar": ("spec.outputs[0].shape", [], "", "at least 1 items"),
    "tensor-name": ("spec.inputs[0].name", "A B", "", "must not contain spaces"),
    "output-source": ("spec.outputs[0].from", ABSENT, "", "Required value"),
    "output-request": ("spec.outputs[0].from", "request.TEXT", "", "must be the output of a step"),
    "batch": ("spec.maxBatchSize", -1, "", "greater than or equal to 0"),
    "mode": ("spec.placement", {"mode": "Distributed"}, ".mode", 'supported values: "Colocate"'),
}


def _bad() -> Iterator[Bad]:
    tables = (
        ("", model, _BAD_MODELS),
        ("", model, _BAD_WORKLOADS),
        ("ensemble-", ensemble, _BAD_WORKLOADS),
        ("ensemble-", ensemble, _BAD_ENSEMBLES),
    )
    for prefix, make, table in tables:
        for name, (field, value, below, message) in table.items():
            yield Bad(f"{prefix}{name}", changed(make(f"{prefix}{name}"), {field: value}), field + below, message)


BAD = tuple(_bad())
