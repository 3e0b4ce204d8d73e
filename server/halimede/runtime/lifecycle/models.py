"""The interface of the life cycle: loads and unloads, the repository index, and the stop of all models."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from halimede.core.observe.metrics import StateSample
from halimede.core.repository.plan import is_used
from halimede.core.repository.status import ModelStatus, should_serve
from halimede.core.types import InferenceError, ModelIndexEntry, ModelReadyState
from halimede.runtime.ensemble import Inferences
from halimede.runtime.lifecycle.building import Builder
from halimede.runtime.lifecycle.closing import Closing
from halimede.runtime.lifecycle.ensembles import Ensembles
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.loading import Loader
from halimede.runtime.lifecycle.reading import RepositoryReader
from halimede.runtime.lifecycle.record import ModelRecord, Records, serving_versions, take_snapshot
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from halimede.runtime.requests import RequestTable
from halimede.runtime.services import ModelServices

log = logging.getLogger(__name__)


class ModelLifecycle:
    """Loads and unloads models of a repository; `records` is read by the server, changed in this package alone."""

    def __init__(
        self,
        repository: ModelRepository,
        options: LoadOptions,
        load_threads: int,
        *,
        services: ModelServices,
        retry_count: int = 0,
    ) -> None:
        self.records: Records = {}
        self.has_unreadable_repository = False
        """Whether a repository could not be read at the start. The server then does not know what it should serve."""
        self.table = RequestTable()
        """Every request in flight, of all models, by ticket: filled and emptied by the pumps."""
        left_behind = LeftBehind()
        self._reader = RepositoryReader(repository, left_behind)
        self._closing = Closing(left_behind)
        self._ensembles = Ensembles(self.records, self.table, services, self._closing)
        builder = Builder(options, load_threads, self.table, services, self._closing, left_behind)
        self._loader = Loader(
            *(self.records, self._reader, builder, self._ensembles, self._closing, left_behind, services),
            retry_count=retry_count,
        )

    @property
    def inferences(self) -> Inferences | None:
        """Where ensembles have their steps done; set before any is loaded."""
        return self._ensembles.inferences

    @inferences.setter
    def inferences(self, inferences: Inferences) -> None:
        self._ensembles.inferences = inferences

    async def load_all(self, names: Sequence[str] | None) -> list[str]:
        """Load the named models, or with None all that the repositories have, side by side.

        Returns the repositories that cannot be read, and the models that failed.
        """
        unreadable = await self._reader.unreadable()
        self.has_unreadable_repository = bool(unreadable)
        for problem in unreadable.values():
            log.error("%s", problem)
        if names is None:
            listing = await self._reader.scan()
            names = listing.names
            for warning in listing.warnings:
                log.warning("%s", warning)
        results = await asyncio.gather(*(self._load_at_start(name) for name in names))
        failed = [name for name, loaded in zip(names, results, strict=True) if not loaded]
        return [*map(str, unreadable), *failed]

    async def load(self, name: str, *, for_model: bool = False) -> None:
        """Load or reload one model, nothing when it is loaded and unchanged; InferenceError with the root cause.

        `for_model` says that a model asked for it, whose own load may wait for this one: it takes none of the slots.
        """
        await self._loader.load(name, for_model=for_model)
        self.records[name].status.asked = True

    async def look_at_sources(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """By name, the fingerprints of the files of all models that are wanted, as they are now and as they were
        loaded; the latter without models whose load has failed."""
        wanted = [record for record in self.records.values() if record.status.wanted]
        found = await self._reader.sources([record.name for record in wanted])
        return found, {record.name: record.sources for record in wanted if record.versions}

    async def reload(self, name: str) -> None:
        """Load a model again whose files have changed, unless it was unloaded meanwhile; InferenceError."""
        record = self.records.get(name)
        if record is not None and record.status.wanted and not record.unloads.count:
            await self._loader.load(name)

    async def unload(self, name: str, *, with_steps: bool = False) -> None:
        """Stop serving; instances and model are freed once the last accepted request is answered.

        A load that is under way may finish within UNLOAD_PATIENCE_SECS; then it fails, and so does any that waits
        behind it. `with_steps`: of an ensemble, the models of its steps are unloaded too, but for those that were
        loaded by name or that other ensembles use.
        """
        record = self.records.get(name)
        if record is None:
            return
        with record.unloads.waiting():
            async with record.lock:
                steps = dict.fromkeys(step for step, _ in record.steps())
                self._unload(record)
        if with_steps:
            await self._unload_unused(steps)

    async def index(self, ready_only: bool) -> list[ModelIndexEntry]:
        """The repository index: what is on disk now, and every version that was ever loaded."""
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
        """What the index says of every version that serves or should: not of those that were unloaded."""
        for name, record in sorted(self.records.items()):
            for entry in record.status.entries(name, record.health()):
                if entry.state is not None and should_serve(entry):
                    yield StateSample(name, entry.version, entry.state)

    def all_ready(self) -> bool:
        """Whether every version of every wanted model serves."""
        return all(record.is_ready() for record in self.records.values() if record.status.wanted)

    def busy(self) -> tuple[int, int]:
        """How many versions have requests in flight, and how many there are, serving and retired."""
        versions = self._versions()
        return sum(version.requests.count > 0 for version in versions), len(versions)

    def abort(self) -> None:
        """Fail what is queued in every model, serving or retired: the time to drain is over."""
        # Ensembles first: the failures of their steps are not the cause.
        for version in sorted(self._versions(), key=lambda each: each.parts is None):
            version.executor.abort()

    async def close(self) -> None:
        """Wait for every accepted request of every model, serving or retired, and free all of them."""
        # Requests lead to others, of ensembles' steps or by models' own code: no model goes before all are answered.
        while self.busy()[0]:
            await asyncio.gather(*(each.drained() for each in self._versions()))
        for record in self.records.values():
            record.ensemble = None
            self._closing.retire(record, record.replace({}))
        await self._closing.closed()

    def _versions(self) -> list[ModelVersion]:
        """All versions, serving and retired."""
        return [*serving_versions(self.records), *self._closing.versions]

    async def _load_at_start(self, name: str) -> bool:
        # Wanted from the start, so that the server is not ready without it.
        record = self.records.setdefault(name, ModelRecord(name))
        record.status.wanted = True
        try:
            await self.load(name)
        except InferenceError:
            # Whoever unloads a model while the server starts does not want the server to exit for want of it.
            return bool(record.unloads.count)
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
            # Asked again for each: an unload may wait, and clients load and unload meanwhile.
            if record is not None and not record.status.asked and not is_used(take_snapshot(self.records), name):
                await self.unload(name, with_steps=True)
