"""Children by their kind, and the parts of their pods."""

from collections.abc import Mapping
from typing import Any

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.types import EnsembleSpec, Key, ModelSpec, Spec
from support.operator_desired import children_of_spec
from support.operator_specs import PLATFORM, UID, ensemble_key, model_key

Object = dict[str, Any]


def children_of(
    spec: Spec, members: Mapping[str, ModelSpec] | None = None, *, key: Key | None = None, platform: Platform = PLATFORM
) -> dict[str, Object]:
    """By kind, and by name where there are two: `Deployment`, `Service/bert-pods`."""
    key = key or (ensemble_key() if isinstance(spec, EnsembleSpec) else model_key())
    named = [
        (f"{child['kind']}/{child['metadata']['name']}", child)
        for child in children_of_spec(key, UID, spec, members or {}, platform)
    ]
    kinds = [name.partition("/")[0] for name, _ in named]
    return {name if kinds.count(kind) > 1 else kind: child for kind, (name, child) in zip(kinds, named, strict=True)}


def template_of(children: Mapping[str, Object]) -> Object:
    template: Object = children["Deployment"]["spec"]["template"]
    return template


def pod_of(spec: Spec, members: Mapping[str, ModelSpec] | None = None, **options: Any) -> Object:
    pod: Object = template_of(children_of(spec, members, **options))["spec"]
    return pod


def fetch_of(pod: Object) -> Object:
    return named(pod["initContainers"], "fetch")


def server_of(pod: Object) -> Object:
    return named(pod["containers"], "server")


def named(items: list[Object], name: str) -> Object:
    (found,) = (item for item in items if item["name"] == name)
    return found
