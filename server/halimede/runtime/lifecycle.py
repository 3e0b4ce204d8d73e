"""Life cycle of all models: load, reload, unload, and what the repository index says of them.

One lock per model name serialises its loads and unloads; different models do not wait for one another but for a free
load slot. State changes on the event loop only. A reload builds the new versions beside the old ones, which serve
until the swap (one synchronous step) and then drain in the background; a reload that fails leaves the old ones alone.

An ensemble is loaded after the models of its steps, and follows them: `_follow` is called in the same step as every
change of what a model serves. It takes out of service the ensembles above it that lost a step, brings back those that
have all of them again, and makes anew those whose steps' configurations have changed. What is in flight in an ensemble
finishes as it began: models that are unloaded meanwhile stay, for calls from within alone, until it has.

What runs a model's own code (a load, the start of instances, a close) may never return, and a thread cannot be ended.
So nothing waits for such work for ever: an unload that has waited long, or a stop of the server, leaves a load behind,
and what does not close in time is left behind too. What such a load makes in the end is closed as it comes.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from typing import Any, TypeVar

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.model_view import ModelView
from halimede.core.ensemble.graph import members_of
from halimede.core.observe.metrics import StateSample
from halimede.core.repository.layout import SEVERAL_PLACES
from halimede.core.repository.lifecycle import Event, next_state, reason, retry_pause_secs
from halimede.core.types import ErrorCode, InferenceError, ModelIndexEntry, ModelReadyState
from halimede.core.types.caller import MAX_DEPTH
from halimede.runtime.acceptor import Acceptor
from halimede.runtime.ensemble import Inferences
from halimede.runtime.live import LiveRequests
from halimede.runtime.malloc import release_free_memory
from halimede.runtime.model import Labels, ModelVersion, Parts, make_ensemble, start_version
from halimede.runtime.prepare import ConfigError, LoadOptions, NoVersionError, PreparedModel, VersionError, load_model
from halimede.runtime.repository import Listing, ModelEntry, ModelRepository
from halimede.runtime.services import ModelServices
from halimede.runtime.threads import run_in_thread
from halimede.workers.abandon import Abandon

log = logging.getLogger(__name__)

T = TypeVar("T")

UNLOAD_PATIENCE_SECS = 5.0
"""How long an unload lets a load finish that is under way: most do, and then both have done what they were asked."""

CLOSE_PATIENCE_SECS = 7.0
"""How long instances and model may take to close once nothing is in flight any more: processes are killed before."""

MAX_LOOKS = 16
"""Threads that read the repository at a time."""

LATEST = -1
"""The version that a step names for the highest one."""

MAX_LEFT_BEHIND = 64
"""Loads and closes that never ended. Each holds a thread and what it allocated, so that they may not become many."""


@dataclass(slots=True)
class VersionStatus:
    """State of one version as the index prints it."""

    state: ModelReadyState
    reason: str = ""

    def on(self, event: Event, cause: InferenceError | None = None) -> None:
        self.state = next_state(self.state, event)
        self.reason = reason(event, cause)


@dataclass(frozen=True, slots=True)
class Serving:
    """A ready version and what front ends see of it."""

    version: ModelVersion
    view: ModelView


@dataclass(slots=True)
class ModelRecord:
    """Everything known of one model name.

    `versions` holds the serving ones, ascending by number; `serving` finds them by the text of a request's version, ""
    for the highest. `failure` says why the last load failed before any version could be named, `warned` what was said
    of the directory already.

    `ensemble` is set from the load of an ensemble to its unload, also while it does not serve for want of a step;
    `problem` is why it does not fit the models that its steps have now. `leaving` is as `serving`, of versions that
    were unloaded while requests of ensembles may still need them.

    `asked` says that its load was asked for by name, and not for the sake of an ensemble. `loading` says that a load of
    what was found on disk is under way. `loads` counts the loads that have ended, `failed` is how the last of them did.

    `unloads` are the unloads that wait for the lock: while there are any, no load is tried again. `impatient` are those
    of them that have waited too long: while there are any, `give_up` is set and no load is waited for.
    """

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, ModelVersion] = field(default_factory=dict)
    serving: dict[str, Serving] = field(default_factory=dict)
    status: dict[int, VersionStatus] = field(default_factory=dict)
    fingerprint: str = ""
    sources: str = ""
    wanted: bool = False
    failure: str = ""
    warned: frozenset[str] = frozenset()
    ensemble: PreparedModel | None = None
    problem: str = ""
    leaving: dict[str, Serving] = field(default_factory=dict)
    asked: bool = False
    loading: bool = False
    loads: int = 0
    failed: InferenceError | None = None
    unloads: int = 0
    impatient: int = 0
    unload_asked: asyncio.Event = field(default_factory=asyncio.Event)
    give_up: asyncio.Event = field(default_factory=asyncio.Event)

    def replace(self, versions: dict[int, ModelVersion]) -> dict[int, ModelVersion]:
        """Serve these versions from now on, in one step; returns what was served before."""
        old = self.versions
        self.versions = dict(sorted(versions.items()))
        self.serving = _by_text(self.versions)
        return old

    def steps(self) -> tuple[tuple[str, int], ...]:
        """Model and version of each step of an ensemble; () for a model."""
        return members_of(self.ensemble.config) if self.ensemble is not None else ()

    def is_ready(self) -> bool:
        """Whether all versions serve, with an instance up. A reload changes nothing of that, nor when it fails."""
        return bool(self.versions) and all(version.pump.is_available() for version in self.versions.values())

    def has_given_up(self) -> bool:
        """Whether a version's instances have died too often to be started again: a load makes new ones."""
        return any(version.pump.refusal is not None for version in self.versions.values())

    def index_entry(self, number: int, status: VersionStatus) -> ModelIndexEntry:
        """What the index says of a version: of one that serves, what its instances say."""
        version = self.versions.get(number)
        refusal = version.pump.refusal if version is not None else None
        if self.problem and status.state is ModelReadyState.UNAVAILABLE:
            return ModelIndexEntry(self.name, str(number), status.state, self.problem)
        if refusal is None or status.state is not ModelReadyState.READY:
            return ModelIndexEntry(self.name, str(number), status.state, status.reason)
        reason = f"{refusal.code.value}: {refusal.message}"
        return ModelIndexEntry(self.name, str(number), ModelReadyState.UNAVAILABLE, reason)

    def withdraw(self, building: dict[int, VersionStatus], before: dict[int, VersionStatus]) -> None:
        """Take back the states of versions that turned out not to be loaded: the index shows what it showed before."""
        for number, status in building.items():
            if self.status.get(number) is not status:
                continue
            if number in before:
                self.status[number] = before[number]
            else:
                del self.status[number]

    def forget_failures(self) -> None:
        """After a load that succeeded: what failed before is history."""
        self.failure = ""
        for number, status in list(self.status.items()):
            if number in self.versions:
                status.reason = ""
            elif status.state is ModelReadyState.UNAVAILABLE and status.reason != reason(Event.UNLOADED):
                del self.status[number]


def _by_text(versions: Mapping[int, ModelVersion]) -> dict[str, Serving]:
    """Versions, ascending, by the text of a request's version, "" for the highest."""
    numbers = tuple(version.version for version in versions.values())
    found = {
        each.version: Serving(each, ModelView(each.name, each.version, numbers, each.config, each.labels))
        for each in versions.values()
    }
    if numbers:
        found[""] = found[numbers[-1]]
    return found


class EnsembleError(ConfigError):
    """An ensemble cannot serve as it is, or not with the models of its steps as they are."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.INVALID_ARG, message)


class MissingStepError(EnsembleError):
    """The model of a step does not serve, or not in the version that the step asks for."""


class CircleError(EnsembleError):
    """An ensemble that is a step of its own. `circle` are the names on the way, the first of them once."""

    def __init__(self, circle: Sequence[str]) -> None:
        super().__init__(f"circular dependency between ensembles: {' -> '.join((*circle, circle[0]))}")
        self.circle = tuple(circle)


class LeftBehindError(InferenceError):
    """A load was not waited for any longer, because the model is to be unloaded."""

    def __init__(self) -> None:
        super().__init__(ErrorCode.UNAVAILABLE, "the model was unloaded while it was loading")


class ModelLifecycle:
    """Loads and unloads models of a repository; `records` is read by the server, changed here alone.

    A failed load is tried again `retry_count` times, with a pause that grows, unless another try cannot help.
    """

    def __init__(
        self,
        repository: ModelRepository,
        options: LoadOptions,
        load_threads: int,
        *,
        services: ModelServices,
        retry_count: int = 0,
    ) -> None:
        self.records: dict[str, ModelRecord] = {}
        self.has_unreadable_repository = False
        """Whether a repository could not be read at the start. The server then does not know what it should serve."""
        self.live = LiveRequests()
        """Every request in flight, of all models, by ticket: filled and emptied by the pumps."""
        self._repository = repository
        self._options = options
        self._services = services
        self._retry_count = retry_count
        self._slots = asyncio.Semaphore(load_threads)
        self._looks = asyncio.Semaphore(MAX_LOOKS)
        self._next_listing: asyncio.Task[Listing] | None = None
        self._listing_turn = asyncio.Lock()
        self._duplicates: Mapping[str, str] = {}
        self.inferences: Inferences | None = None
        """Where ensembles have their steps done; set before any is loaded."""
        self._closing: dict[asyncio.Task[None], ModelVersion] = {}
        self._left_behind: set[asyncio.Task[None]] = set()
        self._memory_was_freed = False
        self._releasing: asyncio.Task[None] | None = None

    async def load_all(self, names: Sequence[str] | None) -> list[str]:
        """Load the named models, or with None all that the repositories have, side by side.

        Returns the repositories that cannot be read, and the models that failed.
        """
        unreadable = await self._look("read-repository", self._repository.unreadable)
        self.has_unreadable_repository = bool(unreadable)
        for problem in unreadable.values():
            log.error("%s", problem)
        if names is None:
            listing = await self._look("list-repository", self._repository.scan)
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
        await self._load_until_done(name, for_model)
        self.records[name].asked = True

    async def look_at_sources(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """By name, the fingerprints of the files of all models that are wanted, as they are now and as they were
        loaded; the latter without models whose load has failed."""
        wanted = [record for record in self.records.values() if record.wanted]
        names = [record.name for record in wanted]
        seen = await self._look("look-at-sources", lambda: {name: self._repository.sources(name) for name in names})
        found = {name: sources for name, sources in seen.items() if sources is not None}
        return found, {record.name: record.sources for record in wanted if record.versions}

    async def reload(self, name: str) -> None:
        """Load a model again whose files have changed, unless it was unloaded meanwhile; InferenceError."""
        record = self.records.get(name)
        if record is not None and record.wanted and not record.unloads:
            await self._load_until_done(name, for_model=False)

    async def _load_until_done(self, name: str, for_model: bool) -> None:
        while not await self._load_once(name, for_model):
            pass

    async def _load_once(self, name: str, for_model: bool) -> bool:
        """Whether the record that was waited for is still the model's: a failed load before this one drops it."""
        record = self.records.setdefault(name, ModelRecord(name))
        async with record.lock:
            if self.records.get(name) is not record:
                return False
            was_wanted = record.wanted
            record.failed = None
            try:
                await self._load_or_say_why(record, for_model)
                return True
            except InferenceError as error:
                record.failed = error
                raise
            finally:
                record.loading = False
                record.loads += 1
                # One failed call must not take a server out of service that nobody had asked for that model before.
                record.wanted = bool(record.versions) or was_wanted
                if not record.wanted and not record.status:
                    del self.records[name]

    async def _load_or_say_why(self, record: ModelRecord, for_model: bool) -> None:
        """Load; InferenceError with what clients are told, its cause is what went wrong."""
        name = record.name
        try:
            await self._load(record, for_model)
        except (NoVersionError, EnsembleError) as error:
            text = f"load failed for model '{name}': {error.message}"
            log.error("failed to load '%s': %s", name, error.message, extra={"model": name})
            raise InferenceError(ErrorCode.INVALID_ARG, text) from error
        except ConfigError as error:
            log.error("Poll failed for model directory '%s': %s", name, error.message, extra={"model": name})
            # Scripts look for this text; what follows it is the reason, which Triton keeps in its log.
            text = f"failed to load '{name}', failed to poll from model repository: {error.message}"
            raise InferenceError(ErrorCode.INTERNAL, text) from error
        except VersionError as error:
            _log_version_error(name, error)
            text = (
                f"load failed for model '{name}': version {error.version} is at UNAVAILABLE state: "
                f"{error.code.value}: {error.message};\n"
            )
            raise InferenceError(ErrorCode.INVALID_ARG, text) from error
        except LeftBehindError as error:
            log.error("failed to load '%s': %s", name, error.message, extra={"model": name})
            raise InferenceError(ErrorCode.INTERNAL, f"failed to load '{name}', no version is available") from error

    async def unload(self, name: str, *, with_steps: bool = False) -> None:
        """Stop serving; instances and model are freed once the last accepted request is answered.

        A load that is under way may finish within UNLOAD_PATIENCE_SECS; then it fails, and so does any that waits
        behind it. `with_steps`: of an ensemble, the models of its steps are unloaded too, but for those that were
        loaded by name or that other ensembles use.
        """
        record = self.records.get(name)
        if record is None:
            return
        was_impatient = False

        def lose_patience() -> None:
            nonlocal was_impatient
            was_impatient = True
            record.impatient += 1
            record.give_up.set()

        record.unloads += 1
        record.unload_asked.set()
        timer = asyncio.get_running_loop().call_later(UNLOAD_PATIENCE_SECS, lose_patience)
        try:
            async with record.lock:
                steps = dict(record.steps())
                self._unload(record)
        finally:
            timer.cancel()
            record.unloads -= 1
            record.impatient -= was_impatient
            if not record.unloads:
                record.unload_asked.clear()
            if not record.impatient:
                record.give_up.clear()
        if with_steps:
            await self._unload_unused(steps)

    async def _unload_unused(self, names: Iterable[str]) -> None:
        for name in names:
            record = self.records.get(name)
            if record is None or record.asked or self._is_used(name):
                continue
            await self.unload(name, with_steps=True)

    def _is_used(self, name: str) -> bool:
        """Whether it is a step of an ensemble that serves."""
        return any(name in version.steps for version in self._serving())

    async def index(self, ready_only: bool) -> list[ModelIndexEntry]:
        """The repository index: what is on disk now, and every version that was ever loaded."""
        entries: list[ModelIndexEntry] = []
        listing = await self._list()
        for name in sorted({*listing.names, *self.records}):
            record = self.records.get(name)
            if record is None or not record.status:
                failure = record.failure if record is not None else ""
                failure = SEVERAL_PLACES if name in listing.duplicates else failure
                state = ModelReadyState.UNAVAILABLE if failure else None
                entry = [ModelIndexEntry(name, "", state, failure)]
            else:
                entry = [record.index_entry(number, status) for number, status in sorted(record.status.items())]
            entries.extend(entry)
        if ready_only:
            return [entry for entry in entries if entry.state is ModelReadyState.READY]
        return entries

    def states(self) -> Iterator[StateSample]:
        """What the index says of every version that serves or should: not of those that were unloaded."""
        for name, record in sorted(self.records.items()):
            if not record.status and record.failure:
                yield StateSample(name, "", ModelReadyState.UNAVAILABLE)
            for number, status in sorted(record.status.items()):
                entry = record.index_entry(number, status)
                if entry.state is not None and entry.reason != reason(Event.UNLOADED):
                    yield StateSample(name, str(number), entry.state)

    def all_ready(self) -> bool:
        """Whether every version of every wanted model serves."""
        return all(record.is_ready() for record in self.records.values() if record.wanted)

    def busy(self) -> tuple[int, int]:
        """How many versions have requests in flight, and how many there are, serving and retired."""
        versions = (*self._serving(), *self._closing.values())
        return sum(version.pump.queued + version.pump.executing > 0 for version in versions), len(versions)

    def abort(self) -> None:
        """Fail what is queued in every model, serving or retired: the time to drain is over."""
        # Ensembles first: the failures of their steps are not the cause.
        for version in sorted((*self._serving(), *self._closing.values()), key=lambda each: each.parts is None):
            version.pump.abort()

    async def close(self) -> None:
        """Wait for every accepted request of every model, serving or retired, and free all of them."""
        # Requests lead to others, of ensembles' steps or by models' own code: no model goes before all are answered.
        while self.busy()[0]:
            await asyncio.gather(*(each.drained() for each in (*self._serving(), *self._closing.values())))
        for record in self.records.values():
            record.ensemble = None
            self._retire(record, record.replace({}))
        if self._closing:
            await asyncio.wait(self._closing)

    def _serving(self) -> list[ModelVersion]:
        return [version for record in self.records.values() for version in record.versions.values()]

    async def _load_at_start(self, name: str) -> bool:
        # Wanted from the start, so that the server is not ready without it.
        record = self.records.setdefault(name, ModelRecord(name))
        record.wanted = True
        try:
            await self.load(name)
        except InferenceError:
            # Whoever unloads a model while the server starts does not want the server to exit for want of it.
            return bool(record.unloads)
        return True

    async def _load(self, record: ModelRecord, for_model: bool) -> None:
        """Load, and again while that fails, another try may help and nobody wants the model unloaded."""
        attempt = 1
        while True:
            try:
                await self._try_load(record, for_model)
                return
            except (ConfigError, VersionError) as error:
                if attempt > self._retry_count or record.unloads or not _may_pass(error):
                    raise
                pause = retry_pause_secs(attempt)
                log.warning(
                    "model '%s': load attempt %d of %d failed, the next one in %g s: %s",
                    *(record.name, attempt, self._retry_count + 1, pause, error.message),
                    extra={"model": record.name},
                )
                try:
                    await asyncio.wait_for(record.unload_asked.wait(), pause)
                except TimeoutError:
                    attempt += 1
                else:
                    raise

    async def _try_load(self, record: ModelRecord, for_model: bool) -> None:
        building: dict[int, VersionStatus] = {}
        try:
            entry = await self._read(record)
            if record.versions and record.fingerprint == entry.fingerprint and not record.has_given_up():
                record.sources = entry.sources
                record.forget_failures()
                return
            record.loading = True
            building.update((version, VersionStatus(ModelReadyState.UNKNOWN)) for version in entry.versions)
            serving, ensemble = await self._build(record, entry, building, for_model)
        except (ConfigError, VersionError, LeftBehindError) as error:
            self._fail(record, building, error)
            raise
        old = record.replace(serving)
        record.ensemble, record.problem = ensemble, ""
        for number in serving:
            status = building[number]
            if status.state is not ModelReadyState.LOADING:
                status.on(Event.LOAD)
            status.on(Event.LOADED)
            record.status[number] = status
        record.fingerprint, record.sources = entry.fingerprint, entry.sources
        self._follow(record.name)
        self._retire(record, old)
        record.forget_failures()
        log.info("successfully loaded '%s'", record.name, extra={"model": record.name})

    async def _list(self) -> Listing:
        """What the repository holds, looked at after this was called. All who ask during one look share the next: looks
        side by side would share the interpreter with the event loop, and hold it up together."""
        if self._next_listing is None:
            self._next_listing = asyncio.get_running_loop().create_task(self._list_in_turn())
        return await asyncio.shield(self._next_listing)

    async def _list_in_turn(self) -> Listing:
        async with self._listing_turn:
            self._next_listing = None
            listing = await self._look("list-repository", self._repository.scan)
            for name, problem in listing.duplicates.items():
                if self._duplicates.get(name) != problem:
                    log.warning("model '%s': %s", name, problem, extra={"model": name})
            self._duplicates = listing.duplicates
            return listing

    async def _look(self, name: str, look: Callable[[], T]) -> T:
        """Read the repository on a thread, of which there are few: any number of clients may ask, and disks be slow."""
        async with self._looks:
            return await run_in_thread(name, look)

    async def _read(self, record: ModelRecord) -> ModelEntry:
        """The model's directory as it is now; ConfigError."""
        if len(self._left_behind) >= MAX_LEFT_BEHIND:
            text = f"{MAX_LEFT_BEHIND} loads or unloads of models never ended, the server must be restarted"
            raise ConfigError(ErrorCode.UNAVAILABLE, text)
        try:
            finding = self._look(f"read-{record.name}", lambda: self._repository.find(record.name))
            entry = await self._unless_unloaded(record, finding)
        except LeftBehindError:
            raise
        except Exception as error:
            if not isinstance(error, OSError | LookupError | ValueError):
                log.exception("model '%s': its directory could not be read", record.name, extra={"model": record.name})
            raise ConfigError(ErrorCode.INTERNAL, str(error)) from error
        for warning in entry.warnings:
            if warning not in record.warned:
                log.warning("model '%s': %s", record.name, warning, extra={"model": record.name})
        record.warned = frozenset(entry.warnings)
        return entry

    def _fail(self, record: ModelRecord, building: dict[int, VersionStatus], error: InferenceError) -> None:
        """What the index says when no selected version came up; those that are not at fault say which one is."""
        for number, status in record.status.items():
            if status.state is ModelReadyState.READY:
                status.on(Event.RELOAD_FAILED, error)
            elif building.get(number) is status:
                cause = error
                if isinstance(error, VersionError) and number != error.version:
                    text = f"not loaded because version {error.version} failed: {error.message}"
                    cause = InferenceError(error.code, text)
                status.on(Event.FAILED, cause)
        if not isinstance(error, VersionError):
            record.failure = error.message

    async def _build(
        self, record: ModelRecord, entry: ModelEntry, building: dict[int, VersionStatus], for_model: bool
    ) -> tuple[dict[int, ModelVersion], PreparedModel | None]:
        """New versions with their instances up, all of them or none; and what an ensemble is made from, None for a
        model. ConfigError or VersionError."""
        before = dict(record.status)
        try:
            if not for_model:
                await self._unless_unloaded(record, self._slots.acquire(), self._free_slot)
            try:
                prepared = await self._prepare(record, entry, building, before)
                if not prepared.is_ensemble:
                    starting = self._start(record.name, prepared)
                    ends = all(version.isolated is not None for version in prepared.versions)
                    started = await self._unless_unloaded(
                        record, starting, self._close_versions, ends_by_cancelling=ends
                    )
                    return started, None
            finally:
                if not for_model:
                    self._slots.release()
            # Without a slot, because the loads that it waits for need some.
            await self._load_steps(record, prepared, for_model)
            return self._make_ensemble(prepared), prepared
        except ConfigError:
            record.withdraw(building, before)
            raise
        except VersionError as error:
            record.withdraw({n: s for n, s in building.items() if n not in error.selected}, before)
            raise
        except LeftBehindError:
            raise
        except Exception as error:
            log.exception("model '%s': the load failed", record.name, extra={"model": record.name})
            record.withdraw(building, before)
            raise ConfigError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error

    async def _prepare(
        self,
        record: ModelRecord,
        entry: ModelEntry,
        building: dict[int, VersionStatus],
        before: dict[int, VersionStatus],
    ) -> PreparedModel:
        """The versions that the policy selects, loaded. ConfigError or VersionError."""
        for number, status in building.items():
            status.on(Event.LOAD)
            if number not in record.versions:
                record.status[number] = status
        abandon = Abandon()
        loading = run_in_thread(f"load-{record.name}", lambda: load_model(entry, self._options, abandon))
        try:
            prepared = await self._unless_unloaded(record, loading, lambda made: self._close_models(record.name, made))
        except (LeftBehindError, asyncio.CancelledError):
            abandon.set()
            raise
        selected = {version.version for version in prepared.versions}
        record.withdraw({n: s for n, s in building.items() if n not in selected}, before)
        return prepared

    async def _load_steps(self, record: ModelRecord, prepared: PreparedModel, for_model: bool) -> None:
        """Load the models of an ensemble's steps that do not serve, side by side. EnsembleError where one cannot be
        loaded, also because its load waits for this one."""
        names: list[str] = []
        for name, version in dict.fromkeys(members_of(prepared.config)):
            serving = self._step(name, version)
            if name not in names and (serving is None or serving.pump.refusal is not None):
                names.append(name)
        waits = self._services.loads
        for name in names:
            if name == record.name:
                raise CircleError((name,))
            if path := waits.path(name, record.name):
                raise CircleError((record.name, *path[:-1]))
        waits.add(record.name, names)
        try:
            loading = self._load_side_by_side(names, for_model)
            failures = await self._unless_unloaded(record, loading, ends_by_cancelling=True)
        finally:
            waits.remove(record.name, names)
        # One that serves as it did before its load failed is still a step's model.
        failures = {name: failure for name, failure in failures.items() if self._step(name, LATEST) is None}
        if failures:
            raise _steps_failed(record.name, failures)

    async def _load_side_by_side(self, names: Sequence[str], for_model: bool) -> dict[str, InferenceError]:
        """Load these models; the errors of those that failed."""

        async def load(name: str) -> InferenceError | None:
            record = self.records.get(name)
            if record is not None and record.lock.locked():
                loads = record.loads
                async with record.lock:
                    # What another one has just tried in vain is not tried again.
                    if record.loads > loads and record.failed is not None:
                        return record.failed
            try:
                await self._load_until_done(name, for_model)
            except InferenceError as error:
                return error
            return None

        failures = await asyncio.gather(*map(load, names))
        return {name: failure for name, failure in zip(names, failures, strict=True) if failure is not None}

    def _step(self, name: str, version: int) -> ModelVersion | None:
        """What serves a step that names this model and version."""
        record = self.records.get(name)
        serving = record.serving.get("" if version == LATEST else str(version)) if record is not None else None
        return serving.version if serving is not None else None

    def _make_ensemble(self, prepared: PreparedModel) -> dict[int, ModelVersion]:
        """All versions of an ensemble, which serve at once. EnsembleError."""
        if self.inferences is None:
            raise RuntimeError(f"ensemble '{prepared.config.name}' has no server to do its steps")
        steps = tuple(dict.fromkeys(members_of(prepared.config)))

        def members() -> list[Acceptor | None]:
            serving = [self._step(*step) for step in steps]
            return [version.pump if version is not None else None for version in serving]

        parts = self._parts(prepared)
        made = {}
        for version in prepared.versions:
            try:
                made[version.version] = make_ensemble(
                    version, parts, prepared.load_seconds, self.live, self._services, self.inferences, members
                )
            except InferenceError as error:
                raise EnsembleError(error.message) from error
        return made

    def _parts(self, prepared: PreparedModel) -> Parts:
        """What an ensemble consists of now. EnsembleError where a step is missing, or leads back to the ensemble."""
        ensemble = prepared.config.name
        members: list[tuple[ModelConfig, Labels]] = []
        for name, version in members_of(prepared.config):
            if way := self._way(name, ensemble):
                raise CircleError((ensemble, *way[:-1]))
            serving = self._step(name, version)
            if serving is None and self._step(name, LATEST) is None:
                raise MissingStepError(f"ensemble '{ensemble}' depends on '{name}' which has no loaded version")
            if serving is None:
                raise MissingStepError(
                    f"ensemble '{ensemble}' depends on '{name}' whose required version {version} is not loaded."
                )
            members.append((serving.config, serving.labels))
        way_down = self._way_down(prepared)
        depth = len(way_down) - 1
        if depth > MAX_DEPTH:
            raise EnsembleError(
                f"ensemble '{ensemble}' nests ensembles {depth} deep: calls within one another are at most {MAX_DEPTH}"
                f": {' -> '.join(way_down)}"
            )
        return Parts(prepared.config, prepared.labels, tuple(members), depth)

    def _way_down(self, prepared: PreparedModel) -> Sequence[str]:
        """The longest way from an ensemble that is in no circle: itself, and a step of each that calls the next."""
        # The models that lie so deep, each with one above it.
        levels = [{prepared.config.name: ""}]
        level = {name: prepared.config.name for name, _ in members_of(prepared.config)}
        while level:
            levels.append(level)
            records = [(name, record) for name in level if (record := self.records.get(name)) is not None]
            level = {step: name for name, record in records for step, _ in record.steps()}
        way = [next(iter(levels[-1]))]
        for level in levels[:0:-1]:
            way.append(level[way[-1]])
        return way[::-1]

    def _way(self, name: str, to: str) -> tuple[str, ...]:
        """How steps lead from an ensemble to a model: both, with those between them; () where they do not."""
        before = {name: ""}
        pending = [name]
        while pending:
            at = pending.pop()
            if at == to:
                way = [at]
                while before[way[-1]]:
                    way.append(before[way[-1]])
                return tuple(reversed(way))
            record = self.records.get(at)
            for step, _ in record.steps() if record is not None else ():
                if step not in before:
                    before[step] = at
                    pending.append(step)
        return ()

    def _follow(self, name: str) -> None:
        """Have the ensembles above a model agree with what it serves now, each after those that are steps of it."""
        steps = {each.name: {step for step, _ in each.steps()} for each in self.records.values() if each.ensemble}
        changed = {name}
        replaced: list[tuple[ModelRecord, dict[int, ModelVersion]]] = []
        for ensemble in TopologicalSorter(steps).static_order():
            if changed.isdisjoint(steps.get(ensemble, ())):
                continue
            record = self.records[ensemble]
            old = self._agree(record)
            if old is not None:
                changed.add(ensemble)
                replaced.append((record, old))
        # From above: what is below stays until they have finished.
        for record, old in reversed(replaced):
            self._retire(record, old)

    def _agree(self, record: ModelRecord) -> dict[int, ModelVersion] | None:
        """Have one ensemble serve if it can, with its steps' models as they are now; the versions that this replaces,
        None where nothing changes."""
        prepared = record.ensemble
        if prepared is None:
            return None
        made: dict[int, ModelVersion] = {}
        problem = ""
        try:
            parts = self._parts(prepared)
            if record.versions and all(version.parts == parts for version in record.versions.values()):
                return None
            made = self._make_ensemble(prepared)
        except MissingStepError as error:
            cause = error.message
        except EnsembleError as error:
            cause = error.message
            problem = f"{error.code.value}: {error.message}"
        record.problem = problem
        # Whoever takes a step away does not want the whole server out of service for it.
        record.wanted = bool(made or problem)
        old = record.replace(made)
        for number in made.keys() - old.keys():
            status = record.status[number] = VersionStatus(ModelReadyState.UNKNOWN)
            status.on(Event.LOAD)
            status.on(Event.LOADED)
        if made and old:
            log.info("ensemble '%s' follows the models of its steps", record.name, extra={"model": record.name})
        elif made:
            log.info("ensemble '%s' is back with the models of its steps", record.name, extra={"model": record.name})
        elif old:
            log.warning("ensemble '%s' is unloaded: %s", record.name, cause, extra={"model": record.name})
        return old if made or old else None

    async def _start(self, name: str, prepared: PreparedModel) -> dict[int, ModelVersion]:
        """All selected versions with their instances up. VersionError of the one that failed, the others closed."""
        started: dict[int, ModelVersion] = {}
        selected = tuple(version.version for version in prepared.versions)
        for version in prepared.versions:
            try:
                started[version.version] = await start_version(
                    name,
                    version,
                    prepared.labels,
                    prepared.load_seconds,
                    self.live,
                    self._options.launcher,
                    self._services,
                )
            except (Exception, asyncio.CancelledError) as error:
                if not isinstance(error, InferenceError | asyncio.CancelledError):
                    log.exception("model '%s': an instance did not start", name, extra={"model": name})
                await self._close_versions(started)
                rest = [other for other in prepared.versions if other.version not in started]
                await self._close_models(name, replace(prepared, versions=tuple(rest)))
                if isinstance(error, asyncio.CancelledError):
                    raise
                code, text = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"
                if isinstance(error, InferenceError):
                    code, text = error.code, error.message
                raise VersionError(version.version, selected, code, text) from error
        return started

    async def _unless_unloaded(
        self,
        record: ModelRecord,
        work: Coroutine[Any, Any, T],
        discard: Callable[[T], Coroutine[Any, Any, None]] | None = None,
        *,
        ends_by_cancelling: bool = False,
    ) -> T:
        """What `work` returns or raises; LeftBehindError when an unload has waited for it long enough.

        Then, and when this call is cancelled, `work` is cancelled if that ends it; else it goes on by itself, and
        `discard` gets what comes of it.
        """
        if record.give_up.is_set():
            work.close()
            raise LeftBehindError
        task = asyncio.get_running_loop().create_task(work)
        giving_up = asyncio.get_running_loop().create_task(record.give_up.wait())
        try:
            await asyncio.wait((task, giving_up), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._leave_behind(record.name, task, discard)
            if ends_by_cancelling:
                task.cancel()
            raise
        finally:
            giving_up.cancel()
        if not task.done():
            self._leave_behind(record.name, task, discard)
            if ends_by_cancelling:
                task.cancel()
            raise LeftBehindError
        return task.result()

    def _leave_behind(
        self, name: str, task: asyncio.Task[T], discard: Callable[[T], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Wait for `task` no longer, but see to what comes of it."""

        async def see_to_it() -> None:
            try:
                result = await task
            except asyncio.CancelledError:
                return
            except Exception as error:  # noqa: BLE001  # nobody is left who asked for it
                about = {"model": name}
                log.warning("model '%s': a load that was left behind has failed: %s", name, error, extra=about)
                return
            if discard is not None:
                await discard(result)

        waiter = asyncio.get_running_loop().create_task(see_to_it())
        self._left_behind.add(waiter)
        waiter.add_done_callback(self._left_behind.discard)

    async def _free_slot(self, _: bool) -> None:
        self._slots.release()

    async def _close_models(self, name: str, prepared: PreparedModel) -> None:
        """Close models that have no instances."""
        for version in prepared.versions:
            try:
                await run_in_thread(f"close-{name}", version.close)
            except Exception:
                about = {"model": name, "version": version.version}
                log.exception("model '%s' version %d: closing failed", name, version.version, extra=about)

    async def _close_versions(self, versions: Mapping[int, ModelVersion]) -> None:
        """Close versions that never served."""
        for version in versions.values():
            await self._close_version(version)

    def _unload(self, record: ModelRecord) -> None:
        record.ensemble, record.problem = None, ""
        record.asked = False
        if not record.wanted:
            return
        record.wanted = False
        record.failure = ""
        record.fingerprint = ""
        old = record.replace({})
        self._follow(record.name)
        self._retire(record, old)
        log.info("unloading model '%s'", record.name, extra={"model": record.name})

    def _retire(self, record: ModelRecord, old: Mapping[int, ModelVersion]) -> None:
        """Let replaced or unloaded versions finish in the background."""
        gone = {number: version for number, version in old.items() if number not in record.versions}
        # Requests that ensembles above have accepted may still need it, and find it until they are answered.
        users = [task for task, version in self._closing.items() if record.name in version.steps]
        if users:
            record.leaving.update(_by_text(gone))
        for number, version in old.items():
            status = None
            if number in gone:
                status = record.status[number]
                status.on(Event.UNLOAD)
            finishing = self._finish(record, version, status, users if number in gone else ())
            task = asyncio.get_running_loop().create_task(finishing)
            self._closing[task] = version
            task.add_done_callback(self._closing.pop)

    async def _finish(
        self,
        record: ModelRecord,
        version: ModelVersion,
        status: VersionStatus | None,
        users: Sequence[asyncio.Task[None]],
    ) -> None:
        if users:
            await asyncio.wait(users)
            record.leaving = {text: each for text, each in record.leaving.items() if each.version is not version}
        await version.drained()
        await self._close_version(version)
        self._release_memory()
        if status is not None and status.state is ModelReadyState.UNLOADING:
            status.on(Event.UNLOADED)
            about = {"model": version.name, "version": version.version}
            log.info("successfully unloaded '%s' version %s", version.name, version.version, extra=about)

    def _release_memory(self) -> None:
        """Have the memory of a model that was closed go back to the system; once for all that close at a time."""
        self._memory_was_freed = True
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.get_running_loop().create_task(self._release_while_freed())

    async def _release_while_freed(self) -> None:
        while self._memory_was_freed:
            self._memory_was_freed = False
            await run_in_thread("release-memory", release_free_memory)

    async def _close_version(self, version: ModelVersion) -> None:
        """Close a version that has nothing in flight, and leave it behind when it takes too long."""
        task = asyncio.get_running_loop().create_task(version.close())
        await asyncio.wait((task,), timeout=CLOSE_PATIENCE_SECS)
        if not task.done():
            log.error(
                "model '%s' version %s does not close: it is left behind after %g s, with its threads and memory",
                *(version.name, version.version, CLOSE_PATIENCE_SECS),
                extra={"model": version.name, "version": version.version},
            )
            self._leave_behind(version.name, task)
        elif error := task.exception():
            about = {"model": version.name, "version": version.version}
            text = f"model '{version.name}' version {version.version}: closing failed"
            log.error("%s", text, exc_info=error, extra=about)


def _steps_failed(ensemble: str, failures: Mapping[str, InferenceError]) -> EnsembleError:
    """Why an ensemble cannot be loaded some of whose steps' models cannot."""
    causes = {name: failure.__cause__ for name, failure in failures.items()}
    for cause in causes.values():
        if isinstance(cause, CircleError) and ensemble in cause.circle:
            at = cause.circle.index(ensemble)
            return CircleError((*cause.circle[at:], *cause.circle[:at]))
    unknown = [name for name, cause in causes.items() if cause and isinstance(cause.__cause__, LookupError)]
    if unknown:
        named = ", ".join(unknown)
        return EnsembleError(f"ensemble {ensemble} contains models that are not available or ambiguous: {named}")
    name, failure = next(iter(failures.items()))
    said = failure.message.removeprefix(f"load failed for model '{name}': ")
    return EnsembleError(
        f"ensemble '{ensemble}' depends on '{name}' which has no loaded version. Model '{name}' loading failed with "
        f"error: {said}"
    )


def _log_version_error(name: str, error: VersionError) -> None:
    extra = {"model": name, "version": str(error.version)}
    log.error(
        "failed to load '%s' version %d: %s: %s", *(name, error.version, error.code.value, error.message), extra=extra
    )
    log.info("failed to load '%s'", name, extra=extra)


def _may_pass(error: ConfigError | VersionError) -> bool:
    """Whether another try can help: a configuration stays wrong, a file system, a device or a model may recover."""
    return isinstance(error, VersionError) or isinstance(error.__cause__, OSError)
