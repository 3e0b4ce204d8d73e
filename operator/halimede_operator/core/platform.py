"""The settings of the installation that pods depend on: values of the Helm chart, and paths in pods."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halimede_spec.uri import SCHEMES

FIELD_MANAGER = "halimede-operator"


@dataclass(frozen=True, slots=True)
class PodPaths:
    """Where the processes that fetch and serve models find their files. The defaults are the paths in a pod."""

    config: str = "/etc/halimede"
    """Folder of the fetch plan."""
    models: str = "/models"
    """The model repository, which the fetcher makes and the server reads."""
    cache: str = "/cache"
    sources: str = "/run/halimede"
    """What models are fetched from and with: Secrets, CAs, claims and folders of the node."""
    temporary: str = "/tmp"  # noqa: S108 - the pod's own
    shared_memory: str = "/dev/shm"  # noqa: S108 - the pod's own


@dataclass(frozen=True, slots=True)
class Platform:
    server_image: str
    """For models without an accelerator."""
    gpu_server_image: str
    image_pull_policy: str = "IfNotPresent"
    gpu_image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset(SCHEMES) - {"file"}
    """Allowed schemes of model URIs. `file` is the node's own disk, and is allowed only on request."""
    file_roots: tuple[str, ...] = ()
    """Folders of the node below which `file` URIs must be."""
    cache_host_path: str = "/var/lib/halimede/cache"
    s3_endpoint: str | None = None
    s3_region: str | None = None
    s3_secret: str | None = None
    """Name of a Secret in the models' namespaces, with the keys of `s3` URIs for models that name no Secret. It is
    optional: a namespace need not have it."""
    node_lost_toleration_seconds: int | None = None
    """Seconds that pods stay bound to a lost node; None: Kubernetes' default."""
    operator_namespace: str = "halimede"
    """NetworkPolicies let this namespace read the pods' index."""
    metrics_collectors: tuple[Mapping[str, Any], ...] = ()
    """Peers of NetworkPolicies that may read the metrics of all pods."""
    watch_namespaces: tuple[str, ...] = ()
    """Empty: all namespaces."""
    max_replicas: int = 500
    """The most that one object may ask for."""
    prometheus_address: str | None = None
    """URL that KEDA queries for objects that name none."""
    paths: PodPaths = PodPaths()
