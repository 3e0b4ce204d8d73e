"""The NetworkPolicy: who may reach the pods. What they may reach is not said: stores, DNS and model code need it.

The operator's namespace reaches HTTP, because the operator reads there which versions a pod serves. Others reach the
ports of the wanted protocols and the metrics. Probes come from the node, which no policy keeps out.
"""

from halimede_operator.core.api.spec import Json, Key, Serving, Workload
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


def network_policy(key: Key, uid: str, workload: Workload, operator_namespace: str) -> Json:
    operator = {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}}}
    ingress: list[Json] = [{"from": [operator], "ports": _ports(workload.serving.http_port)}]
    if workload.allow_from:
        ingress.append({"from": list(workload.allow_from), "ports": _open_ports(workload.serving)})
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
    # Numbers: not every network plug-in knows the names of ports.
    return [{"port": port, "protocol": "TCP"} for port in ports]
