"""Calls to the API server: objects as dicts, one field manager, errors classified by how to handle them."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.decoding import decode, decode_list
from halimede_operator.api_server.errors import ApiError
from halimede_operator.api_server.requests import JSON, Requests
from halimede_operator.cluster.kinds import BY_KIND, EVENTS, LEASES, NODES, SELECTOR, Resource
from halimede_operator.core.platform import FIELD_MANAGER
from halimede_operator.core.scaling.replicas import HOLDER
from halimede_operator.core.snapshot import Object

T = TypeVar("T")

STATUS_MANAGER = f"{FIELD_MANAGER}-status"
TIMEOUT_S = 30.0
PAGE = 100
"""Objects per answer of a list of all namespaces, which bounds the memory that a list takes."""
MOST_EVENTS = 32
"""How many events about one object are read. A kubelet makes one for each message, but all users may write events."""
NO_VERSION = "1"
"""A resourceVersion that no object has, because etcd counts writes from 2. An apply that names it creates the object if
the name is free, and is a conflict otherwise."""


class NotLeaderError(Exception):
    """A write was not made, because another operator may hold the lease."""


class KubeApi(Protocol):
    """What a reconcile needs of the API server. All methods raise ApiError; writes also raise NotLeaderError."""

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """The object; None if it does not exist."""
        ...

    async def list_labelled(
        self, resource: Resource, namespace: str, labels: Mapping[str, str]
    ) -> tuple[Object, ...]: ...

    async def apply(self, value: Object, *, is_new: bool = False) -> Object:
        """Server-side apply; returns the object as it is now. is_new: a conflict if an object of this name exists."""
        ...

    async def try_apply(self, value: Object, *, is_new: bool = False) -> Object:
        """Dry run of `apply`: the API server checks the object, writes nothing, and returns what it would be."""
        ...

    async def try_create(self, value: Object) -> None:
        """Dry run: the API server asks all admission plugins and webhooks about a new object, and writes nothing."""
        ...

    async def hold(self, value: Object) -> Object:
        """Apply with the field manager that holds replicas (`core.scaling.replicas`)."""
        ...

    async def set_owners(self, value: Object, managed_fields: list[Object]) -> None:
        """Replace the managedFields of an object. Its values do not change.

        A conflict if the object no longer has the uid and the resourceVersion of `value`.
        """
        ...

    async def annotate(self, value: Object, annotations: Mapping[str, str]) -> Object:
        """Set annotations of an object, whose others stay; a conflict if it no longer has the uid of `value`."""
        ...

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, version: str) -> None:
        """Delete the object if it has this uid and resourceVersion; otherwise a conflict. No error if it is gone."""
        ...

    async def patch_status(self, resource: Resource, namespace: str, name: str, patch: Object) -> Object: ...

    async def create_event(self, namespace: str, event: Object) -> None: ...

    async def list_reduced(self, resource: Resource, reduced: Callable[[Object], T | None]) -> list[T]:
        """All objects of a kind in all namespaces, page by page; of each one only what `reduced` returns is kept."""
        ...

    async def get_node(self, name: str) -> Object | None: ...

    async def events_about(self, namespace: str, uid: str, **fields: str) -> tuple[Object, ...]:
        """Events about the object with this uid. fields: that the events must have, such as `reason` or `type`."""
        ...


class KubeClient:
    """Implements KubeApi, and calls for the Lease."""

    def __init__(
        self,
        connection: Connection,
        may_write: Callable[[], bool],
        count_write: Callable[[str, str, int], None] = lambda _verb, _kind, _status: None,
    ) -> None:
        """Open a client; needs a running event loop.

        may_write: called just before every write except those of the Lease. count_write: called with verb, kind and
        HTTP status (0: no answer) of each such write.
        """
        self._may_write = may_write
        self._count_write = count_write
        self._requests = Requests(connection, FIELD_MANAGER)

    async def close(self) -> None:
        await self._requests.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        return await self._get(resource.path(namespace, name))

    async def list_labelled(self, resource: Resource, namespace: str, labels: Mapping[str, str]) -> tuple[Object, ...]:
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        _, answer = await self._request("GET", resource.path(namespace), query={"labelSelector": selector})
        return tuple(answer.get("items") or ())

    async def apply(self, value: Object, *, is_new: bool = False) -> Object:
        resource, path, body = _apply_request(value, is_new)
        return await self._write("PATCH", resource, path, body, _APPLY_QUERY, _APPLY)

    async def try_apply(self, value: Object, *, is_new: bool = False) -> Object:
        _, path, body = _apply_request(value, is_new)
        return (await self._request("PATCH", path, body, {**_APPLY_QUERY, "dryRun": "All"}, _APPLY))[1]

    async def try_create(self, value: Object) -> None:
        path = BY_KIND[value["kind"]].path(value["metadata"]["namespace"])
        await self._request("POST", path, value, {"dryRun": "All"})

    async def hold(self, value: Object) -> Object:
        resource, path, body = _apply_request(value, is_new=False)
        return await self._write("PATCH", resource, path, body, {**_APPLY_QUERY, "fieldManager": HOLDER}, _APPLY)

    async def set_owners(self, value: Object, managed_fields: list[Object]) -> None:
        resource, metadata = BY_KIND[value["kind"]], value["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        body = {name: metadata[name] for name in ("uid", "resourceVersion")} | {"managedFields": managed_fields}
        query = {"fieldManager": FIELD_MANAGER}
        await self._write("PATCH", resource, path, {"metadata": body}, query, "application/merge-patch+json")

    async def annotate(self, value: Object, annotations: Mapping[str, str]) -> Object:
        resource, metadata = BY_KIND[value["kind"]], value["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"])
        body = {"metadata": {"uid": metadata["uid"], "annotations": annotations}}
        query = {"fieldManager": FIELD_MANAGER}
        return await self._write("PATCH", resource, path, body, query, "application/merge-patch+json")

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, version: str) -> None:
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "preconditions": {"uid": uid, "resourceVersion": version},
            "propagationPolicy": "Background",
        }
        try:
            await self._write("DELETE", resource, resource.path(namespace, name), body)
        except ApiError as error:
            if error.status != 404:
                raise

    async def patch_status(self, resource: Resource, namespace: str, name: str, patch: Object) -> Object:
        path = resource.path(namespace, name, "status")
        return await self._write(
            "PATCH", resource, path, patch, {"fieldManager": STATUS_MANAGER}, "application/merge-patch+json"
        )

    async def create_event(self, namespace: str, event: Object) -> None:
        await self._write("POST", EVENTS, EVENTS.path(namespace), event)

    async def list_reduced(self, resource: Resource, reduced: Callable[[Object], T | None]) -> list[T]:
        found: list[T] = []
        query = {"limit": str(PAGE)}
        path = resource.path(None)
        while True:
            _, page = await self._request("GET", path, query=query, decoder=lambda data: decode_list(data, reduced))
            found += [each for each in page["items"] if each is not None]
            if not (token := (page.get("metadata") or {}).get("continue")):
                return found
            query = {"limit": str(PAGE), "continue": token}

    async def get_node(self, name: str) -> Object | None:
        return await self._get(NODES.path(None, name), query={"resourceVersion": "0"})

    async def events_about(self, namespace: str, uid: str, **fields: str) -> tuple[Object, ...]:
        selector = ",".join([f"involvedObject.uid={uid}", *(f"{name}={value}" for name, value in fields.items())])
        query = {"fieldSelector": selector, "limit": str(MOST_EVENTS)}
        _, answer = await self._request("GET", EVENTS.path(namespace), query=query)
        return tuple(answer.get("items") or ())

    async def has_kinds(self, root: str, plurals: frozenset[str]) -> bool:
        """Whether the API server serves these kinds. root: the path of the group's version."""
        answer = await self._get(root)
        return answer is not None and plurals <= {entry["name"] for entry in answer.get("resources") or ()}

    async def list_one(self, resource: Resource, namespace: str | None) -> None:
        """List at most one labelled object of a kind, as a test whether the kind can be listed."""
        await self._request("GET", resource.path(namespace), query={"labelSelector": SELECTOR, "limit": "1"})

    async def get_lease(self, namespace: str, name: str, timeout_s: float) -> Object | None:
        return await self._get(LEASES.path(namespace, name), timeout_s)

    async def write_lease(self, namespace: str, lease: Object, timeout_s: float) -> Object:
        """Create the Lease if it has no resourceVersion; otherwise replace exactly that version."""
        exists = "resourceVersion" in lease["metadata"]
        path = LEASES.path(namespace, lease["metadata"]["name"] if exists else None)
        return (await self._request("PUT" if exists else "POST", path, lease, timeout_s=timeout_s))[1]

    async def _get(
        self, path: str, timeout_s: float = TIMEOUT_S, query: Mapping[str, str] | None = None
    ) -> Object | None:
        try:
            return (await self._request("GET", path, query=query, timeout_s=timeout_s))[1]
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _write(
        self,
        verb: str,
        resource: Resource,
        path: str,
        body: Object,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
    ) -> Object:
        if not self._may_write():
            raise NotLeaderError
        try:
            status, answer = await self._request(verb, path, body, query, content_type)
        except ApiError as error:
            self._count_write(verb, resource.kind, error.status)
            raise
        self._count_write(verb, resource.kind, status)
        return answer

    async def _request(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON,
        timeout_s: float = TIMEOUT_S,
        decoder: Callable[[bytes], Object] = decode,
    ) -> tuple[int, Object]:
        data = None if body is None else encoded(body)
        return await self._requests.send(verb, path, data, query, content_type, timeout_s=timeout_s, decoder=decoder)


_APPLY = "application/apply-patch+yaml"
_APPLY_QUERY = {"fieldManager": FIELD_MANAGER, "force": "true"}


def _apply_request(value: Object, is_new: bool) -> tuple[Resource, str, Object]:
    """Resource, path and body of an apply request."""
    resource, metadata = BY_KIND[value["kind"]], value["metadata"]
    body = {**value, "metadata": {**metadata, "resourceVersion": NO_VERSION}} if is_new else value
    return resource, resource.path(metadata["namespace"], metadata["name"]), body


_ESCAPED = re.compile("[\x7f-\uffff]")


def encoded(body: Object) -> bytes:
    """The body as JSON that is the same in YAML, which the API server reads an apply as.

    YAML knows no pairs of surrogates, so characters above U+FFFF are sent as they are. All others outside ASCII are
    escaped, because YAML forbids some of them and takes others for ends of lines.
    """
    text = json.dumps(body, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()
