"""How a model's files reach the pod: the URI, and what is mounted for it.

Secrets are mounted in the fetcher alone, where its one user has to read them: their files belong to root, and without a
group of the pod's own (see `pod`) mode 0440 would keep them from it. Claims and the node's folders are read-only, in
both containers, since the repository may hold links into them.
"""

from dataclasses import dataclass
from typing import Any

from halimede_operator.core.api.spec import Json, Model
from halimede_operator.core.api.uris import Uri, read_uri
from halimede_operator.core.names import canonical_json, hash_of, volume_name
from halimede_operator.core.platform import Platform

CREDENTIALS = "/run/halimede/credentials"
CA_BUNDLES = "/run/halimede/ca"
CLAIMS = "/run/halimede/claims"
NODE_PATHS = "/run/halimede/node"

READABLE = 0o444


@dataclass(frozen=True, slots=True)
class Source:
    """`plan` is the model's entry in the fetch plan."""

    plan: Json
    volumes: tuple[Json, ...]
    fetch_mounts: tuple[Json, ...]
    """Of the fetcher alone."""
    mounts: tuple[Json, ...]
    """Of both containers."""


def source_of(model: Model) -> Source:
    plan: dict[str, Any] = {"name": model.name, "uri": model.uri, "format": model.format, "digest": model.digest}
    plan["config"] = model.config or None
    volumes: list[Json] = []
    fetch_mounts: list[Json] = []
    mounts: list[Json] = []
    if (secret := model.credentials_secret) is not None:
        plan["credentials"] = f"{CREDENTIALS}/{secret}"
        name = volume_name("credentials", secret)
        volumes.append({"name": name, "secret": {"secretName": secret, "defaultMode": READABLE}})
        fetch_mounts.append({"name": name, "mountPath": plan["credentials"], "readOnly": True})
    if (bundle := model.ca_bundle) is not None:
        folder = f"{CA_BUNDLES}/{bundle.config_map}"
        plan["ca_bundle"] = f"{folder}/{bundle.key}"
        name = volume_name("ca", bundle.config_map)
        volumes.append({"name": name, "configMap": {"name": bundle.config_map, "defaultMode": READABLE}})
        fetch_mounts.append({"name": name, "mountPath": folder, "readOnly": True})
    match read_uri(model.uri):
        case Uri("pvc", claim, _):
            # The whole claim: a part of it that is missing would be an error of the kubelet's, not the fetcher's.
            plan["mount"] = f"{CLAIMS}/{claim}"
            name = volume_name("claim", claim)
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
            mounts.append({"name": name, "mountPath": plan["mount"], "readOnly": True})
        case Uri("file", _, path):
            # That path alone. It may have a colon in it, which no mount path may.
            plan["mount"] = f"{NODE_PATHS}/{hash_of(path)}"
            name = f"node-{hash_of(path)}"
            volumes.append({"name": name, "hostPath": {"path": path}})
            mounts.append({"name": name, "mountPath": plan["mount"], "readOnly": True})
        case _:
            pass
    made = {key: value for key, value in plan.items() if value is not None}
    return Source(made, tuple(volumes), tuple(fetch_mounts), tuple(mounts))


def each_once(items: tuple[Json, ...]) -> tuple[Json, ...]:
    """What several models ask for is in the pod once."""
    return tuple({canonical_json(item): item for item in items}.values())


def stores(platform: Platform) -> Json | None:
    """What the platform says of stores, for models whose credentials do not."""
    s3 = {"endpoint": platform.s3_endpoint, "region": platform.s3_region}
    given = {key: value for key, value in s3.items() if value is not None}
    return {"s3": given} if given else None
