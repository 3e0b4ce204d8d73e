"""The kinds that the operator uses, and their paths on the API server."""

from dataclasses import dataclass

from halimede_operator.core.labels import MANAGED_BY
from halimede_operator.core.spec.types import GROUP, VERSION, Kind

SELECTOR = f"app.kubernetes.io/managed-by={MANAGED_BY}"


@dataclass(frozen=True, slots=True)
class Resource:
    group: str
    version: str
    kind: str
    plural: str
    ours: bool = False
    """Our own kind: all its objects are watched. Of other kinds, only those with our label."""
    chart_value: str = ""
    """For an optional kind: the chart's value that gives the operator its rights. The kind may be missing from the
    cluster, and the operator may have no rights for it: nothing waits for it, and it is watched when it appears."""

    @property
    def is_optional(self) -> bool:
        return bool(self.chart_value)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        parts = [self.root]
        if namespace is not None:
            parts.append(f"namespaces/{namespace}")
        parts.extend(part for part in (self.plural, name, subresource) if part is not None)
        return "/".join(parts)


MODELS = Resource(GROUP, VERSION, Kind.INFERENCE_MODEL, Kind.INFERENCE_MODEL.plural, ours=True)
ENSEMBLES = Resource(GROUP, VERSION, Kind.MODEL_ENSEMBLE, Kind.MODEL_ENSEMBLE.plural, ours=True)
DEPLOYMENTS = Resource("apps", "v1", "Deployment", "deployments")
REPLICA_SETS = Resource("apps", "v1", "ReplicaSet", "replicasets")
PODS = Resource("", "v1", "Pod", "pods")
AUTOSCALERS = Resource("autoscaling", "v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
RESOURCE_CLAIM_TEMPLATES = Resource(
    "resource.k8s.io", "v1", "ResourceClaimTemplate", "resourceclaimtemplates", chart_value="rbac.dra"
)
SCALED_OBJECTS = Resource("keda.sh", "v1alpha1", "ScaledObject", "scaledobjects", chart_value="rbac.keda")
WATCHED = (
    MODELS,
    ENSEMBLES,
    DEPLOYMENTS,
    REPLICA_SETS,
    PODS,
    Resource("", "v1", "Service", "services"),
    Resource("", "v1", "ConfigMap", "configmaps"),
    Resource("", "v1", "ServiceAccount", "serviceaccounts"),
    Resource("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    AUTOSCALERS,
    Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    RESOURCE_CLAIM_TEMPLATES,
    SCALED_OBJECTS,
)
REQUIRED = tuple(resource for resource in WATCHED if not resource.is_optional)
OPTIONAL = tuple(resource for resource in WATCHED if resource.is_optional)
NODES = Resource("", "v1", "Node", "nodes")
RESOURCE_CLAIMS = Resource("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims")
VOLUME_CLAIMS = Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS = Resource("", "v1", "Event", "events")
LEASES = Resource("coordination.k8s.io", "v1", "Lease", "leases")

BY_KIND = {resource.kind: resource for resource in WATCHED}
"""The kind alone is enough as key: no two watched groups have a kind of the same name."""


def resource_of(path: str) -> tuple[Resource, str | None] | None:
    """The watched resource and the namespace (None: all) of a collection's path; None if the path is no such one."""
    for resource in WATCHED:
        if not path.startswith(resource.root + "/"):
            continue
        parts = path[len(resource.root) + 1 :].split("/")
        if parts == [resource.plural]:
            return resource, None
        if len(parts) == 3 and parts[0] == "namespaces" and parts[2] == resource.plural:
            return resource, parts[1]
    return None
