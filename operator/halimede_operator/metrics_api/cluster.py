"""What the metrics API asks of the API server: names of pods, reviews of callers, and two objects."""

import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson

from halimede_operator.cluster.client import ApiError, error_of
from halimede_operator.cluster.connection import Connection
from halimede_operator.cluster.decoding import decode
from halimede_operator.cluster.kinds import PODS
from halimede_operator.core.metrics_api.errors import MetricsError, Reason
from halimede_operator.core.metrics_api.ownership import Service, service_of

# Any, in this module: JSON.

TIMEOUT_S = 5.0
MAX_PODS = 1000
MAX_ANSWER_BYTES = 16 * 1024 * 1024
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Of pods we need the names alone, which is a tenth of them."""
_JSON = "application/json"


class Cluster:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session = aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._context: ssl.SSLContext | None = None

    async def close(self) -> None:
        await self._session.close()

    async def pod_names(self, namespace: str, selector: str) -> tuple[str, ...]:
        """Raises MetricsError if the selector is invalid or matches more than MAX_PODS; ApiError otherwise."""
        query = {"limit": str(MAX_PODS), **({"labelSelector": selector} if selector else {})}
        try:
            answer = await self._request("GET", PODS.path(namespace), query=query, accept=_METADATA)
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
        accept: str = _JSON,
    ) -> dict[str, Any]:
        status, headers, data = await self._send(verb, path, body, query or {}, accept)
        if status == 401:
            # The file may have a newer token than the one we read.
            try:
                await self._connection.refresh()
            except Exception as error:
                raise ApiError(verb, path, 401, "Unauthorized", f"credentials cannot be read: {error}") from error
            self._context = None
            status, headers, data = await self._send(verb, path, body, query or {}, accept)
        if not 200 <= status < 300:
            raise error_of(verb, path, status, headers, data)
        try:
            answer = decode(data)
        except orjson.JSONDecodeError as error:
            raise ApiError(verb, path, 0, "Malformed", "the answer is not JSON") from error
        return answer if isinstance(answer, dict) else {}

    async def _send(
        self, verb: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], accept: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        if self._context is None:
            self._context = self._connection.ssl_context()
        url = self._connection.host + path + (f"?{urlencode(query)}" if query else "")
        headers = {**await self._connection.headers(), "Accept": accept, "User-Agent": "halimede-metrics-api"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = orjson.dumps(body), _JSON
        try:
            async with self._session.request(verb, url, data=data, headers=headers, ssl=self._context) as answer:
                received = await answer.content.read(MAX_ANSWER_BYTES)
                while len(received) < MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES)):
                    received += more
                return answer.status, answer.headers, received
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise ApiError(verb, path, 0, "Unreachable", str(error) or type(error).__name__) from error
