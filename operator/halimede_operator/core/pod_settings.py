"""The platform's settings that pods contain, and when changed settings reach them.

A changed setting, such as a new image of the server, does not replace pods that are ready. An annotation of the
Deployment holds the settings that its pods were made with. They stay until the object's own change replaces the pods,
or until none of the pods is ready.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from halimede_operator.core.labels import POD_SETTINGS, REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.names import canonical_json
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import at, condition, json_object, text_at
from halimede_operator.core.snapshot import Object

_SETTINGS = (
    "server_image",
    "gpu_server_image",
    "image_pull_policy",
    "gpu_image_pull_policy",
    "image_pull_secrets",
    "cache_host_path",
    "s3_endpoint",
    "s3_region",
    "s3_secret",
    "node_lost_toleration_seconds",
)


def written(platform: Platform) -> str:
    """The settings as text, for the annotation."""
    return canonical_json({name: getattr(platform, name) for name in _SETTINGS})


def read(text: str, platform: Platform) -> Platform:
    """The platform with the settings from an annotation. Unknown keys and values of a wrong type are ignored."""
    found = json_object(text) or {}
    given = {name: found[name] for name in _SETTINGS if name in found and _is_value(name, found[name])}
    if "image_pull_secrets" in given:
        given["image_pull_secrets"] = tuple(given["image_pull_secrets"])
    return replace(platform, **given)


def _is_value(name: str, value: Any) -> bool:  # Any: JSON
    if name == "image_pull_secrets":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value is None or type(value) is (int if name == "node_lost_toleration_seconds" else str)


def with_kept_settings(
    make: Callable[[Platform], tuple[Object, ...]],
    platform: Platform,
    existing: Sequence[Object],
    pods: Sequence[Object],
) -> tuple[tuple[Object, ...], str]:
    """The wanted children, and the settings that wait for the object's next pods as a text ("" if there are none).

    make: builds the children for a platform. existing: the object's children in the cluster.
    """
    wanted = make(platform)
    (deployment,) = (child for child in wanted if child["kind"] == "Deployment")
    name = deployment["metadata"]["name"]
    found = next((each for each in existing if (each["kind"], each["metadata"]["name"]) == ("Deployment", name)), None)
    kept = read(text_at(found, "metadata", "annotations", POD_SETTINGS), platform)
    if kept == platform or _template_hash(found) == _template_hash(deployment) or not _is_serving(found, pods):
        return wanted, ""
    children = make(kept)
    if _template_hash(found) not in map(_template_hash, children):
        return wanted, ""
    changed = (each for each in _SETTINGS if getattr(kept, each) != getattr(platform, each))
    return children, ", ".join(each.replace("_", " ") for each in changed)


def _template_hash(deployment: Object | None) -> str:
    return text_at(deployment, "metadata", "annotations", TEMPLATE_HASH)


def _is_serving(deployment: Object | None, pods: Sequence[Object]) -> bool:
    """Whether a pod of the Deployment's current template is ready."""
    revision = at(deployment, "spec", "template", "metadata", "labels", REVISION_LABEL)
    return any(
        at(pod, "metadata", "labels", REVISION_LABEL) == revision and condition(pod, "Ready").get("status") == "True"
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    )
