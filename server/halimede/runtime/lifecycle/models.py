"""The interface of the life cycle: loads and unloads, the repository index, and the stop of all models."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.observe.samples import StateSample
from halimede.core.repository.changes import ABSENT
from halimede.core.repository.load_errors import NoModelError
from halimede.core.repository.plan import is_used
from halimede.core.repository.status import ModelStatus, should_serve
from halimede.core.types import InferenceError, ModelIndexEntry, ModelReadyState, unavailable
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.lifecycle.building import Builder
from halimede.runtime.lifecycle.closing import Closing
from halimede.runtime.lifecycle.ensembles import Ensembles
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.loading import Loader
from halimede.runtime.lifecycle.reading import RepositoryReader
from halimede.runtime.lifecycle.record import ModelRecord, Records, serving_versions, take_snapshot
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import READ_LIMIT_SECS, ModelRepository
from halimede.runtime.requests import RequestTable
from halimede.runtime.services import LoadableModels, ModelServices

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_SECS = 7.0
"""How long instances and model may take to close after the last request; processes are killed earlier."""
NS_PER_SEC = 1_000_000_000


class ModelLifecycle:
    """Loads and unloads models of a repository; `records` is read by the server, and changed only in this package."""

    def __init__(
        self,
        repository: ModelRepository,
        options: LoadOptions,
        load_threads: int,
        models: LoadableModels,
        *,
        retry_count: int = 0,
        unload_wait_secs: float = 60.0,
        slot_wait_secs: float = 5.0,
        close_timeout_secs: float = CLOSE_TIMEOUT_SECS,
        read_limit_secs: float = READ_LIMIT_SECS,
        table: RequestTable | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`models` are what the models' code calls. `on_change` is called after each change of the versions that serve,
        before the load or the unload is answered.

        An unload waits up to `unload_wait_secs` for a load in progress, so that both calls succeed, and up to
        `slot_wait_secs` for one that waits for a load slot. Instances and model may take `close_timeout_secs` to close
        after the last request; processes are killed earlier. A read of the repository fails after `read_limit_secs`
        without an answer of the file system."""
        self.records = Records(on_change)
        self.table = table or RequestTable()
        """Every request in flight, of all models, by ticket: filled and emptied by the pumps."""
        self.services = ModelServices(CustomMetrics(), models)
        """What models request."""
        self.load_secs: dict[str, float] = {}
        """How long the load of each model took at the start, with its wait for others."""
        self._loading_since_ns: dict[str, int] = {}
        self._unload_wait_secs = unload_wait_secs
        left_behind = LeftBehind()
        self._reader = RepositoryReader(repository, left_behind, read_limit_secs)
        self._closing = Closing(left_behind, close_timeout_secs)
        self._ensembles = Ensembles(self.records, self.table, self.services, self._closing)
        builder = Builder(
            *(options, load_threads, self.table, self.services, self._closing, left_behind, slot_wait_secs)
        )
        self._loader = Loader(
            *(self.records, self._reader, builder, self._ensembles, self._closing, left_behind, self.services),
            retry_count=retry_count,
        )

    async def load_all(self, names: Sequence[str] | None) -> list[str]:
        """Load the named models, or all models of the repositories for None, in parallel.

        Returns the models that failed. InferenceError if a repository cannot be read.
        """
        if unreadable := await self._reader.unreadable():
            raise unavailable("; ".join(unreadable.values()))
        warnings: Sequence[str]
        if names is None:
            listing = await self._reader.scan()
            names, warnings = listing.names, listing.warnings
        else:
            warnings = await self._warnings_without_models()
        for warning in warnings:
            log.warning("%s", warning)
        results = await asyncio.gather(*(self._load_at_start(name) for name in names))
        return [name for name, loaded in zip(names, results, strict=True) if not loaded]

    async def load(self, name: str, *, for_model: bool = False) -> None:
        """Load or reload one model; no effect if it is loaded and unchanged. Raises InferenceError with the root cause.

        `for_model`: a model's code requested the load. It then takes no load slot, because the load of that model may
        hold one while it waits.
        """
        await self._loader.load(name, for_model=for_model)
        self.records[name].status.asked = True

    async def read_sources(self, *, is_whole: bool) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """By name, the fingerprints of the files of all wanted models: the current ones and those at their load. The
        latter leave out models whose load failed.

        If the server serves `is_whole` repositories, also those of models that are new, ABSENT at their load, and of
        models that are gone, which are ABSENT now.
        """
        wanted = {record.name: record for record in self.records.values() if record.status.wanted}
        names = [*wanted, *(await self._reader.scan()).names] if is_whole else [*wanted]
        found = await self._reader.sources(list(dict.fromkeys(names)), find_gone=is_whole)
        loaded = {name: record.sources for name, record in wanted.items() if record.versions}
        return found, {name: ABSENT for name in found if name not in wanted} | loaded

    async def reload(self, name: str) -> None:
        """Reload a model whose files have changed, unless it was unloaded meanwhile. Raises InferenceError."""
        record = self.records.get(name)
        if record is not None and record.status.wanted and not record.unloads.count:
            await self._loader.load(name)

    async def unload(self, name: str, *, with_steps: bool = False) -> None:
        """Stop serving the model. Its instances are freed when the last accepted request is answered.

        A load in progress has `unload_wait_secs` to finish; then it fails, with every load that waits behind it. A load
        that waits for a slot fails earlier, and one that waits before another try fails at once.
        `with_steps` also unloads the models of an ensemble's steps, except those that were loaded by name or that other
        ensembles use.
        """
        record = self.records.get(name)
        if record is None:
            return
        with record.unloads.waiting(self._unload_wait_secs):
            async with record.lock:
                steps = dict.fromkeys(step for step, _ in record.steps())
                self._unload(record)
        if with_steps:
            await self._unload_unused(steps)

    async def index(self, ready_only: bool) -> list[ModelIndexEntry]:
        """The repository index: the models on disk now, and every version that was ever loaded. InferenceError
        UNAVAILABLE if a repository gives no answer."""
        listing = await self._reader.listing()
        entries: list[ModelIndexEntry] = []
        for name in sorted({*listing.names, *self.records}):
            record = self.records.get(name)
            status, health = (record.status, record.health()) if record is not None else (ModelStatus(), {})
            entries += status.entries(name, health, is_duplicate=name in listing.duplicates)
        if ready_only:
            return [entry for entry in entries if entry.state is ModelReadyState.READY]
        return entries

    def states(self) -> Iterator[StateSample]:
        """The states of the versions that serve or should serve, as in the index; not of unloaded ones."""
        for name, record in sorted(self.records.items()):
            for entry in record.status.entries(name, record.health()):
                if entry.state is not None and should_serve(entry):
                    yield StateSample(name, entry.version, entry.state)

    def all_ready(self) -> bool:
        """Whether every version of every wanted model serves."""
        return all(record.is_ready() for record in self.records.values() if record.status.wanted)

    def busy(self) -> tuple[int, int]:
        """The number of versions with requests in flight, and of all versions, serving and retired ones."""
        versions = self._versions()
        return sum(version.requests.count > 0 for version in versions), len(versions)

    def abort(self) -> None:
        """Fail the queued requests of every model, serving or retired, because the time to drain is over."""
        # Ensembles first, so that their error is not the failure of a step.
        for version in sorted(self._versions(), key=lambda each: each.parts is None):
            version.executor.abort()

    def expect_few(self) -> None:
        """The server stops: the queued requests of all models do not wait for others any more."""
        for version in self._versions():
            version.executor.expect_few()

    async def close(self) -> None:
        """Wait for every accepted request of every model, serving or retired, and free all of them."""
        # Requests cause others, in ensembles and in models' code. So models are freed when all requests are answered.
        while self.busy()[0]:
            await asyncio.gather(*(each.drained() for each in self._versions()))
        for record in self.records.values():
            record.ensemble = None
            self._closing.retire(record, record.replace({}))
        await self._closing.closed()

    def _versions(self) -> list[ModelVersion]:
        """All versions, serving and retired."""
        return [*serving_versions(self.records), *self._closing.versions]

    async def _warnings_without_models(self) -> Sequence[str]:
        """The warnings about repositories without any model: most likely another folder was meant."""
        try:
            listing = await self._reader.scan()
        except InferenceError:
            return ()  # the index reports it
        return () if listing.names else listing.warnings

    def loading(self) -> list[tuple[str, float]]:
        """The models that still load at the start, each with its seconds so far."""
        now = monotonic_ns()
        return [(name, (now - since) / NS_PER_SEC) for name, since in self._loading_since_ns.items()]

    async def _load_at_start(self, name: str) -> bool:
        # Wanted from the start, so that the server is not ready before it serves.
        record = self.records.obtain(name)
        record.status.wanted = True
        since = self._loading_since_ns[name] = monotonic_ns()
        try:
            await self.load(name)
        except InferenceError as error:
            if isinstance(error.__cause__, NoModelError):
                # The record stays, so that the index says why.
                record.status.wanted = False
            # The server must not exit for a model that a client unloads while the server starts.
            return bool(record.unloads.count)
        finally:
            del self._loading_since_ns[name]
        self.load_secs[name] = (monotonic_ns() - since) / NS_PER_SEC
        return True

    def _unload(self, record: ModelRecord) -> None:
        record.ensemble = None
        if not record.status.unwant():
            return
        record.fingerprint = ""
        old = record.replace({})
        self._ensembles.follow(record.name)
        self._closing.retire(record, old)
        log.info("unloading model '%s'", record.name, extra={"model": record.name})

    async def _unload_unused(self, names: Iterable[str]) -> None:
        for name in names:
            record = self.records.get(name)
            # Checked again for each step: an unload may wait, and clients load and unload meanwhile.
            if record is not None and not record.status.asked and not is_used(take_snapshot(self.records), name):
                await self.unload(name, with_steps=True)
