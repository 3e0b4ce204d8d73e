"""The operator's watches without its process, against the API server of `kube_api`."""

import asyncio
import gc
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.kinds import REQUIRED, Resource
from halimede_operator.cluster.kopf_adapter import CacheFeed
from halimede_operator.cluster.optional_kinds import why_unavailable
from halimede_operator.cluster.watch_health import Collection, WatchHealth
from halimede_operator.core.spec.types import Key
from halimede_operator.handlers.watch import Watches, ignore_dropped_workers, kopf_settings
from support.kube_api import KubeApi, kube_api

QUICK_S = (0.01, 0.02, 0.05, 0.05, 0.05)


@dataclass
class Watched:
    api: KubeApi
    cache: Cache
    watch_health: WatchHealth
    woken: list[Key]
    kubeconfig: Path

    def knows_of(self, namespace: str, name: str) -> bool:
        return self.cache.find("InferenceModel", namespace, name) is not None

    def knows(self, plural: str = "inferencemodels", kind: str = "InferenceModel") -> bool:
        """Whether the cache equals the API server's state."""
        there = {
            (namespace, name): value["metadata"]["resourceVersion"]
            for (of, namespace, name), value in self.api.objects.items()
            if of == plural
        }
        ever = {
            (value["metadata"]["namespace"], value["metadata"]["name"])
            for _, of, _, value in self.api.history
            if of == plural
        }
        known = {where: self.cache.find(kind, *where) for where in ever}
        return there == {where: str(entry.version) for where, entry in known.items() if entry is not None}


@asynccontextmanager
async def watching(
    api: KubeApi,
    folder: Path,
    *,
    namespaces: tuple[str, ...] = (),
    apart_s: float = 0.05,
    silence_s: float = 70.0,
    look_again_s: float = 60.0,
) -> AsyncIterator[Watched]:
    cache, woken = Cache(), list[Key]()
    kubeconfig = api.kubeconfig(folder)
    connection = Connection(str(kubeconfig))
    await connection.refresh()
    client = KubeClient(connection, lambda: False)
    spaces = namespaces or (None,)
    watch_health = WatchHealth(
        [Collection(resource, space) for resource in REQUIRED for space in spaces], time.monotonic()
    )
    feed = CacheFeed(cache, watch_health, woken.append)
    settings = kopf_settings()
    settings.networking.error_backoffs = QUICK_S
    settings.watching.reconnect_backoff = apart_s
    settings.watching.inactivity_timeout = silence_s

    async def are_kinds_there() -> bool:
        return True

    async def why(resource: Resource) -> str:
        return await why_unavailable(client, resource, namespaces)

    watches = Watches(str(kubeconfig), namespaces, feed, are_kinds_there, why, settings, look_again_s)
    task = asyncio.create_task(watches.run())
    try:
        await asyncio.wait_for(feed.complete.wait(), 30)
        yield Watched(api, cache, watch_health, woken, kubeconfig)
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=20)
        await client.close()


Scenario = Callable[[Watched], Coroutine[None, None, None]]


@contextmanager
def running(
    folder: Path, *, before: Callable[[KubeApi], None] = lambda _api: None, **options: object
) -> Iterator[tuple[asyncio.Runner, Watched]]:
    """Watches whose API server runs in the loop of the runner."""

    async def enter() -> Watched:
        api = await stack.enter_async_context(kube_api())
        before(api)
        return await stack.enter_async_context(watching(api, folder, **options))  # type: ignore[arg-type]

    stack = AsyncExitStack()
    with warnings.catch_warnings():
        ignore_dropped_workers()
        with asyncio.Runner() as runner:
            try:
                yield runner, runner.run(enter())
            finally:
                runner.run(stack.aclose())
        # Otherwise the interpreter would warn of a dropped coroutine in a later test.
        gc.collect()


def run(
    scenario: Scenario, folder: Path, *, before: Callable[[KubeApi], None] = lambda _api: None, **options: object
) -> None:
    with running(folder, before=before, **options) as (runner, watched):
        runner.run(scenario(watched))


def a_few(api: KubeApi) -> None:
    for name in ("a", "b", "c"):
        api.put("inferencemodels", "prod", name, spec={"model": {"uri": "s3://models/m"}})
