"""What whoever installed the operator decided: the chart's values, as far as pods depend on them."""

from dataclasses import dataclass

FIELD_MANAGER = "halimede-operator"


@dataclass(frozen=True, slots=True)
class Platform:
    server_image: str
    """For models without an accelerator."""
    gpu_server_image: str
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset({"s3", "gs", "azure", "http", "https", "pvc"})
    """Of URIs that models may have; `file` is the node's own disk, and not among them unless asked for."""
    file_roots: tuple[str, ...] = ()
    """Folders of the node below which `file` URIs must be."""
    cache_host_path: str = "/var/lib/halimede/cache"
    s3_endpoint: str | None = None
    s3_region: str | None = None
    s3_secret: str | None = None
    """Name of a Secret with the keys of `s3` URIs, for models that name none; a namespace need not have it."""
    operator_namespace: str = "halimede"
    """NetworkPolicies let the operator of this namespace read the pods' index."""
    watch_namespaces: tuple[str, ...] = ()
    """Empty: all."""
