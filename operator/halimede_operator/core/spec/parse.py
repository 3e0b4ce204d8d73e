"""Parses objects of the API server into specs: applies defaults and reports all problems at once.

The schemas in `crds/` refuse most invalid objects when they are applied. Everything is checked again here, because the
schema in the cluster may be older or newer than the operator. Unknown fields are ignored.
"""

import re
from collections.abc import Mapping
from typing import Any

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.ensemble import read_ensemble
from halimede_operator.core.spec.field import DNS_NAME, INT64_MAX, Field, Rule, shown
from halimede_operator.core.spec.model_config import read_model_config
from halimede_operator.core.spec.types import (
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
from halimede_operator.core.spec.uris import MOUNTED, Uri, is_below, read_uri
from halimede_operator.core.spec.workload import read_workload
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
            **read_model_config(field.free_section("config"), workload.accelerator.type is not AcceleratorType.NONE),
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
        "latest": {"numVersions": field.get("latest").integer(1, 1)},
        "all": dict[str, Any](),
        "specific": {"versions": _distinct(field.get("specific"), INT64_MAX, least=1)},
    }
    field.section("all")
    return {"versionPolicy": {name: policies[name] for name in given}}


def _distinct(field: Field, maximum: int, least: int = 0) -> list[int]:
    """A list of different numbers, each at least 1."""
    numbers: list[int] = []
    for entry in field.items(least=least):
        number = entry.required("a number").integer(0, 1, maximum)
        if number in numbers and number:
            entry.refuse(f"must not be listed twice: {number}")
        numbers.append(number)
    return numbers
