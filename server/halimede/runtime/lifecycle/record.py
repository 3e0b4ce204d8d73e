"""The state of each model, and the part of it that the repository plan reads."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from halimede.core.config.model_view import ModelView
from halimede.core.ensemble.graph import members_of
from halimede.core.repository.plan import LoadedEnsemble, Served, Snapshot, StepKey, version_text
from halimede.core.repository.status import Health, ModelStatus
from halimede.core.types import InferenceError
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import PreparedModel


class UnloadRequests:
    """The unloads that wait for a model's lock.

    While an unload waits, a failed load is not tried again. After its time limit it stops waiting for the load, and
    earlier for one that has not begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self._too_long = 0
        self.asked = asyncio.Event()
        """Set while an unload waits."""
        self.give_up = asyncio.Event()
        """Set while an unload has waited too long."""

    async def waited(self, limit_secs: float | None = None) -> None:
        """Return once an unload has waited too long; with `limit_secs`, once one has waited for so long from now on."""
        if limit_secs is not None:
            await self.asked.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_secs):
                await self.give_up.wait()

    @contextmanager
    def waiting(self, limit_secs: float) -> Iterator[None]:
        """Count an unload as waiting, and after `limit_secs` as one that has waited too long."""
        is_too_long = False

        def waited_too_long() -> None:
            nonlocal is_too_long
            is_too_long = True
            self._too_long += 1
            self.give_up.set()

        self.count += 1
        self.asked.set()
        timer = asyncio.get_running_loop().call_later(limit_secs, waited_too_long)
        try:
            yield
        finally:
            timer.cancel()
            self.count -= 1
            self._too_long -= is_too_long
            if not self.count:
                self.asked.clear()
            if not self._too_long:
                self.give_up.clear()


@dataclass(frozen=True, slots=True)
class Serving:
    """A ready version, and the view of it for front ends."""

    version: ModelVersion
    view: ModelView


@dataclass(slots=True)
class ModelRecord:
    """The state of one model name.

    `versions` has the serving versions, ascending by number. `serving` has them by the text of a request's version, ""
    for the highest, and `served` is the repository plan's view of them. `leaving` is like `serving`, for versions that
    were unloaded while requests of ensembles may still need them.

    `ensemble` is set from the load of an ensemble to its unload, also while a step is missing and it does not serve.
    `fingerprint` and `sources` are those of the files that serve. `warned` has the warnings about the directory that
    were logged.

    `on_change` is called after each change of the versions that serve.

    `loading` is set while a load of the directory on disk is in progress. `loads` counts the loads that have ended, and
    `failed` is the error of the last one.
    """

    name: str
    on_change: Callable[[], None]
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    status: ModelStatus = field(default_factory=ModelStatus)
    unloads: UnloadRequests = field(default_factory=UnloadRequests)
    versions: dict[int, ModelVersion] = field(default_factory=dict)
    serving: dict[str, Serving] = field(default_factory=dict)
    served: Mapping[str, Served] = field(default_factory=dict)
    leaving: dict[str, Serving] = field(default_factory=dict)
    ensemble: PreparedModel | None = None
    fingerprint: str = ""
    sources: str = ""
    warned: frozenset[str] = frozenset()
    loading: bool = False
    loads: int = 0
    failed: InferenceError | None = None

    def replace(self, versions: Mapping[int, ModelVersion]) -> dict[int, ModelVersion]:
        """Serve these versions from now on, in one step; return the versions that were served before."""
        old = self.versions
        self.versions = dict(sorted(versions.items()))
        self.serving = by_text(self.versions)
        self.served = {text: Served(each.version.config, each.version.labels) for text, each in self.serving.items()}
        self.on_change()
        return old

    def steps(self) -> tuple[StepKey, ...]:
        """Model and version of each step of an ensemble; () for a model."""
        return members_of(self.ensemble.config) if self.ensemble is not None else ()

    def is_ready(self) -> bool:
        """Whether all versions serve, each with a running instance. A reload does not change this, even if it fails."""
        return bool(self.versions) and all(version.executor.is_available() for version in self.versions.values())

    def is_unknown(self) -> bool:
        """Whether requests are answered as for a model that does not exist: the folder is no model, or was not read."""
        return not (self.loading or self.status.is_known())

    def refuses(self) -> bool:
        """Whether a version refuses requests: none of its instances will come up soon. A load makes new ones."""
        return any(version.executor.refusal is not None for version in self.versions.values())

    def health(self) -> dict[int, Health]:
        """The state of the instances of each serving version."""
        return {number: Health(version.executor.refusal, version.workers) for number, version in self.versions.items()}


class Records(dict[str, ModelRecord]):
    """By name: every model that is loaded, or was, or should be."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change of the versions that serve."""
        super().__init__()
        self.on_change = on_change

    def obtain(self, name: str) -> ModelRecord:
        """The record of a model, a new one if it has none."""
        record = self.get(name)
        if record is None:
            record = self[name] = ModelRecord(name, self.on_change)
        return record


def by_text(versions: Mapping[int, ModelVersion]) -> dict[str, Serving]:
    """Versions, ascending, by the text of a request's version, "" for the highest."""
    numbers = tuple(version.version for version in versions.values())
    found = {
        each.version: Serving(each, ModelView(each.name, each.version, numbers, each.config, each.labels))
        for each in versions.values()
    }
    if numbers:
        found[""] = found[numbers[-1]]
    return found


def find_step(records: Records, step: StepKey) -> ModelVersion | None:
    """The version that serves a step."""
    name, version = step
    record = records.get(name)
    serving = record.serving.get(version_text(version)) if record is not None else None
    return serving.version if serving is not None else None


def serving_versions(records: Records) -> list[ModelVersion]:
    """All versions that serve."""
    return [version for record in records.values() for version in record.versions.values()]


def take_snapshot(records: Records) -> Snapshot:
    """The loaded models, as the repository plan reads them."""
    ensembles = {record.name: _loaded(record, record.ensemble) for record in records.values() if record.ensemble}
    return Snapshot({record.name: record.served for record in records.values() if record.served}, ensembles)


def _loaded(record: ModelRecord, ensemble: PreparedModel) -> LoadedEnsemble:
    parts = next((version.parts for version in record.versions.values()), None)
    numbers = tuple(version.version for version in ensemble.versions)
    return LoadedEnsemble(ensemble.config, ensemble.labels, numbers, parts)
