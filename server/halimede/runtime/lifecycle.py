"""Life cycle of all models: load, reload, unload, and what the repository index says of them.

One lock per model name serialises its loads and unloads; different models do not wait for one another but for a free
load thread. State changes on the event loop only. A reload builds the new versions beside the old ones, which serve
until the swap (one synchronous step) and then drain in the background; a reload that fails leaves the old ones alone.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from halimede.core.config.model_view import ModelView
from halimede.core.repository.lifecycle import Event, next_state, reason
from halimede.core.types import ErrorCode, InferenceError, ModelIndexEntry, ModelReadyState
from halimede.runtime.model import ModelVersion, start_version
from halimede.runtime.prepare import ConfigError, LoadOptions, PreparedModel, VersionError, load_model
from halimede.runtime.pump import LiveRequests
from halimede.runtime.repository import ModelEntry, ModelRepository
from halimede.runtime.threads import run_in_thread

log = logging.getLogger(__name__)


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
    for the highest. `failure` says why the last load failed before any version could be named.
    """

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, ModelVersion] = field(default_factory=dict)
    serving: dict[str, Serving] = field(default_factory=dict)
    status: dict[int, VersionStatus] = field(default_factory=dict)
    fingerprint: str = ""
    wanted: bool = False
    failure: str = ""

    def replace(self, versions: dict[int, ModelVersion]) -> dict[int, ModelVersion]:
        """Serve these versions from now on, in one step; returns what was served before."""
        old = self.versions
        self.versions = dict(sorted(versions.items()))
        numbers = tuple(version.version for version in self.versions.values())
        self.serving = {
            version.version: Serving(
                version, ModelView(self.name, version.version, numbers, version.config, version.labels)
            )
            for version in self.versions.values()
        }
        if numbers:
            self.serving[""] = self.serving[numbers[-1]]
        return old

    def is_ready(self) -> bool:
        """Whether the model serves. A reload changes nothing of that, while it runs and when it fails."""
        return bool(self.versions)

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


class ModelLifecycle:
    """Loads and unloads models of a repository; `records` is read by the server, changed here alone."""

    def __init__(self, repository: ModelRepository, options: LoadOptions, load_threads: int) -> None:
        self.records: dict[str, ModelRecord] = {}
        self.live = LiveRequests()
        """Every request in flight, of all models, by ticket: filled and emptied by the pumps."""
        self._repository = repository
        self._options = options
        self._slots = asyncio.Semaphore(load_threads)
        self._closing: dict[asyncio.Task[None], ModelVersion] = {}

    async def load_all(self, names: Sequence[str] | None) -> list[str]:
        """Load the named models, or with None all that the repository has, side by side. Returns those that failed."""
        if names is None:
            found, warnings = await run_in_thread("list-repository", self._repository.scan)
            names = tuple(found)
            for warning in warnings:
                log.warning("%s", warning)
        results = await asyncio.gather(*(self._load_logged(name) for name in names))
        return [name for name, loaded in zip(names, results, strict=True) if not loaded]

    async def load(self, name: str) -> None:
        """Load or reload one model, nothing when it is loaded and unchanged; InferenceError with the root cause."""
        while not await self._load_once(name):
            pass

    async def _load_once(self, name: str) -> bool:
        """Whether the record that was waited for is still the model's: a failed load before this one drops it."""
        record = self.records.setdefault(name, ModelRecord(name))
        async with record.lock:
            if self.records.get(name) is not record:
                return False
            was_wanted = record.wanted
            try:
                await self._load(record)
                return True
            except ConfigError as error:
                # Scripts look for this text; what follows it is the reason, which Triton keeps in its log.
                text = f"failed to load '{name}', failed to poll from model repository: {error.message}"
                raise InferenceError(ErrorCode.INTERNAL, text) from error
            except VersionError as error:
                text = (
                    f"load failed for model '{name}': version {error.version} is at UNAVAILABLE state: "
                    f"{error.code.value}: {error.message};\n"
                )
                raise InferenceError(ErrorCode.INVALID_ARG, text) from error
            finally:
                # One failed call must not take a server out of service that nobody had asked for that model before.
                record.wanted = bool(record.versions) or was_wanted
                if not record.wanted and not record.status:
                    del self.records[name]

    async def unload(self, name: str) -> None:
        """Stop serving; instances and model are freed once the last accepted request is answered."""
        record = self.records.get(name)
        if record is None:
            return
        async with record.lock:
            if not record.wanted:
                return
            record.wanted = False
            record.failure = ""
            record.fingerprint = ""
            self._retire(record, record.replace({}))
            log.info("unloading model '%s'", name)

    async def index(self, ready_only: bool) -> list[ModelIndexEntry]:
        """The repository index: what is on disk now, and every version that was ever loaded."""
        entries: list[ModelIndexEntry] = []
        on_disk, _ = await run_in_thread("list-repository", self._repository.scan)
        for name in sorted({*on_disk, *self.records}):
            record = self.records.get(name)
            if record is None or not record.status:
                failure = record.failure if record is not None else ""
                state = ModelReadyState.UNAVAILABLE if failure else None
                entry = [ModelIndexEntry(name, "", state, failure)]
            else:
                entry = [
                    ModelIndexEntry(name, str(version), status.state, status.reason)
                    for version, status in sorted(record.status.items())
                ]
            entries.extend(entry)
        if ready_only:
            return [entry for entry in entries if entry.state is ModelReadyState.READY]
        return entries

    def all_ready(self) -> bool:
        """Whether every version of every wanted model serves."""
        return all(record.is_ready() for record in self.records.values() if record.wanted)

    def abort(self) -> None:
        """Fail what is queued in every model, serving or retired: the time to drain is over."""
        for version in (*self._serving(), *self._closing.values()):
            version.pump.abort()

    async def close(self) -> None:
        """Wait for every accepted request of every model, serving or retired, and free all of them."""
        for record in self.records.values():
            self._retire(record, record.replace({}))
        if self._closing:
            await asyncio.wait(self._closing)

    def _serving(self) -> list[ModelVersion]:
        return [version for record in self.records.values() for version in record.versions.values()]

    async def _load_logged(self, name: str) -> bool:
        # Wanted from the start, so that the server is not ready without it.
        record = self.records.setdefault(name, ModelRecord(name))
        record.wanted = True
        try:
            await self.load(name)
        except InferenceError as error:
            log.error("%s", error.message.rstrip())
            return False
        except Exception as error:
            log.exception("model '%s': the load failed", name)
            record.failure = f"{type(error).__name__}: {error}"
            return False
        return True

    async def _load(self, record: ModelRecord) -> None:
        try:
            entry = await run_in_thread(f"read-{record.name}", lambda: self._repository.find(record.name))
        except (OSError, LookupError, ValueError) as error:
            record.failure = str(error)
            raise ConfigError(ErrorCode.INTERNAL, str(error)) from error
        if record.versions and record.fingerprint == entry.fingerprint:
            record.forget_failures()
            return
        for warning in entry.warnings:
            log.warning("model '%s': %s", record.name, warning)
        building = {version: VersionStatus(ModelReadyState.UNKNOWN) for version in entry.versions}
        try:
            serving = await self._build(record, entry, building)
        except (ConfigError, VersionError) as error:
            for status in record.status.values():
                if status.state is ModelReadyState.READY:
                    status.on(Event.RELOAD_FAILED, error)
            if isinstance(error, VersionError):
                self._fail(record, building, error)
            else:
                record.failure = error.message
            raise
        old = record.replace(serving)
        for number in serving:
            status = building[number]
            if status.state is not ModelReadyState.LOADING:
                status.on(Event.LOAD)
            status.on(Event.LOADED)
            record.status[number] = status
        record.fingerprint = entry.fingerprint
        self._retire(record, old)
        record.forget_failures()
        log.info("successfully loaded '%s'", record.name)

    def _fail(self, record: ModelRecord, building: dict[int, VersionStatus], error: VersionError) -> None:
        """No selected version came up, the others because of the one that failed."""
        for number, status in building.items():
            if record.status.get(number) is not status:
                continue
            if number == error.version:
                status.on(Event.FAILED, error)
            else:
                text = f"not loaded because version {error.version} failed: {error.message}"
                status.on(Event.FAILED, InferenceError(error.code, text))

    async def _build(
        self, record: ModelRecord, entry: ModelEntry, building: dict[int, VersionStatus]
    ) -> dict[int, ModelVersion]:
        """New versions with their instances up; all of them or none."""
        async with self._slots:
            log.info("loading: %s", record.name)
            before = dict(record.status)
            for number, status in building.items():
                status.on(Event.LOAD)
                if number not in record.versions:
                    record.status[number] = status
            try:
                prepared = await run_in_thread(f"load-{record.name}", lambda: load_model(entry, self._options))
                selected = {version.version for version in prepared.versions}
                record.withdraw({n: s for n, s in building.items() if n not in selected}, before)
                return await self._start(record, prepared)
            except ConfigError:
                record.withdraw(building, before)
                raise
            except VersionError as error:
                record.withdraw({n: s for n, s in building.items() if n not in error.selected}, before)
                raise

    async def _start(self, record: ModelRecord, prepared: PreparedModel) -> dict[int, ModelVersion]:
        started: dict[int, ModelVersion] = {}
        selected = tuple(version.version for version in prepared.versions)
        for version in prepared.versions:
            try:
                started[version.version] = await start_version(
                    record.name, version, prepared.labels, prepared.load_seconds, self.live
                )
            except Exception as error:
                for other in prepared.versions:
                    if other.version in started:
                        await started[other.version].close()
                    else:
                        await run_in_thread(f"close-{record.name}", other.model.close)
                if isinstance(error, InferenceError):
                    raise VersionError(version.version, selected, error.code, error.message) from error
                log.exception("model '%s': an instance did not start", record.name)
                text = f"{type(error).__name__}: {error}"
                raise VersionError(version.version, selected, ErrorCode.INTERNAL, text) from error
        return started

    def _retire(self, record: ModelRecord, old: dict[int, ModelVersion]) -> None:
        """Let replaced or unloaded versions finish in the background."""
        for number, version in old.items():
            status = None
            if number not in record.versions:
                status = record.status[number]
                status.on(Event.UNLOAD)
            task = asyncio.get_running_loop().create_task(self._finish(version, status))
            self._closing[task] = version
            task.add_done_callback(self._closing.pop)

    async def _finish(self, version: ModelVersion, status: VersionStatus | None) -> None:
        try:
            await version.close()
        except Exception:
            log.exception("model '%s' version %s: closing failed", version.name, version.version)
        if status is not None and status.state is ModelReadyState.UNLOADING:
            status.on(Event.UNLOADED)
            log.info("successfully unloaded '%s' version %s", version.name, version.version)
