"""How a model's files reach the pod: the URI, and what is mounted for it.

Secrets are mounted only in the fetcher. Its user must be able to read them, and their files belong to root. The pods
set no group (see `pod`), so the user could not read files of mode 0440. Claims and the node's folders are read-only, in
both containers, since the repository may hold links into them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from halimede_operator.core.names import canonical_json, hash_of, volume_name
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.types import Json, Model
from halimede_operator.core.spec.uris import Uri, read_uri
from halimede_spec.fetch_plan import ModelDocument, S3Document, StoresDocument

S3_VOLUME = "s3-credentials"
READABLE = 0o444


@dataclass(frozen=True, slots=True)
class Source:
    """`plan` is the model's entry in the fetch plan."""

    plan: ModelDocument
    volumes: tuple[Json, ...]
    fetch_mounts: tuple[Json, ...]
    """Of the fetcher only."""
    mounts: tuple[Json, ...]
    """Of both containers."""


def source_of(model: Model, platform: Platform) -> Source:
    plan: ModelDocument = {"name": model.name, "uri": model.uri}
    if model.format is not None:
        plan["format"] = model.format
    if model.digest is not None:
        plan["digest"] = model.digest
    if model.config:
        plan["config"] = model.config
    uri, folder = read_uri(model.uri), platform.paths.sources
    volumes: list[Json] = []
    fetch_mounts: list[Json] = []
    mounts: list[Json] = []
    if (secret := model.credentials_secret) is not None:
        plan["credentials"] = f"{folder}/credentials/{secret}"
        name = volume_name("credentials", secret)
        volumes.append({"name": name, "secret": {"secretName": secret, "defaultMode": READABLE}})
        fetch_mounts.append({"name": name, "mountPath": plan["credentials"], "readOnly": True})
    elif platform.s3_secret is not None and isinstance(uri, Uri) and uri.scheme == "s3":
        # The folder is empty where the namespace has no such Secret.
        optional = {"secretName": platform.s3_secret, "defaultMode": READABLE, "optional": True}
        volumes.append({"name": S3_VOLUME, "secret": optional})
        fetch_mounts.append({"name": S3_VOLUME, "mountPath": _s3_folder(platform), "readOnly": True})
    if (bundle := model.ca_bundle) is not None:
        mount = f"{folder}/ca/{bundle.config_map}"
        plan["ca_bundle"] = f"{mount}/{bundle.key}"
        name = volume_name("ca", bundle.config_map)
        volumes.append({"name": name, "configMap": {"name": bundle.config_map, "defaultMode": READABLE}})
        fetch_mounts.append({"name": name, "mountPath": mount, "readOnly": True})
    match uri:
        case Uri("pvc", claim, _):
            # The whole claim: a part of it that is missing would be an error of the kubelet's, not the fetcher's.
            plan["mount"] = f"{folder}/claims/{claim}"
            name = volume_name("claim", claim)
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
            mounts.append({"name": name, "mountPath": plan["mount"], "readOnly": True})
        case Uri("file", _, path):
            # Only that path. It may contain a colon, which a mount path may not.
            plan["mount"] = f"{folder}/node/{hash_of(path)}"
            name = f"node-{hash_of(path)}"
            volumes.append({"name": name, "hostPath": {"path": path}})
            mounts.append({"name": name, "mountPath": plan["mount"], "readOnly": True})
        case _:
            pass
    return Source(plan, tuple(volumes), tuple(fetch_mounts), tuple(mounts))


def each_once(groups: Iterable[tuple[Json, ...]]) -> tuple[Json, ...]:
    """The volumes or mounts of all models, without duplicates: several models may need the same."""
    return tuple({canonical_json(item): item for group in groups for item in group}.values())


def stores(platform: Platform) -> StoresDocument | None:
    """The platform's settings of stores, for models whose credentials have none."""
    s3: S3Document = {}
    if platform.s3_endpoint is not None:
        s3["endpoint"] = platform.s3_endpoint
    if platform.s3_region is not None:
        s3["region"] = platform.s3_region
    if platform.s3_secret is not None:
        s3["credentials"] = _s3_folder(platform)
    return {"s3": s3} if s3 else None


def _s3_folder(platform: Platform) -> str:
    """Where the platform's Secret is, for models without credentials of their own."""
    return f"{platform.paths.sources}/s3"
