"""The NetworkPolicy: which peers may connect to the pods. Egress is not restricted: stores, DNS and model code need it.

The operator's namespace may connect to HTTP, because the operator reads there which versions a pod serves. The
collectors that the platform names may connect to the metrics alone. Peers of `allowFrom` may connect to the ports of
the chosen protocols and to the metrics. Probes come from the node, which no policy can block.
"""

from collections.abc import Sequence

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.spec.types import Json, Key, Serving, Workload

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def network_policy(key: Key, uid: str, workload: Workload, operator_namespace: str, collectors: Sequence[Json]) -> Json:
    operator = {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}}}
    # It reads from the metrics whether the pods are in use.
    is_asked = workload.autoscaling is not None and workload.autoscaling.sleeps
    asked = [workload.serving.http_port, *([workload.serving.metrics_port] if is_asked else [])]
    ingress: list[Json] = [{"from": [operator], "ports": _ports(*asked)}]
    if workload.allow_from:
        ingress.append({"from": list(workload.allow_from), "ports": _open_ports(workload.serving)})
    if collectors:
        ingress.append({"from": list(collectors), "ports": _ports(workload.serving.metrics_port)})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(key, uid, child_name(key.name)),
        "spec": {
            "podSelector": {"matchLabels": selector_of(key)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _open_ports(serving: Serving) -> list[Json]:
    wanted = [
        *([serving.http_port] if serving.http else []),
        *([serving.grpc_port] if serving.grpc else []),
        serving.metrics_port,
    ]
    return _ports(*wanted)


def _ports(*ports: int) -> list[Json]:
    # Numbers, because not every network plug-in supports named ports.
    return [{"port": port, "protocol": "TCP"} for port in ports]
