"""Pods as targets of Prometheus: `python -m cluster.pod_targets ADDRESS PORT API PKI`.

Debian's Prometheus is built without the discovery of Kubernetes. This server gives it, by HTTP, the targets and the
labels `__meta_kubernetes_…` that `role: pod` would: one for each port of a container. So relabelings are those of a
Prometheus in a cluster.
"""

import json
import re
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
META = "__meta_kubernetes"


def targets(pods: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of a list of pods, without those that have no address."""
    for pod in pods:
        metadata, status = pod["metadata"], pod["status"]
        if not status.get("podIP"):
            continue
        ready = next((c["status"] for c in status.get("conditions", ()) if c["type"] == "Ready"), "unknown")
        shared = {
            f"{META}_namespace": metadata["namespace"],
            f"{META}_pod_name": metadata["name"],
            f"{META}_pod_ip": status["podIP"],
            f"{META}_pod_phase": status["phase"],
            f"{META}_pod_ready": ready.lower(),
            f"{META}_pod_node_name": pod["spec"].get("nodeName", ""),
        }
        for kind in ("label", "annotation"):
            for name, value in (metadata.get(f"{kind}s") or {}).items():
                shared[f"{META}_pod_{kind}_{_escaped(name)}"] = value
                shared[f"{META}_pod_{kind}present_{_escaped(name)}"] = "true"
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                of_port = {
                    f"{META}_pod_container_name": container["name"],
                    f"{META}_pod_container_port_name": port.get("name", ""),
                    f"{META}_pod_container_port_number": str(port["containerPort"]),
                }
                yield {"targets": [f"{status['podIP']}:{port['containerPort']}"], "labels": {**shared, **of_port}}


def _escaped(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


class Handler(BaseHTTPRequestHandler):
    api: str
    context: ssl.SSLContext

    def do_GET(self) -> None:
        try:
            with urllib.request.urlopen(f"{self.api}/api/v1/pods", timeout=LIMIT_S, context=self.context) as answer:
                body = json.dumps(list(targets(json.load(answer)["items"]))).encode()
        except OSError as error:
            # Prometheus keeps the targets that it had.
            self.send_error(502, str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class' name
        """Requests come every second."""


def main() -> None:
    address, port, Handler.api, pki = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    Handler.context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    Handler.context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
    ThreadingHTTPServer((address, port), Handler).serve_forever()


if __name__ == "__main__":
    main()
