"""The state of one model's loads: whether it is wanted, and the entries of its versions in the repository index.

The events, in order: `begin` and `start` an attempt, `select` its versions, then `succeed` or `fail`, and `end` after
the last attempt; `unload`, and `finish_unload` once nothing is in flight. An ensemble also has `serve` and `withdraw`,
when models of its steps are loaded and unloaded.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from halimede.core.repository.layout import SEVERAL_REPOSITORIES
from halimede.core.repository.lifecycle import VersionEvent, next_state, reason
from halimede.core.repository.load_errors import ConfigError, LoadError, VersionError
from halimede.core.types import InferenceError, ModelIndexEntry, ModelReadyState
from halimede.core.types.server import WorkerHealth


@dataclass(slots=True)
class VersionStatus:
    """State of one load of one version, as shown in the index."""

    state: ModelReadyState = ModelReadyState.UNKNOWN
    reason: str = ""

    def on(self, event: VersionEvent, cause: InferenceError | None = None) -> None:
        self.state = next_state(self.state, event)
        self.reason = reason(event, cause)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to load a model: the status of each existing version, and the earlier state of the index."""

    loading: Mapping[int, VersionStatus] = field(default_factory=dict)
    before: Mapping[int, VersionStatus] = field(default_factory=dict)


@dataclass(slots=True)
class Health:
    """The health of a serving version: why it refuses requests, None if it does not; and the state of its workers."""

    refusal: InferenceError | None = None
    workers: WorkerHealth | None = None


@dataclass(slots=True)
class ModelStatus:
    """See the module.

    `wanted`: the server is not ready without the model. `asked`: it was loaded by name, and not only for an ensemble.
    `failure` is why the last load failed before its versions were known. `problem` is why a loaded ensemble does not
    fit the current models of its steps.
    """

    versions: dict[int, VersionStatus] = field(default_factory=dict)
    wanted: bool = False
    asked: bool = False
    failure: str = ""
    problem: str = ""

    def __contains__(self, version: int) -> bool:
        """Whether the index has this version."""
        return version in self.versions

    def begin(self, versions: Iterable[int]) -> Attempt:
        """Begin an attempt to load these versions; the index does not change yet."""
        return Attempt({version: VersionStatus() for version in versions}, dict(self.versions))

    def start(self, attempt: Attempt, serving: Collection[int]) -> None:
        """The versions of the attempt are loading. The index still shows the serving ones."""
        for version, status in attempt.loading.items():
            status.on(VersionEvent.LOAD)
            if version not in serving:
                self.versions[version] = status

    def select(self, attempt: Attempt, selected: Collection[int]) -> None:
        """Only these versions are loaded: for the others the index shows its earlier state."""
        for version, status in attempt.loading.items():
            if version in selected or self.versions.get(version) is not status:
                continue
            if version in attempt.before:
                self.versions[version] = attempt.before[version]
            else:
                del self.versions[version]

    def succeed(self, attempt: Attempt, serving: Collection[int]) -> None:
        """The attempt's load of these versions serves from now on."""
        self.problem = ""
        for version in serving:
            status = attempt.loading[version]
            status.on(VersionEvent.LOADED)
            self.versions[version] = status

    def fail(self, attempt: Attempt, error: LoadError) -> None:
        """The attempt has failed; versions that served before continue to serve."""
        if isinstance(error, ConfigError):
            self.select(attempt, ())
        elif isinstance(error, VersionError):
            self.select(attempt, error.selected)
        for version, status in self.versions.items():
            if status.state is ModelReadyState.READY:
                status.on(VersionEvent.RELOAD_FAILED, error)
            elif attempt.loading.get(version) is status:
                status.on(VersionEvent.FAILED, _cause(version, error))
        if not isinstance(error, VersionError):
            self.failure = error.message

    def end(self, serving: Collection[int], *, was_wanted: bool) -> None:
        """A load has ended. A failed one of a model that was not wanted before must not make the server unready."""
        self.wanted = bool(serving) or was_wanted

    def is_known(self) -> bool:
        """Whether the model has a state to keep; `failure` alone does not count."""
        return self.wanted or bool(self.versions)

    def forget_failures(self, serving: Collection[int]) -> None:
        """These versions serve the files on disk: earlier failures are no longer shown."""
        self.failure = ""
        for version, status in list(self.versions.items()):
            if version in serving:
                status.reason = ""
            elif status.state is ModelReadyState.UNAVAILABLE and status.reason != reason(VersionEvent.UNLOADED):
                del self.versions[version]

    def unwant(self) -> bool:
        """Note that an unload was requested. Returns whether there is something to unload."""
        was_wanted = self.wanted
        self.wanted = self.asked = False
        self.problem = ""
        if was_wanted:
            self.failure = ""
        return was_wanted

    def unload(self, version: int) -> VersionStatus:
        """The version accepts no further requests. Pass the result to `finish_unload`."""
        status = self.versions[version]
        status.on(VersionEvent.UNLOAD)
        return status

    def serve(self, versions: Iterable[int]) -> None:
        """An ensemble is made from the models of its steps; `versions` are those that did not serve before."""
        self.wanted, self.problem = True, ""
        for version in versions:
            status = self.versions[version] = VersionStatus()
            status.on(VersionEvent.LOAD)
            status.on(VersionEvent.LOADED)

    def withdraw(self, problem: str) -> None:
        """An ensemble cannot serve. `problem` is why its steps' models do not fit, "" if one is missing.

        The server stays ready: unloading a step's model must not take the whole server out of service.
        """
        self.wanted, self.problem = bool(problem), problem

    def entries(
        self, name: str, serving: Mapping[int, Health], *, is_duplicate: bool = False
    ) -> Iterator[ModelIndexEntry]:
        """The model's entries in the index. `is_duplicate`: it is in several repositories."""
        if not self.versions:
            failure = SEVERAL_REPOSITORIES if is_duplicate else self.failure
            yield ModelIndexEntry(name, "", ModelReadyState.UNAVAILABLE if failure else None, failure)
        for version, status in sorted(self.versions.items()):
            yield self._entry(name, version, status, serving.get(version))

    def _entry(self, name: str, version: int, status: VersionStatus, health: Health | None) -> ModelIndexEntry:
        if self.problem and status.state is ModelReadyState.UNAVAILABLE:
            return ModelIndexEntry(name, str(version), status.state, self.problem)
        if health is None:
            return ModelIndexEntry(name, str(version), status.state, status.reason)
        refusal = health.refusal
        if refusal is None or status.state is not ModelReadyState.READY:
            return ModelIndexEntry(name, str(version), status.state, status.reason, health.workers)
        text = f"{refusal.code.value}: {refusal.message}"
        return ModelIndexEntry(name, str(version), ModelReadyState.UNAVAILABLE, text, health.workers)


def should_serve(entry: ModelIndexEntry) -> bool:
    """Whether a version serves or has failed; False for versions that were unloaded or never loaded."""
    return entry.state is not None and entry.reason != reason(VersionEvent.UNLOADED)


def finish_unload(status: VersionStatus) -> bool:
    """Note that an unloaded version has nothing in flight. Returns whether it was being unloaded."""
    if status.state is not ModelReadyState.UNLOADING:
        return False
    status.on(VersionEvent.UNLOADED)
    return True


def _cause(version: int, error: LoadError) -> InferenceError:
    """The error of a version in the index. A version that did not fail itself refers to the one that failed."""
    if not isinstance(error, VersionError) or version == error.version:
        return error
    return InferenceError(error.code, f"not loaded because version {error.version} failed: {error.message}")
