"""The operator's process."""

import asyncio
import contextlib
import datetime
import logging
import os
import platform as machine
import signal
import time
import uuid
from collections.abc import Coroutine, Sequence

from kubernetes.aio.config import ConfigException

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.events import Events
from halimede_operator.cluster.indexes import Indexes
from halimede_operator.cluster.inventory import Inventories
from halimede_operator.cluster.kinds import ENSEMBLES, MODELS, REQUIRED, Resource
from halimede_operator.cluster.kopf_adapter import CacheFeed
from halimede_operator.cluster.nodes import Nodes
from halimede_operator.cluster.optional_kinds import why_unavailable
from halimede_operator.cluster.other_operators import OtherOperators
from halimede_operator.cluster.watch_health import Collection, WatchHealth
from halimede_operator.cluster.works import Works
from halimede_operator.core.process.election import RENEW_DEADLINE_S, RETRY_S
from halimede_operator.core.process.progress import TICK_S, Progress
from halimede_operator.core.reading import moment_of
from halimede_operator.core.spec.types import Key
from halimede_operator.handlers.watch import Watches, ignore_dropped_workers, kopf_settings
from halimede_operator.lease import Leadership, LostError
from halimede_operator.log import set_up_logging
from halimede_operator.metrics import RESULT_DONE, Metrics, ScrapeGauges
from halimede_operator.probes import ProbeThread, serve_metrics
from halimede_operator.queue import Done, Failed, Gone, Outcome, Queue
from halimede_operator.reconcile.placer import Placer
from halimede_operator.reconcile.reconciler import Reconciler
from halimede_operator.settings import Settings, parse

log = logging.getLogger(__name__)

EXIT_USAGE = 2
EXIT_LEASE_LOST = 3
DRAIN_S = 10.0
WATCHED_BYTES_PER_S = 20e6
"""How fast an API server encodes the events of a watch, one after the other."""


def main(arguments: Sequence[str]) -> int:
    settings = parse(arguments)
    set_up_logging(settings.log_format)
    ignore_dropped_workers()
    return asyncio.run(Operator(settings).run())


class Operator:
    """All parts of the process. They share one event loop."""

    def __init__(
        self, settings: Settings, *, renew_deadline_s: float = RENEW_DEADLINE_S, retry_s: float = RETRY_S
    ) -> None:
        """The two times are those of `Leadership`."""
        self._settings = settings
        self._renew_deadline_s = renew_deadline_s
        self._retry_s = retry_s
        # A pod's name is unique while the pod runs. With the name alone as identity, a restarted container keeps the
        # lease of the process before it. Outside a pod, several processes may share one host.
        in_pod = settings.kubeconfig is None
        self._instance = machine.node() if in_pod else f"{machine.node()}_{uuid.uuid4()}"
        self._connection = Connection(settings.kubeconfig)
        self._metrics = Metrics()
        self._cache = Cache()
        self._queue = Queue(extra_cost_s=self._extra_cost_s)
        self._progress = Progress(time.monotonic())
        self._watch_health: WatchHealth | None = None
        """None until we hold the lease: nothing is watched before that."""

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT, or until the lease is lost. Return the exit status."""
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            await self._connection.refresh()
        except (ConfigException, OSError) as error:
            log.error("found neither a pod's service account nor a kubeconfig: %s", error)
            return EXIT_USAGE
        self._client = KubeClient(self._connection, self._may_write, self._metrics.wrote)
        self._leadership = Leadership(
            self._client,
            self._settings.lease_namespace,
            self._settings.lease_name,
            self._instance,
            renew_deadline_s=self._renew_deadline_s,
            retry_s=self._retry_s,
        )
        own_lease = f"{self._settings.lease_namespace}/{self._settings.lease_name}"
        self._other_operators = OtherOperators(self._client, own_lease, time.monotonic)
        gauges = ScrapeGauges(
            self._queue.depth,
            self._queue.oldest_wait_s,
            lambda: self._watch_health.ages(time.monotonic()) if self._watch_health is not None else {},
            self._leadership.may_act,
            lambda: len(self._other_operators.left),
        )
        self._metrics.watch(gauges)
        metrics = await serve_metrics(self._settings.metrics_port, self._metrics.text)
        probes = await ProbeThread.start(
            self._settings.health_port,
            self._liveness_problem,
            self._readiness_problem,
            lambda: self._progress.ticked(time.monotonic()),
        )
        steps = asyncio.create_task(self._report_steps())
        lead = asyncio.create_task(self._leadership.run(regained=self._queue.retry))
        work = asyncio.create_task(self._work(stopping))
        stop = asyncio.create_task(stopping.wait())
        await asyncio.wait({lead, work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if lead.done() and isinstance(lost := lead.exception(), LostError):
            log.error("%s; this process lost it and exits, because its state may be outdated", lost)
            # Exit at once: even a clean-up must not write.
            logging.shutdown()
            os._exit(EXIT_LEASE_LOST)
        stopping.set()
        # Running reconciles finish, and their writes with them, before the lease is released.
        await asyncio.wait({work})
        for task in (lead, steps):
            task.cancel()
        await asyncio.wait({lead, steps})
        await self._leadership.release()
        await self._client.close()
        await metrics.cleanup()
        await probes.cleanup()
        for task in (lead, work):
            if not task.cancelled() and (bug := task.exception()) is not None:
                log.error("a task of the operator failed", exc_info=bug)
                return 1
        return 0

    async def _work(self, stopping: asyncio.Event) -> None:
        """Watch and reconcile, from the moment we hold the lease until `stopping` is set."""
        if not await _wait_unless_stopped(stopping, self._leadership.active()):
            return
        spaces = self._settings.platform.watch_namespaces or (None,)
        self._watch_health = WatchHealth(
            [Collection(resource, space) for resource in REQUIRED for space in spaces], time.monotonic()
        )
        feed = CacheFeed(self._cache, self._watch_health, self._queue.add)
        namespaces = self._settings.platform.watch_namespaces
        watches = Watches(
            self._settings.kubeconfig, namespaces, feed, self._are_kinds_there, self._why_unavailable, kopf_settings()
        )
        tasks = [asyncio.create_task(watches.run())]
        stop = asyncio.create_task(stopping.wait())
        try:
            if not await _wait_unless_stopped(stopping, feed.complete.wait()):
                return
            indexes = Indexes(self._queue.add, time.monotonic)
            may_read_nodes = not self._settings.platform.watch_namespaces
            nodes = Nodes(self._client, self._queue.add, may_read=may_read_nodes)
            works = Works(self._queue.add, lambda: moment_of(_today()))
            self._reconcile = Reconciler(
                self._client,
                self._cache,
                indexes,
                nodes,
                works,
                Placer(
                    Inventories(self._client, time.monotonic, may_read=may_read_nodes),
                    time.monotonic,
                    time.thread_time,
                    self._metrics.decided,
                    _today,
                ),
                Events(self._client, self._instance, time.monotonic),
                self._other_operators,
                self._settings.platform,
                self._queue.add,
                time.monotonic,
                _today,
            )
            log.info("%d objects known, reconciling", len(self._cache))
            tasks += [
                asyncio.create_task(each)
                for each in (indexes.run(), nodes.run(), works.run(), self._queue.run(self._reconcile_one))
            ]
            await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
            await self._queue.stop(DRAIN_S)
        finally:
            for task in (*tasks, stop):
                task.cancel()
            await asyncio.wait({*tasks, stop})
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _reconcile_one(self, key: Key) -> Outcome:
        await self._leadership.active()
        begun = time.monotonic()
        outcome = await self._reconcile(key)
        match outcome:
            case Done() | Gone():
                result = RESULT_DONE
            case Failed(failure):
                result = failure.name.lower()
        self._metrics.reconciled(result, time.monotonic() - begun)
        return outcome

    def _extra_cost_s(self, key: Key) -> float:
        """The time that the size of the object costs other namespaces: the API server sends each written status to all
        watches, and objects of other namespaces come after it in the same stream."""
        entry = self._cache.find(key.kind, key.namespace, key.name)
        return entry.size_bytes / WATCHED_BYTES_PER_S if entry is not None else 0.0

    async def _are_kinds_there(self) -> bool:
        """Whether the API server serves our kinds."""
        if await self._client.has_kinds(MODELS.root, frozenset({MODELS.plural, ENSEMBLES.plural})):
            return True
        log.warning("the API server does not know %s; are the CRDs installed?", MODELS.api_version)
        return False

    async def _why_unavailable(self, resource: Resource) -> str:
        return await why_unavailable(self._client, resource, self._settings.platform.watch_namespaces)

    def _may_write(self) -> bool:
        return self._leadership.may_act()

    async def _report_steps(self) -> None:
        """Report the steps of this event loop. When it did not run for a while, watches have the full time again."""
        while True:
            if self._progress.stepped(now := time.monotonic()) and self._watch_health is not None:
                self._watch_health.restarted(now)
            await asyncio.sleep(TICK_S)

    def _liveness_problem(self) -> str | None:
        if (problem := self._progress.problem()) is not None:
            return problem
        stuck = self._watch_health.stuck(time.monotonic()) if self._watch_health is not None else []
        return f"watches are stuck: {', '.join(map(str, stuck))}" if stuck else None

    def _readiness_problem(self) -> str | None:
        if self._watch_health is None:
            # Another operator is the leader; we are ready to take over.
            is_standby = self._leadership.has_read and not self._leadership.may_act()
            return None if is_standby else "the lease or the custom resources cannot be read yet"
        unlisted = self._watch_health.unlisted()
        return f"not listed yet: {', '.join(map(str, unlisted))}" if unlisted else None


async def _wait_unless_stopped(stopping: asyncio.Event, awaitable: Coroutine[None, None, object]) -> bool:
    """Wait for `awaitable`. Return False if `stopping` is set first; `awaitable` is then cancelled."""
    wanted = asyncio.create_task(awaitable)
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({wanted, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if wanted.done():
        wanted.result()
        return True
    wanted.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await wanted
    return False


def _today() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
