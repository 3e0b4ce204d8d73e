"""Parses objects of the API server into specs: applies defaults and reports all problems at once.

The schemas in `crds/` refuse most invalid objects when they are applied. Everything is checked again here, because the
schema in the cluster may be older or newer than the operator. Unknown fields are ignored.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from halimede_operator.core.api.ensemble import read_ensemble
from halimede_operator.core.api.reading import DNS_NAME, INT32_MAX, INT64_MAX, Field, Rule, shown
from halimede_operator.core.api.spec import (
    UNREAD,
    AcceleratorType,
    CaBundle,
    EnsembleSpec,
    Json,
    Kind,
    Model,
    ModelSpec,
    Problem,
    Spec,
    Workload,
)
from halimede_operator.core.api.uris import MOUNTED, Uri, is_below, read_uri
from halimede_operator.core.api.workload import read_workload
from halimede_operator.core.platform import Platform
from halimede_spec.fetch_plan import DIGEST, FORMATS

_OBJECT_NAME = Rule(
    re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII),
    "must be at most 50 lower case letters, digits and '-', start with a letter and end with a letter or digit",
    50,
)
_MODEL_NAME = Rule(
    re.compile(r"(?!.*\.\.)[A-Za-z0-9_]([-A-Za-z0-9_.]*[A-Za-z0-9_])?", re.ASCII),
    "must be of letters, digits, '_', '-' and '.', neither start nor end with '-' or '.', and not contain '..'",
    128,
)
_DIGEST = Rule(DIGEST, "must be sha256: and 64 digits of 0-9 and a-f", 71)
_CONFIG_MAP_KEY = Rule(
    re.compile(r"(?!\.\.)(?!\.$)[-._a-zA-Z0-9]+", re.ASCII),
    "must be a key of a ConfigMap, of letters, digits, '-', '_' and '.'",
    253,
)
_INSTANCE_KINDS = {"CPU": "KIND_CPU", "GPU": "KIND_GPU", "Auto": "KIND_AUTO"}
_MAX_INSTANCES = 256


def parse(kind: Kind, object: Mapping[str, Any], platform: Platform) -> tuple[Spec | None, tuple[Problem, ...]]:  # noqa: A002
    """The spec of an object, or all its problems; never both. Does not raise."""
    root = Field("", object, {})
    if isinstance(unread := object.get(UNREAD), str):
        return None, (Problem("spec", unread),)
    metadata = root.section("metadata")
    name = metadata.get("name").required("the object's name").text("", _OBJECT_NAME)
    namespace = metadata.get("namespace").text("")
    spec = root.section("spec").required("what to serve")
    workload = read_workload(spec, namespace, platform)
    parsed: ModelSpec | EnsembleSpec
    match kind:
        case Kind.INFERENCE_MODEL:
            parsed = ModelSpec(_model(spec.section("model"), name, workload, platform), workload)
        case Kind.MODEL_ENSEMBLE:
            parsed = read_ensemble(spec, name, workload)
    return (None, tuple(root.problems)) if root.problems else (parsed, ())


def _model(field: Field, object_name: str, workload: Workload, platform: Platform) -> Model:
    uri = _uri(field.get("uri").required("where the model's files are, for instance s3://models/bert"), platform)
    credentials = field.section("credentials")
    if credentials.given and uri is not None and uri.scheme in MOUNTED:
        credentials.refuse(
            f"must not be set: a model on a volume ({uri.scheme}) is read in place and takes no credentials"
        )
    secret = credentials.section("secretRef")
    if secret.given:
        secret.get("name").required("the Secret's name")
    return Model(
        name=field.get("name").text(object_name, _MODEL_NAME),
        uri=field.get("uri").text(""),
        digest=field.get("digest").text(None, _DIGEST),
        format=field.get("format").choice(None, *FORMATS),
        credentials_secret=secret.get("name").text(None, DNS_NAME),
        ca_bundle=_ca_bundle(credentials.section("caBundle")),
        config={
            **_version_policy(field.section("versionPolicy")),
            **_config(field.section("config"), workload.accelerator.type is not AcceleratorType.NONE),
        },
    )


def _uri(field: Field, platform: Platform) -> Uri | None:
    text = field.text(None)
    if text is None:
        return None
    uri = read_uri(text)
    if isinstance(uri, str):
        # A password in a URI must not get into conditions and events.
        field.refuse(uri if "@" in text else f"{uri}, got {shown(text)}")
        return None
    if uri.scheme not in platform.schemes:
        field.refuse(
            f"must have a scheme that is allowed here ({', '.join(sorted(platform.schemes))}), got {shown(text)}"
        )
    elif uri.scheme == "file" and not any(is_below(uri.path, root) for root in platform.file_roots):
        roots = ", ".join(platform.file_roots) or "none"
        field.refuse(f"must be within a folder that is allowed here ({roots}), got {shown(text)}")
    return uri


def _ca_bundle(field: Field) -> CaBundle | None:
    if not field.given:
        return None
    return CaBundle(
        config_map=field.get("configMapName").required("the ConfigMap's name").text("", DNS_NAME),
        key=field.get("key").text("ca.crt", _CONFIG_MAP_KEY),
    )


def _version_policy(field: Field) -> Json:
    if not field.given:
        return {}
    given = [name for name in ("latest", "all", "specific") if field.get(name).given]
    if len(given) != 1:
        field.refuse(f"must have exactly one of latest, all and specific, got {len(given)}")
    policies: dict[str, Json] = {
        "latest": {"num_versions": field.get("latest").integer(1, 1)},
        "all": dict[str, Any](),
        "specific": {"versions": _distinct(field.get("specific"), INT64_MAX, least=1)},
    }
    field.section("all")
    return {"version_policy": {name: policies[name] for name in given}}


def _distinct(field: Field, maximum: int, least: int = 0) -> list[int]:
    """A list of different numbers, each at least 1."""
    numbers: list[int] = []
    for entry in field.items(least=least):
        number = entry.required("a number").integer(0, 1, maximum)
        if number in numbers and number:
            entry.refuse(f"must not be listed twice: {number}")
        numbers.append(number)
    return numbers


def _config(field: Field, has_gpu: bool) -> Json:
    """ModelConfig's JSON with the proto's field names; {} if nothing is overridden."""
    config: dict[str, Any] = {}
    max_batch_size = field.get("maxBatchSize").integer(None, 0)
    if max_batch_size is not None:
        config["max_batch_size"] = max_batch_size
    batching = field.section("dynamicBatching")
    if batching.given:
        config["dynamic_batching"] = _dynamic_batching(batching, max_batch_size)
    groups = field.get("instances").objects(least=1)
    if field.get("instances").given:
        config["instance_group"] = [_instances(group, has_gpu) for group in groups]
        if sum(group.get("count").integer(1, 1, _MAX_INSTANCES) for group in groups) > _MAX_INSTANCES:
            field.get("instances").refuse(f"must be at most {_MAX_INSTANCES} in all")
    parameters = field.section("parameters").named_entries()
    if parameters:
        config["parameters"] = {
            name: {"string_value": value.text("", max_length=4096, empty=True)} for name, value in parameters.items()
        }
    return config


def _dynamic_batching(field: Field, max_batch_size: int | None) -> Json:
    batching: dict[str, Any] = {}
    sizes = field.get("preferredBatchSizes")
    if sizes.given:
        batching["preferred_batch_size"] = _distinct(sizes, INT32_MAX)
        for entry, size in zip(sizes.items(), batching["preferred_batch_size"], strict=True):
            if max_batch_size is not None and size > max_batch_size:
                entry.refuse(f"must not be above maxBatchSize, which is {max_batch_size}, got {size}")
    delay = field.get("maxQueueDelay").microseconds("24h")
    if delay is not None:
        batching["max_queue_delay_microseconds"] = math.ceil(delay)
    policy: dict[str, Any] = {}
    size = field.get("maxQueueSize").integer(None, 0)
    if size is not None:
        policy["max_queue_size"] = size
    timeout = field.get("queueTimeout").microseconds("24h")
    if timeout is not None:
        policy["default_timeout_microseconds"] = math.ceil(timeout)
    if policy:
        batching["default_queue_policy"] = policy
    return batching


def _instances(field: Field, has_gpu: bool) -> Json:
    kind = field.get("kind").choice("Auto", *_INSTANCE_KINDS)
    if kind == "GPU" and not has_gpu:
        field.get("kind").refuse("needs spec.accelerator of type GPU, MIG or Shared, got kind GPU without one")
    group: dict[str, Any] = {"kind": _INSTANCE_KINDS[kind]}
    count = field.get("count").integer(None, 1, _MAX_INSTANCES)
    return group if count is None else {**group, "count": count}
