"""What is known of each model, and what the repository plan needs of it."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from halimede.core.config.model_view import ModelView
from halimede.core.ensemble.graph import members_of
from halimede.core.repository.plan import LoadedEnsemble, Served, Snapshot, StepKey, version_text
from halimede.core.repository.status import Health, ModelStatus
from halimede.core.types import InferenceError
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import PreparedModel

UNLOAD_PATIENCE_SECS = 5.0
"""How long an unload lets a load finish that is under way: most do, and then both have done what they were asked."""


class UnloadRequests:
    """The unloads that wait for a model's lock.

    While there are any, no load is tried again. Once one has waited for UNLOAD_PATIENCE_SECS, no load is waited for.
    """

    def __init__(self) -> None:
        self.count = 0
        self._impatient = 0
        self.asked = asyncio.Event()
        """Set while there are any."""
        self.give_up = asyncio.Event()
        """Set while one of them has waited too long."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """An unload waits."""
        was_impatient = False

        def lose_patience() -> None:
            nonlocal was_impatient
            was_impatient = True
            self._impatient += 1
            self.give_up.set()

        self.count += 1
        self.asked.set()
        timer = asyncio.get_running_loop().call_later(UNLOAD_PATIENCE_SECS, lose_patience)
        try:
            yield
        finally:
            timer.cancel()
            self.count -= 1
            self._impatient -= was_impatient
            if not self.count:
                self.asked.clear()
            if not self._impatient:
                self.give_up.clear()


@dataclass(frozen=True, slots=True)
class Serving:
    """A ready version and what front ends see of it."""

    version: ModelVersion
    view: ModelView


@dataclass(slots=True)
class ModelRecord:
    """Everything known of one model name.

    `versions` holds the serving ones, ascending by number; `serving` finds them by the text of a request's version, ""
    for the highest, and `served` is what the plan sees of them. `leaving` is as `serving`, of versions that were
    unloaded while requests of ensembles may still need them.

    `ensemble` is set from the load of an ensemble to its unload, also while it does not serve for want of a step.
    `fingerprint` and `sources` are those of the files that serve, `warned` is what was said of the directory already.

    `loading` says that a load of what was found on disk is under way. `loads` counts the loads that have ended,
    `failed` is how the last of them did.
    """

    name: str
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
        """Serve these versions from now on, in one step; returns what was served before."""
        old = self.versions
        self.versions = dict(sorted(versions.items()))
        self.serving = by_text(self.versions)
        self.served = {text: Served(each.version.config, each.version.labels) for text, each in self.serving.items()}
        return old

    def steps(self) -> tuple[StepKey, ...]:
        """Model and version of each step of an ensemble; () for a model."""
        return members_of(self.ensemble.config) if self.ensemble is not None else ()

    def is_ready(self) -> bool:
        """Whether all versions serve, with an instance up. A reload changes nothing of that, nor when it fails."""
        return bool(self.versions) and all(version.executor.is_available() for version in self.versions.values())

    def has_given_up(self) -> bool:
        """Whether a version's instances have died too often to be started again: a load makes new ones."""
        return any(version.executor.refusal is not None for version in self.versions.values())

    def health(self) -> dict[int, Health]:
        """How the instances of each version are that serves."""
        return {number: Health(version.executor.refusal, version.workers) for number, version in self.versions.items()}


Records = dict[str, ModelRecord]
"""By name: every model that is loaded, or was, or should be."""


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
    """What serves a step."""
    name, version = step
    record = records.get(name)
    serving = record.serving.get(version_text(version)) if record is not None else None
    return serving.version if serving is not None else None


def serving_versions(records: Records) -> list[ModelVersion]:
    """All versions that serve."""
    return [version for record in records.values() for version in record.versions.values()]


def take_snapshot(records: Records) -> Snapshot:
    """What is loaded, as the plan sees it."""
    ensembles = {record.name: _loaded(record, record.ensemble) for record in records.values() if record.ensemble}
    return Snapshot({record.name: record.served for record in records.values() if record.served}, ensembles)


def _loaded(record: ModelRecord, ensemble: PreparedModel) -> LoadedEnsemble:
    parts = next((version.parts for version in record.versions.values()), None)
    numbers = tuple(version.version for version in ensemble.versions)
    return LoadedEnsemble(ensemble.config, ensemble.labels, numbers, parts)
