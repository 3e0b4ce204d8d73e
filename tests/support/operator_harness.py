"""A reconciler without its process: the test delivers the events of watches and reconciles one key at a time."""

import datetime
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.cache import Cache, entry_of
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.events import Events
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.inventory import Inventories
from halimede_operator.cluster.kinds import WATCHED
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.cluster.other_operators import OtherOperators
from halimede_operator.cluster.works import Works
from halimede_operator.core.platform import Platform
from halimede_operator.core.reading import moment_of
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.queue import Outcome
from halimede_operator.reconcile.placer import Placer
from halimede_operator.reconcile.reconciler import Reconciler
from support.kube_api import KubeApi, kube_api
from support.loops import with_opened

DIGITS = Key(Kind.INFERENCE_MODEL, "prod", "digits")
PLATFORM = Platform(server_image="server:1", gpu_server_image="gpu:1")
SPEC = {"model": {"uri": "s3://models/digits"}}
CHILDREN = {"configmaps", "serviceaccounts", "services", "deployments"}
TODAY = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


@dataclass
class Harness:
    api: KubeApi
    cache: Cache
    reconcile: Reconciler
    folder: Path
    nodes: Nodes
    works: Works
    now: float = 1000.0
    today: datetime.datetime = TODAY
    leads: bool = True
    woken: list[Key] = field(default_factory=list)

    def relist(self, versions: Mapping[str, int] | None = None) -> None:
        """Deliver the current objects, or those of each plural at a version."""
        for resource in WATCHED:
            if resource.kind in self.cache.unavailable:
                continue
            version = (versions or {}).get(resource.plural, self.api.version)
            found = self.api.objects if version == self.api.version else self.api.objects_at(version)
            there = [value for (plural, _, _), value in found.items() if plural == resource.plural]
            for value in there:
                self.cache.learn(entry_of(resource, value), listed=True)
            uids = frozenset(value["metadata"]["uid"] for value in there)
            self.cache.listed(resource, None, version, uids)

    async def sync(self, key: Key = DIGITS) -> Outcome:
        """Deliver the current objects, then reconcile one key."""
        self.relist()
        return await self.reconcile(key)

    def digits(self) -> dict[str, Any]:
        return self.api.objects["inferencemodels", "prod", "digits"]

    def condition(self, name: str) -> dict[str, Any]:
        return next(condition for condition in self.digits()["status"]["conditions"] if condition["type"] == name)

    def children(self) -> dict[tuple[str, str, str], Any]:
        """The created objects, without fields that differ between runs."""
        return {
            where: {name: part for name, part in value.items() if name != "metadata"}
            for where, value in self.api.objects.items()
            if where[0] in CHILDREN
        }


def _placer(client: KubeClient, clock: Callable[[], float], today: Callable[[], datetime.datetime]) -> Placer:
    return Placer(Inventories(client, clock, may_read=True), clock, lambda: 0.0, lambda _seconds: None, today)


@asynccontextmanager
async def open_harness(folder: Path, platform: Platform = PLATFORM) -> AsyncIterator[Harness]:
    async with kube_api() as api:
        connection = Connection(str(api.kubeconfig(folder)))
        await connection.refresh()
        cache, woken = Cache(), list[Key]()
        works = Works(woken.append, lambda: moment_of(harness.today), period_s=0.01)
        client = KubeClient(connection, lambda: harness.leads)
        nodes = Nodes(client, woken.append, may_read=True, period_s=0.01)
        reconciler = Reconciler(
            client,
            cache,
            Indexes(woken.append, lambda: harness.now),
            nodes,
            works,
            _placer(client, lambda: harness.now, lambda: harness.today),
            Events(client, "this-operator", lambda: harness.now),
            OtherOperators(client, "halimede/this", lambda: harness.now),
            platform,
            woken.append,
            lambda: harness.now,
            lambda: harness.today,
        )
        harness = Harness(api, cache, reconciler, folder, nodes, works, woken=woken)
        api.put("inferencemodels", "prod", "digits", spec=SPEC)
        try:
            yield harness
        finally:
            await client.close()


with_harness = with_opened(open_harness)
"""Decorates tests that are coroutines and whose first argument is a harness."""


@asynccontextmanager
async def second_operator(harness: Harness, lease: str = "halimede/this") -> AsyncIterator[Harness]:
    """A second operator with empty caches, as after a restart; with another Lease, one of another release."""
    connection = Connection(str(harness.api.kubeconfig(harness.folder)))
    await connection.refresh()
    client, cache = KubeClient(connection, lambda: True), Cache()
    indexes = Indexes(lambda _key: None, lambda: harness.now)
    nodes, events = (
        Nodes(client, lambda _key: None, may_read=True),
        Events(client, "other", lambda: harness.now),
    )
    works = Works(lambda _key: None, lambda: moment_of(TODAY))
    other_operators = OtherOperators(client, lease, lambda: harness.now)
    reconciler = Reconciler(
        client,
        cache,
        indexes,
        nodes,
        works,
        _placer(client, lambda: harness.now, lambda: TODAY),
        events,
        other_operators,
        PLATFORM,
        lambda _key: None,
        lambda: harness.now,
        lambda: TODAY,
    )
    try:
        yield Harness(harness.api, cache, reconciler, harness.folder, nodes, works, harness.now)
    finally:
        await client.close()


def create_unscheduled_pod(harness: Harness) -> None:
    message = {"reason": "Unschedulable", "message": "0/2 nodes: 2 Insufficient nvidia.com/gpu"}
    create_pod(harness, "digits-1-x", {"type": "PodScheduled", "status": "False", **message})


def create_pod(harness: Harness, name: str, *conditions: dict[str, str], node: str = "") -> str:
    def owned_by(owner: dict[str, Any]) -> dict[str, Any]:
        name, uid = owner["metadata"]["name"], owner["metadata"]["uid"]
        reference = {"apiVersion": "apps/v1", "kind": owner["kind"], "name": name, "uid": uid, "controller": True}
        return {"labels": owner["metadata"]["labels"], "ownerReferences": [reference]}

    deployment = harness.api.objects["deployments", "prod", "digits"]
    template = deployment["spec"]["template"]
    replica_set = harness.api.put(
        "replicasets", "prod", "digits-1", spec={"template": template}, metadata=owned_by(deployment)
    )
    pod = harness.api.put(
        "pods", "prod", name, spec={**template["spec"], "nodeName": node},
        metadata={**owned_by(replica_set), "labels": template["metadata"]["labels"]},
        status={"phase": "Pending", "conditions": list(conditions)},
    )  # fmt: skip
    return str(pod["metadata"]["uid"])
