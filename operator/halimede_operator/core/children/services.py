"""The two Services: one address for clients, and a headless one for clients that balance themselves or read metrics.

`spec.serving.protocols` decides which ports they have. Metrics belong to one pod, so only the headless Service has
their port.
"""

from typing import Any

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.spec.types import Json, Key, Serving


def service(key: Key, uid: str, serving: Serving) -> Json:
    """The Service for clients, with one address. It balances connections, not requests."""
    return _service(key, uid, child_name(key.name), {"type": "ClusterIP", "ports": _protocol_ports(serving)})


def pods_service(key: Key, uid: str, serving: Serving) -> Json:
    """The headless Service: its name resolves to the addresses of the ready pods."""
    ports = [*_protocol_ports(serving), _port("metrics", serving.metrics_port)]
    return _service(key, uid, child_name(key.name, "pods"), {"type": "ClusterIP", "clusterIP": "None", "ports": ports})


def _service(key: Key, uid: str, name: str, spec: Json) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(key, uid, name),
        "spec": {**spec, "selector": selector_of(key)},
    }


def _protocol_ports(serving: Serving) -> list[Json]:
    ports: list[Json] = []
    if serving.http:
        ports.append(_port("http", serving.http_port))
    if serving.grpc:
        ports.append({**_port("grpc", serving.grpc_port), "appProtocol": "kubernetes.io/h2c"})
    return ports


def _port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}
