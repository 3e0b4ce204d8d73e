"""kopf, which watches: in a thread of its own, started anew when it ends.

In a thread, because kopf cancels every task of its loop when it ends, and because decoding what watches tell must not
delay the lease. It has `on.event` handlers alone: no finalizers, no annotations, no events of its own.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import aiohttp
import kopf

from halimede_operator.cluster.connection import Connection
from halimede_operator.cluster.kinds import SELECTOR, WATCHED, Resource
from halimede_operator.cluster.pulse import Pulse
from halimede_operator.cluster.watching import Listed, Patience, WatchSession
from halimede_operator.handlers.feed import CacheFeed

log = logging.getLogger(__name__)

PAGE = 50
"""Objects of a list at a time: each may have 1.5 MB."""
LONGEST_PAUSE_S = 30.0


class NothingToCompare(kopf.DiffBaseStorage):
    """No handler is told what changed. So kopf need not copy every object, nor read what its annotations say was there
    before, which who made it wrote."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        pass


class Watches:
    """Watches every kind; what they tell reaches the feed in the loop that made this."""

    def __init__(
        self,
        kubeconfig: str | None,
        namespaces: Sequence[str],
        feed: CacheFeed,
        pulse: Pulse,
        clock: Callable[[], float],
        patience: Patience = Patience(),  # noqa: B008 - frozen
    ) -> None:
        """namespaces: none for all."""
        self._kubeconfig = kubeconfig
        self._namespaces = tuple(namespaces)
        self._feed = feed
        self._pulse = pulse
        self._clock = clock
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._inner = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        """Of the inner loop."""
        # A daemon: whatever kopf waits for at its end does not hold up ours.
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, within_s: float) -> None:
        self._inner.call_soon_threadsafe(self._stop.set)
        await asyncio.to_thread(self._thread.join, within_s)

    # What follows runs in the thread.

    def listed(self, resource: Resource, namespace: str | None, page: Listed) -> None:
        self._loop.call_soon_threadsafe(self._feed.listed, resource, namespace, page)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._inner) as runner:
            runner.run(self._supervise())

    async def _supervise(self) -> None:
        failures = 0
        while not self._stop.is_set():
            begun = self._clock()
            try:
                await kopf.operator(
                    registry=self._registry(),
                    settings=kopf_settings(self._patience.silence_s),
                    standalone=True,
                    # Kopf would ask who we are, and a pod's user has no name.
                    identity="halimede-operator",  # type: ignore[arg-type]  # its type is not exported
                    clusterwide=not self._namespaces,
                    namespaces=self._namespaces,
                    stop_flag=self._stop,
                )
            except Exception:
                log.exception("kopf ended; it is started anew")
            if self._stop.is_set():
                return
            failures = failures + 1 if self._clock() - begun < 2 * LONGEST_PAUSE_S else 1
            await asyncio.sleep(min(LONGEST_PAUSE_S, 2.0 ** min(failures - 1, 30)))

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.AiohttpSession:
            connection = Connection(self._kubeconfig)
            await connection.refresh()
            session = WatchSession(connection, self, self._pulse, self._clock, self._patience)
            # Has what kopf uses of one.
            return kopf.AiohttpSession(server=connection.host, aiohttp_session=cast(aiohttp.ClientSession, session))

        kopf.on.login(registry=registry)(login)
        for resource in WATCHED:
            kopf.on.event(
                group=resource.group,
                version=resource.version,
                plural=resource.plural,
                id=resource.plural,
                registry=registry,
            )(self._handler(resource))
        return registry

    def _handler(self, resource: Resource) -> Callable[..., Any]:
        async def on_event(event: dict[str, Any], **_: Any) -> None:
            self._loop.call_soon_threadsafe(self._feed.event, resource, event["type"], event["object"])

        return on_event


def kopf_settings(silence_s: float) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = NothingToCompare()
    settings.watching.inactivity_timeout = silence_s
    settings.watching.connect_timeout = 10.0
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = 60.0
    # It would kill our whole process when an end takes long.
    settings.process.ultimate_exiting_timeout = None
    # A task per object, for as long after its last event.
    settings.queueing.idle_timeout = 1.0
    for resource in WATCHED:
        if not resource.ours:
            settings.watching.label_selectors[resource.group, resource.version, resource.plural] = SELECTOR
    return settings
