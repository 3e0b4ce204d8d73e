"""Runs kopf, which lists and watches. When kopf ends it is restarted; cache and queue stay as they are.

Optional kinds are watched as long as they can be: when one comes or goes, kopf is restarted.

kopf gets `on.event` handlers alone: it sets no finalizers and no annotations and posts no events. docs/decisions/116
lists what kopf retries by itself and what ends it. kopf runs in its own event loop, in a thread, for two reasons: when
kopf ends, all tasks of its loop have to be cancelled (test_kopf_is_ended_with_its_loop in
tests/shell/operator/test_kopf_adapter.py), and decoding must not delay the renewal of the lease.
"""

import asyncio
import logging
import threading
import time
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import kopf

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.errors import ApiError
from halimede_operator.cluster.kinds import OPTIONAL, SELECTOR, WATCHED, Resource
from halimede_operator.cluster.kopf_adapter import CacheFeed, watch_session
from halimede_operator.cluster.watch_health import Collection

log = logging.getLogger(__name__)

LASTED_S = 60.0
"""After a run of at least this long, the backoff before the next start is the shortest again."""


class NothingToCompare(kopf.DiffBaseStorage):
    """Stores no earlier state of an object, so that kopf compares nothing.

    kopf would keep that state in an annotation, which anybody can write.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


@dataclass(frozen=True)
class Watches:
    """Runs kopf, and restarts it when it ends."""

    kubeconfig: str | None
    namespaces: tuple[str, ...]
    """Empty: all namespaces."""
    feed: CacheFeed
    are_kinds_there: Callable[[], Awaitable[bool]]
    """Called before each start, because kopf looks for kinds once and ignores those that it does not find."""
    why_unavailable: Callable[[Resource], Awaitable[str]]
    """Why an optional kind cannot be watched; "" if it can."""
    settings: kopf.OperatorSettings
    look_again_s: float = 60.0
    """How often to look whether optional kinds came or went."""

    async def run(self) -> None:
        """Watch until cancelled."""
        failures = 0
        while True:
            stop, begun = threading.Event(), time.monotonic()
            self.feed.watch_health.restarted(begun)
            try:
                if await self.are_kinds_there():
                    await self._watch(stop)
            except Exception as error:  # noqa: BLE001 - any answer of the API server may end kopf
                log.warning("kopf ended and is started again: %r", error)
            finally:
                stop.set()
            failures = failures + 1 if time.monotonic() - begun < LASTED_S else 1
            backoffs = tuple(self.settings.networking.error_backoffs)  # type: ignore[arg-type]  # or one number, not here
            await asyncio.sleep(backoffs[min(failures, len(backoffs)) - 1])

    async def _watch(self, stop: threading.Event) -> None:
        """Run kopf for the kinds that can be watched, until it ends, or until other kinds can be watched."""
        unavailable = {resource.kind: why for resource in OPTIONAL if (why := await self._look(resource))}
        if unavailable != self.feed.unavailable:
            log.info("optional kinds that cannot be used: %s", "; ".join(unavailable.values()) or "none")
        kinds = [resource for resource in WATCHED if resource.kind not in unavailable]
        spaces = self.namespaces or (None,)
        self.feed.start([Collection(resource, space) for resource in kinds for space in spaces], unavailable)
        look = asyncio.create_task(self._stop_at_change(unavailable, stop))
        try:
            # The coroutine is made in the thread: if this is cancelled before it starts, there is none to await.
            await asyncio.to_thread(lambda: asyncio.run(self._run_kopf(stop, kinds)))
        finally:
            look.cancel()
            await asyncio.wait({look})

    async def _stop_at_change(self, unavailable: Mapping[str, str], stop: threading.Event) -> None:
        """Stop kopf when optional kinds came or went. unavailable: those that are not watched, and why."""
        is_same = True
        while is_same:
            await asyncio.sleep(self.look_again_s)
            is_same = not self.feed.watch_health.ignored()
            for resource in OPTIONAL:
                known = unavailable.get(resource.kind, "")
                is_same &= known == await self._look(resource, known)
        stop.set()

    async def _look(self, resource: Resource, known: str | None = None) -> str:
        """Why an optional kind cannot be watched; "" if it can.

        known: the last answer, which stays if the API server fails. Without one a failure is an answer: other kinds do
        not wait for a kind whose API fails.
        """
        try:
            return await self.why_unavailable(resource)
        except ApiError as error:
            return str(error) if known is None else known

    async def _run_kopf(self, stop: threading.Event, kinds: Sequence[Resource]) -> None:
        # When one watch ends kopf, the others fail too, each in its own way. Only the first error is logged.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        connection = Connection(self.kubeconfig)
        await connection.refresh()
        async with watch_session(connection, self.feed, self.settings.watching.reconnect_backoff) as session:
            tasks = await kopf.spawn_tasks(
                registry=self._registry(kinds, kopf.AiohttpSession(server=connection.host, aiohttp_session=session)),
                settings=self.settings,
                # Without it kopf would look up the user's name, and a pod's user has none.
                identity="halimede-operator",  # type: ignore[arg-type]  # its type is not exported
                clusterwide=not self.namespaces,
                namespaces=self.namespaces,
                stop_flag=stop,
            )
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            stop.set()  # otherwise the thread in which kopf waits for it would never end
            # Cancelled repeatedly, and not by kopf.operator: kopf's watches swallow a cancellation and then wait for a
            # session forever.
            while rest := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in rest:
                    task.cancel()
                await asyncio.wait(rest, timeout=0.1)
            self.feed.hand_over()
        for task in done:
            task.result()

    def _registry(self, kinds: Sequence[Resource], *credentials: kopf.AiohttpSession) -> kopf.OperatorRegistry:
        registry, remaining = kopf.OperatorRegistry(), iter(credentials)

        async def login(**_: Any) -> kopf.AiohttpSession | None:
            # Credentials are offered once: kopf would retry refused ones at once, forever. Without credentials it ends.
            return next(remaining, None)

        kopf.on.login(registry=registry)(login)
        for resource in kinds:

            async def on_event(event: Any, namespace: str | None, _of: Resource = resource, **_: Any) -> None:
                self.feed.event(Collection(_of, namespace if self.namespaces else None), event["object"])

            on = kopf.on.event(resource.group, resource.version, resource.plural, id=resource.plural, registry=registry)
            on(on_event)
        return registry


def ignore_dropped_workers() -> None:
    """Let the interpreter not warn of coroutines that kopf drops when it is ended while it starts to handle a list."""
    warnings.filterwarnings("ignore", "coroutine 'worker' was never awaited", RuntimeWarning)


def kopf_settings() -> kopf.OperatorSettings:
    """Settings under which kopf only lists and watches."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NothingToCompare()
    # A finalizer that no object has: kopf would remove its own from any object on which somebody has set it.
    settings.persistence.finalizer = ""
    settings.watching.connect_timeout = 10.0
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 50  # objects per page; each may have 1.5 MB
    settings.networking.request_timeout = 60.0
    # Waits between failures of one request in a row. After the last one kopf ends, because the resource version that it
    # watches from may be the cause.
    settings.networking.error_backoffs = (0.5, 1, 2, 4, 8, 15, 15, 15, 15)
    settings.process.ultimate_exiting_timeout = None  # it would kill our whole process if kopf takes long to end
    settings.queueing.idle_timeout = 0.1  # kopf keeps a task, and the last event, of an object for this long
    for resource in WATCHED:
        if not resource.ours:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = SELECTOR
    return settings
