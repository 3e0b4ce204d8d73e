"""The test harness's own client of the API server: JSON over TLS, with the administrator's certificate."""

import http.client
import json
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

MERGE = "application/merge-patch+json"
TIMEOUT_S = 30.0
BUSY_LIMIT = 10
"""How often a request is repeated that the API server was too busy for."""


class Refused(Exception):
    """The API server answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass(frozen=True)
class Api:
    port: int
    authority: Path
    identity: Path
    """The certificate's file; the key is beside it."""
    _idle: list[http.client.HTTPSConnection] = field(default_factory=list, init=False, repr=False, compare=False)
    """Connections for the next GET or PATCH. A handshake costs both sides more than the request."""

    def get(self, path: str) -> Any:
        for _ in range(BUSY_LIMIT):
            try:
                return json.loads(self.send("GET", path))
            except Refused as refusal:
                if refusal.status != http.client.TOO_MANY_REQUESTS:
                    raise
            # As Kubernetes' own clients do, for instance where the kind was just made.
            time.sleep(1)
        return json.loads(self.send("GET", path))

    def create(self, path: str, document: Any) -> Any:
        """Create the document, unless it exists already."""
        try:
            return json.loads(self.send("POST", path, document))
        except Refused as refusal:
            if refusal.status != http.client.CONFLICT:
                raise
            return self.get(f"{path}/{document['metadata']['name']}")

    def patch(self, path: str, document: Any) -> Any:
        """Merge patch: None removes a field."""
        return json.loads(self.send("PATCH", path, document, MERGE))

    def send(self, method: str, path: str, document: Any = None, content_type: str = "application/json") -> str:
        """The answer's body. Raises Refused if it is an error, OSError if there is none."""
        body = None if document is None else json.dumps(document)
        if method in ("GET", "PATCH"):  # they may be repeated
            with suppress(IndexError, ConnectionError, ssl.SSLError):  # none is there, or the API server has closed it
                return self._ask(self._idle.pop(), method, path, body, content_type)
        connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=TIMEOUT_S, context=self._tls)
        return self._ask(connection, method, path, body, content_type)

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.authority))
        context.load_cert_chain(self.identity, self.identity.with_suffix(".key"))
        return context

    def _ask(
        self, connection: http.client.HTTPSConnection, method: str, path: str, body: str | None, content_type: str
    ) -> str:
        try:
            connection.request(method, path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            text = response.read().decode()
        except http.client.HTTPException as error:
            connection.close()
            raise ConnectionError(repr(error)) from error
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        if response.status >= http.client.BAD_REQUEST:
            raise Refused(response.status, text)
        return text

    def is_ready(self) -> bool:
        try:
            self.send("GET", "/readyz")
        except (Refused, OSError):
            return False
        return True

    def ready_nodes(self) -> set[str]:
        ready = {"type": "Ready", "status": "True"}
        return {
            node["metadata"]["name"]
            for node in self.get("/api/v1/nodes")["items"]
            if any(ready.items() <= condition.items() for condition in node["status"].get("conditions", ()))
        }

    def token(self, namespace: str, account: str) -> str:
        """A token with which a ServiceAccount logs in."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 86400},
        }
        made = self.send("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token", request)
        return str(json.loads(made)["status"]["token"])
