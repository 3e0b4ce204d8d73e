"""An API of custom metrics whose values a test sets: `python -m cluster.played_metrics ADDRESS PORT CERTIFICATE SOCKET`.

It serves `custom.metrics.k8s.io/v1beta2` to the API server's aggregation layer. It is no metrics pipeline: it has the
values that it was told, and it remembers when it was asked.
"""

import json
import ssl
import sys
import threading
import time
from collections import deque
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.commands import listen

GROUP = "custom.metrics.k8s.io"
VERSION = f"{GROUP}/v1beta2"
KEPT_REQUESTS = 10_000
TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"

Values = dict[str, dict[str, dict[str, str] | None]]
"""By namespace and metric: the quantity by pod, or by `KIND/NAME` of an object; None for an error."""


class Played:
    """What the answers are made of. Changed by commands, read by requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Values = {}
        self._asked: deque[tuple[float, str, str]] = deque(maxlen=KEPT_REQUESTS)

    def obey(self, order: Any, _descriptors: list[int]) -> Any:
        """Set the values of a namespace if it comes with any, and return when its metrics were asked for."""
        with self._lock:
            if "values" in order:
                self._values[order["namespace"]] = order["values"]
            return [[at, metric] for at, namespace, metric in self._asked if namespace == order["namespace"]]

    def answer(self, namespace: str, kind: str, name: str, metric: str) -> dict[str, Any] | None:
        """A MetricValueList, or None for an error. kind: `pods`, or `PLURAL.GROUP`; name: `*` for pods."""
        with self._lock:
            self._asked.append((time.time(), namespace, metric))
            found = self._values.get(namespace, {}).get(metric)
        if found is None:
            return None
        wanted = {each: value for each, value in found.items() if name == "*" or each == f"{kind}/{name}"}
        if not wanted and name != "*":
            return None
        at = time.strftime(TIME_FORMAT, time.gmtime())
        items = [
            {
                "describedObject": {"kind": "Pod", "namespace": namespace, "name": each.rpartition("/")[2]},
                "metric": {"name": metric},
                "timestamp": at,
                "value": value,
            }
            for each, value in wanted.items()
        ]
        return {"kind": "MetricValueList", "apiVersion": VERSION, "metadata": {}, "items": items}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    played: Played

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["apis", "custom.metrics.k8s.io", "v1beta2"]:
                self._send(HTTPStatus.OK, _resources())
            case ["apis", _, _, "namespaces", namespace, kind, name, metric]:
                found = self.played.answer(namespace, kind, name, metric)
                if found is None:
                    self._send(HTTPStatus.INTERNAL_SERVER_ERROR, _error(f"there is no {metric} in {namespace}"))
                else:
                    self._send(HTTPStatus.OK, found)
            case _:
                self._send(HTTPStatus.NOT_FOUND, _error(self.path))

    def _send(self, status: HTTPStatus, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class' name
        """Requests are remembered, not written."""


def _resources() -> dict[str, Any]:
    names = ("pods", "inferencemodels.halimede.dev", "modelensembles.halimede.dev")
    resources = [
        {
            "name": f"{name}/{metric}",
            "namespaced": True,
            "kind": "MetricValueList",
            "singularName": "",
            "verbs": ["get"],
        }
        for name in names
        for metric in ("played",)
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": VERSION, "resources": resources}


def _error(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": 500}


class Server(ThreadingHTTPServer):
    daemon_threads = True


def main() -> None:
    address, port, certificate, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    Handler.played = Played()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    server = Server((address, port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    listen(path, Handler.played.obey)
    server.serve_forever()


if __name__ == "__main__":
    main()
