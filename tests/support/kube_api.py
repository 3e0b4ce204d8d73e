"""A small API server for tests that inject faults or break streams: list, watch, apply, status, delete.

It implements what matters to a client: uids, increasing resource versions, generations, paged lists, watches from a version with
bookmarks, server-side apply by one manager (of `spec.replicas` by several, with the default 1), preconditions. It has no schemas, no defaults and no other controllers: what depends
on those is tested against the real API server.
"""

import asyncio
import copy
import json
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]

GROUPS = (
    ("halimede.dev", "v1alpha1", {"inferencemodels": "InferenceModel", "modelensembles": "ModelEnsemble"}),
    ("apps", "v1", {"deployments": "Deployment", "replicasets": "ReplicaSet"}),
    ("autoscaling", "v2", {"horizontalpodautoscalers": "HorizontalPodAutoscaler"}),
    ("keda.sh", "v1alpha1", {"scaledobjects": "ScaledObject"}),
    ("policy", "v1", {"poddisruptionbudgets": "PodDisruptionBudget"}),
    ("networking.k8s.io", "v1", {"networkpolicies": "NetworkPolicy"}),
    ("coordination.k8s.io", "v1", {"leases": "Lease"}),
    ("resource.k8s.io", "v1", {"resourceclaimtemplates": "ResourceClaimTemplate", "resourceclaims": "ResourceClaim"}),
    ("apiextensions.k8s.io", "v1", {"customresourcedefinitions": "CustomResourceDefinition"}),
    (
        "",
        "v1",
        {
            "pods": "Pod",
            "services": "Service",
            "configmaps": "ConfigMap",
            "serviceaccounts": "ServiceAccount",
            "events": "Event",
            "namespaces": "Namespace",
            "nodes": "Node",
            "persistentvolumeclaims": "PersistentVolumeClaim",
        },
    ),
)
STATUS_HAS = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}


@dataclass
class Fault:
    """A fault of the requests whose `METHOD path?query` matches."""

    what: str
    status: int | None = None
    """Answer immediately with this status."""
    headers: dict[str, str] = field(default_factory=dict)
    reason: str = ""
    message: str = "a fault of the test"
    causes: tuple[Object, ...] = ()
    body: Object | None = None
    """Answer with status 200 and this body."""
    lines: tuple[bytes, ...] | None = None
    """Send this on a watch, and end it."""
    silent: bool = False
    """Keep a watch open without events."""
    mute: bool = False
    """Do not answer, and keep the connection open."""
    drop: bool = False
    """Close the connection without an answer."""
    lose: bool = False
    """Perform the request, then close the connection without an answer."""
    after: int = 0
    """Number of requests to serve normally before the fault."""
    then: Callable[[], None] | None = None
    """Called when the fault occurs."""
    times: int | None = None
    """Number of occurrences; None: until the fault is removed."""


class KubeApi:
    def __init__(self) -> None:
        self.url = ""
        self.objects: dict[tuple[str, str, str], Object] = {}
        """By plural, namespace and name."""
        self.version = 100
        self.history: list[tuple[int, str, str, Object]] = []
        """Events: version, plural, type, object."""
        self.oldest = 0
        """Watches from an older version are answered with 410."""
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.tokens: set[str] | None = None
        """Valid tokens; None: all."""
        self.bookmark_s = 0.2
        self._changed = asyncio.Event()
        self._open: set[web.StreamResponse] = set()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.missing_groups: set[str] = set()
        """API groups that are not served."""

    # For tests.

    def put(self, plural: str, namespace: str, name: str, **rest: Any) -> Object:
        """Create or change an object, as another client."""
        known = self.objects.get((plural, namespace, name))
        value = copy.deepcopy(known) if known else self._new(plural, namespace, name)
        before = (value.get("spec") or {}).get("replicas")
        generation = value["metadata"]["generation"]
        metadata = rest.pop("metadata", {})
        changed = "spec" in rest and rest["spec"] != value.get("spec")
        value.update(copy.deepcopy(rest))
        value["metadata"].update(metadata)
        if (value.get("spec") or {}).get("replicas") != before and "managedFields" not in metadata:
            value["metadata"].pop("managedFields", None)
        value["metadata"]["generation"] = generation + int(changed and known is not None)
        return self._store(plural, value, "MODIFIED" if known else "ADDED")

    def remove(self, plural: str, namespace: str, name: str) -> None:
        value = self.objects.pop((plural, namespace, name))
        self._tell(plural, value, "DELETED")

    def forget_history(self) -> None:
        """Forget past events, as after a compaction: watches must start from a new list."""
        self.oldest = self.version

    def cut(self) -> None:
        """Close all connections."""
        for response in self._open:
            if response._req is not None and response._req.transport is not None:  # aiohttp has no other way
                response._req.transport.abort()

    def named(self, plural: str) -> set[str]:
        return {name for kind, _, name in self.objects if kind == plural}

    def objects_at(self, version: int) -> dict[tuple[str, str, str], Object]:
        """The objects that existed at a version."""
        found: dict[tuple[str, str, str], Object] = {}
        for number, plural, event, value in self.history:
            if number > version:
                break
            where = (plural, value["metadata"]["namespace"], value["metadata"]["name"])
            if event == "DELETED":
                found.pop(where)
            else:
                found[where] = value
        return found

    def counted(self, pattern: str) -> int:
        return sum(1 for request in self.requests if re.search(pattern, request))

    def writes(self) -> Counter[str]:
        """The number of writes by method and plural, without leases."""
        found = [
            re.match(r"(POST|PUT|PATCH|DELETE) .*/namespaces/[^/]+/([a-z]+)", request) for request in self.requests
        ]
        return Counter(f"{match[1]} {match[2]}" for match in found if match and match[2] != "leases")

    async def until(self, is_so: Callable[[], bool], within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while not is_so():
                await asyncio.sleep(0.01)

    def kubeconfig(self, folder: Path, token: str = "good") -> Path:
        path = folder / "kubeconfig"
        (folder / "token").write_text(token)
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": self.url}}],
            "users": [{"name": "it", "user": {"tokenFile": str(folder / "token")}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }
        path.write_text(json.dumps(content))
        return path

    async def start(self) -> None:
        """Start, after `stop` at the same address."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def stop(self) -> None:
        self.cut()
        if self._runner is not None:
            await self._runner.cleanup()

    # The server.

    def _new(self, plural: str, namespace: str, name: str) -> Object:
        group, version, kind = next((g, v, kinds[plural]) for g, v, kinds in GROUPS if plural in kinds)
        metadata = {"namespace": namespace, "name": name, "uid": str(uuid.uuid4()), "generation": 1}
        return {"apiVersion": f"{group}/{version}" if group else version, "kind": kind, "metadata": metadata}

    def _store(self, plural: str, value: Object, event: str) -> Object:
        metadata = value["metadata"]
        self._tell(plural, value, event)
        self.objects[plural, metadata["namespace"], metadata["name"]] = value
        return value

    def _tell(self, plural: str, value: Object, event: str) -> None:
        self.version += 1
        value["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, plural, event, copy.deepcopy(value)))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        what = f"{request.method} {request.path_qs}"
        self.requests.append(what)
        for fault in self.faults:
            if fault.times != 0 and re.search(fault.what, what):
                if fault.after:
                    fault.after -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                if fault.then is not None:
                    fault.then()
                if fault.mute:
                    await asyncio.Event().wait()
                if fault.lose:
                    await self._serve(request)
                if fault.drop or fault.lose:
                    if request.transport is not None:
                        request.transport.abort()
                    return web.Response()
                if fault.status is not None:
                    return _failure(fault.status, fault.reason, fault.message, fault.headers, fault.causes)
                if fault.body is not None:
                    return _response(fault.body)
                if fault.lines is not None or fault.silent:
                    return await self._say(request, fault)
        if (
            self.tokens is not None
            and request.headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens
        ):
            return _failure(401, "Unauthorized", "Unauthorized")
        return await self._serve(request)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if (found := self._discovery(request.path)) is not None:
            return _response(found)
        match = re.fullmatch(
            r"/(?:api/v1|apis/[^/]+/[^/]+)(?:/namespaces/([^/]+))?/([a-z]+)(?:/([^/]+))?(/status)?", request.path
        )
        if match is None or request.path.split("/")[2] in self.missing_groups:
            return _failure(404, "NotFound", "the server could not find the requested resource")
        namespace, plural, name, status = match.groups()
        if name is None:
            if request.method == "POST":
                return await self._create(request, plural, namespace)
            if request.query.get("watch") == "true":
                return await self._watch(request, plural, namespace)
            return self._list(request, plural, namespace)
        known = self.objects.get((plural, namespace, name))
        if request.method == "GET":
            return _response(known) if known else _failure(404, "NotFound", f"{plural} {name!r} not found")
        body = await request.json()
        if request.method == "DELETE":
            return self._delete(plural, namespace, name, known, body)
        if known is not None and any(
            body["metadata"].get(field) not in (None, known["metadata"][field]) for field in ("uid", "resourceVersion")
        ):
            return _failure(409, "Conflict", "the object has been modified")
        is_apply = request.method == "PATCH" and "apply" in request.content_type
        if is_apply and request.query.get("dryRun"):
            return _response(body)
        if is_apply:
            return self._apply(plural, namespace, name, known, body, request.query["fieldManager"])
        if known is None:
            return _failure(404, "NotFound", f"{plural} {name!r} not found")
        if request.method == "PATCH" and not status:
            return self._apply(plural, namespace, name, known, body)
        if request.method == "PUT":
            return _response(self._store(plural, {**body, "metadata": known["metadata"]}, "MODIFIED"))
        changed = {**known, "metadata": {**known["metadata"]}, "status": _merged(known.get("status"), body["status"])}
        return _response(self._store(plural, changed, "MODIFIED"))

    def _discovery(self, path: str) -> Object | None:
        if path == "/api":
            return {"versions": ["v1"]}
        groups = [group for group in GROUPS if group[0] not in self.missing_groups]
        if path == "/apis":
            versions = [
                (group, {"groupVersion": f"{group}/{version}", "version": version}) for group, version, _ in groups
            ]
            return {
                "groups": [
                    {"name": group, "versions": [version], "preferredVersion": version}
                    for group, version in versions
                    if group
                ]
            }
        for group, version, kinds in groups:
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
                verbs = ["list", "watch", "patch", "get"]
                common = {"namespaced": True, "verbs": verbs, "singularName": ""}
                return {"resources": [{"name": plural, "kind": kind, **common} for plural, kind in kinds.items()]}
        return None

    def _selected(self, request: web.Request, plural: str, namespace: str | None, value: Object) -> bool:
        wanted = _selector(request, "labelSelector")
        labels = value["metadata"].get("labels") or {}
        fields = _selector(request, "fieldSelector")
        return (
            namespace in (None, value["metadata"]["namespace"])
            and wanted.items() <= labels.items()
            and all(_field(value, path) == text for path, text in fields.items())
        )

    def _list(self, request: web.Request, plural: str, namespace: str | None) -> web.Response:
        begin = int(request.query.get("continue") or 0)
        limit = int(request.query.get("limit") or 0) or None
        items = [
            value
            for (kind, _, _), value in sorted(self.objects.items())
            if kind == plural and self._selected(request, plural, namespace, value)
        ]
        metadata: Object = {"resourceVersion": str(self.version)}
        if limit is not None and len(items) > begin + limit:
            metadata["continue"] = str(begin + limit)
        page = items[begin : begin + limit] if limit is not None else items
        bare = [{name: part for name, part in item.items() if name not in ("kind", "apiVersion")} for item in page]
        group, version, kind = next((g, v, kinds[plural]) for g, v, kinds in GROUPS if plural in kinds)
        api_version = f"{group}/{version}" if group else version
        return _response({"kind": f"{kind}List", "apiVersion": api_version, "metadata": metadata, "items": bare})

    async def _watch(self, request: web.Request, plural: str, namespace: str | None) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = await self._stream(request)
        try:
            if since < self.oldest:
                await response.write(_line("ERROR", {**STATUS_HAS, "code": 410, "message": "too old resource version"}))
                return response
            while True:
                changed = self._changed
                for version, kind, event, value in list(self.history):
                    if version > since and kind == plural and self._selected(request, plural, namespace, value):
                        await response.write(_line(event, value))
                since = self.version
                try:
                    await asyncio.wait_for(changed.wait(), self.bookmark_s)
                except TimeoutError:
                    await response.write(_line("BOOKMARK", {"metadata": {"resourceVersion": str(since)}}))
        except (ConnectionError, asyncio.CancelledError):
            return response
        finally:
            self._open.discard(response)

    async def _say(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        response = await self._stream(request)
        try:
            for line in fault.lines or ():
                await response.write(line)
            if fault.silent:
                await asyncio.Event().wait()
        finally:
            self._open.discard(response)
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._open.add(response)
        return response

    async def _create(self, request: web.Request, plural: str, namespace: str) -> web.Response:
        body = await request.json()
        name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{self.version}"
        if (plural, namespace, name) in self.objects:
            return _failure(409, "AlreadyExists", f"{plural} {name!r} already exists")
        if request.query.get("dryRun"):
            return _response(body, status=201)
        return _response(self.put(plural, namespace, name, **body), status=201)

    def _apply(
        self, plural: str, namespace: str, name: str, known: Object | None, body: Object, manager: str = ""
    ) -> web.Response:
        before = copy.deepcopy(known)
        if plural == "deployments" and manager:
            body = _with_managers(known, body, manager)
        if known is not None and _merged(known, body) == known:
            return _response(known)
        value = self.put(plural, namespace, name, **_merged(before or {}, body))
        return _response(value, status=200 if known else 201)

    def _delete(self, plural: str, namespace: str, name: str, known: Object | None, body: Object) -> web.Response:
        if known is None:
            return _failure(404, "NotFound", f"{plural} {name!r} not found")
        if any(known["metadata"][field] != wanted for field, wanted in (body.get("preconditions") or {}).items()):
            return _failure(409, "Conflict", "a precondition does not hold")
        self.remove(plural, namespace, name)
        return _response({"kind": "Status", "status": "Success"})


@asynccontextmanager
async def kube_api() -> AsyncIterator[KubeApi]:
    api = KubeApi()
    await api.start()
    try:
        yield api
    finally:
        await api.stop()


_REPLICAS: Object = {"f:spec": {"f:replicas": {}}}


def _with_managers(known: Object | None, body: Object, manager: str) -> Object:
    """The body, with the owners of `spec.replicas` after its apply, and with the default if it has none any more."""
    listed = (known or {}).get("metadata", {}).get("managedFields") or ()
    if any(entry["fieldsV1"] != _REPLICAS for entry in listed):
        # A test has set them.
        return body
    entries = {entry["manager"]: entry for entry in listed}
    before = ((known or {}).get("spec") or {}).get("replicas")
    number = body["spec"].get("replicas")
    was_owned = manager in entries
    if number is None:
        entries.pop(manager, None)
    else:
        if number != before:
            entries.clear()
        entries[manager] = {"manager": manager, "operation": "Apply", "fieldsV1": _REPLICAS}
    falls_back = number is None and (known is None or (was_owned and not entries))
    spec = {**body["spec"], "replicas": 1} if falls_back else body["spec"]
    return {**body, "metadata": {**body["metadata"], "managedFields": list(entries.values())}, "spec": spec}


def _selector(request: web.Request, name: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in request.query.get(name, "").split(",") if pair)


def _field(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = (value or {}).get(name)
    return value


def deep(levels: int) -> str:
    """A placeholder for this many nested objects, which json cannot write; clients receive the nested objects."""
    return f"@deep {levels}@"


def _text(value: object) -> str:
    return re.sub(
        r'"@deep (\d+)@"', lambda found: '{"a":' * int(found[1]) + "1" + "}" * int(found[1]), json.dumps(value)
    )


def _response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(text=_text(value), status=status, headers=headers)


def _line(event: str, value: Object) -> bytes:
    return _text({"type": event, "object": value}).encode() + b"\n"


def _failure(
    status: int, reason: str, message: str, headers: dict[str, str] | None = None, causes: tuple[Object, ...] = ()
) -> web.Response:
    body = {**STATUS_HAS, "code": status, "reason": reason, "message": message}
    body["details"] = {"causes": list(causes)}
    return _response(body, status=status, headers=headers)


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result
