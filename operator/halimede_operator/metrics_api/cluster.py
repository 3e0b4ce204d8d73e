"""What the metrics API asks of the API server: names of pods, reviews of callers, and two objects."""

from collections.abc import Mapping
from typing import Any

import orjson

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.errors import ApiError
from halimede_operator.api_server.requests import JSON, Requests
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.ownership import Service, service_of

# Any, in this module: JSON.

TIMEOUT_S = 5.0
MAX_PODS = 1000
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Of pods we need the names alone, which is a tenth of them."""


class Cluster:
    def __init__(self, connection: Connection) -> None:
        self._requests = Requests(connection, "halimede-metrics-api", MAX_ANSWER_BYTES)

    async def close(self) -> None:
        await self._requests.close()

    async def pod_names(self, namespace: str, selector: str) -> tuple[str, ...]:
        """Raises MetricsError if the selector is invalid or matches more than MAX_PODS; ApiError otherwise."""
        query = {"limit": str(MAX_PODS), **({"labelSelector": selector} if selector else {})}
        try:
            answer = await self._request("GET", f"/api/v1/namespaces/{namespace}/pods", query=query, accept=_METADATA)
        except ApiError as error:
            if error.status == 400:
                raise MetricsError(Reason.BadRequest, f"labelSelector {selector[:256]!r}: {error.message}") from error
            raise
        if (answer.get("metadata") or {}).get("continue"):
            raise MetricsError(Reason.BadRequest, f"{selector[:256]!r} matches more than {MAX_PODS} pods")
        return tuple(each["metadata"]["name"] for each in answer.get("items") or ())

    async def review(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """A TokenReview or SubjectAccessReview with its status. Raises ApiError."""
        group, plural = document["apiVersion"], f"{document['kind'].lower()}s"
        return await self._request("POST", f"/apis/{group}/{plural}", document)

    async def authentication_config(self) -> dict[str, Any]:
        """The ConfigMap with the front proxy's CA. Raises ApiError."""
        return await self._request(
            "GET", "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
        )

    async def service_of_api(self, name: str) -> Service | None:
        """The Service that an APIService names; None if there is none. Raises ApiError."""
        try:
            return service_of(await self._request("GET", f"/apis/apiregistration.k8s.io/v1/apiservices/{name}"))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _request(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        accept: str = JSON,
    ) -> dict[str, Any]:
        data = None if body is None else orjson.dumps(body)
        _, answer = await self._requests.send(verb, path, data, query, accept=accept, timeout_s=TIMEOUT_S)
        return answer if isinstance(answer, dict) else {}
