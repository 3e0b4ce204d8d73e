"""The platform's settings that pods contain.

An annotation of the Deployment has those that its pods were made with. It tells which changed settings the pods do not
have yet. With `upgradePolicy: Manual` new pods are made with them too.
"""

from dataclasses import replace
from typing import Any

from halimede_operator.core.names import canonical_json
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import json_object

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


def changed_settings(text: str, platform: Platform) -> tuple[str, ...]:
    """The names of the settings that are not those of an annotation: `server image`."""
    kept = read(text, platform)
    return tuple(name.replace("_", " ") for name in _SETTINGS if getattr(kept, name) != getattr(platform, name))
