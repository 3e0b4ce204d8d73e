"""From a model directory to loaded backend models: all blocking work of a load. Runs on a load thread.

The order: read the configuration, find the backend, let it complete the configuration from the model file, fill
defaults, check the complete configuration, then load each version that the policy selects. All problems are raised as
one InferenceError.

An ensemble has no backend, so its configuration is not completed and no file of it is loaded. `core.repository.plan`
checks it against its steps' models once these are loaded.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from halimede.backends.api import Backend, BackendModel, Checks, ChoosesIsolation, ModelSource, NamesOptions, Preloads
from halimede.backends.cores import available_cores
from halimede.backends.discover import DEFAULT_BACKEND_DIRECTORY, find_backend
from halimede.backends.python.backend import PythonBackend
from halimede.backends.python.environment import PARAMETER as EXECUTION_ENV_PATH
from halimede.backends.python.environment import default_cache, resolve_environment
from halimede.backends.state_files import read_state_files
from halimede.core.config.batch_io import ignored_batch_settings
from halimede.core.config.batching_options import check_batching_options
from halimede.core.config.defaults import apply_defaults
from halimede.core.config.explain import DEFAULT, Stage
from halimede.core.config.instances import completed_groups, first_device, plan_instances
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import (
    INTRA_OP_THREAD_COUNT,
    ISOLATION,
    PROCESS,
    THREAD,
    bls_timeout_ms,
    check_process_options,
    execution_timeout_ms,
    intra_op_threads,
    isolation_of,
    isolation_on_devices,
    max_concurrency,
    spins,
)
from halimede.core.config.read import PROBLEM_LIMIT, locate, read_json
from halimede.core.config.sequence_plan import sequence_plan
from halimede.core.config.support import check_devices
from halimede.core.config.unknown_options import unknown_parameters
from halimede.core.config.validate import undeclared, validate
from halimede.core.config.versions import select_versions
from halimede.core.inventory import Inventory
from halimede.core.repository.layout import ENSEMBLE_PLATFORM, detect_backend, model_filename
from halimede.core.repository.load_errors import ConfigError, NoModelError, NoVersionError, VersionError
from halimede.core.schedule.policy import NO_HOLD, StartHold
from halimede.core.schedule.strategy import BatchingStrategy
from halimede.core.types import Device, ErrorCode, InferenceError, Placement, Problem, invalid
from halimede.processes.launcher import Launcher
from halimede.runtime.file_checks import check_alone, check_artifact, check_native
from halimede.runtime.isolate import Isolated, runner_of, thread_variables
from halimede.runtime.model_file import raise_problems, read_model_config
from halimede.runtime.repository import ModelEntry, config_filename, read_labels
from halimede.runtime.strategies import find_strategy, make_strategy, strategy_libraries
from halimede.workers.abandon import Abandon
from halimede.workers.supervision.completion import check_model, complete_config
from halimede.workers.supervision.program import Program

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The inputs of a load other than the model itself."""

    inventory: Inventory
    backend_config: Mapping[str, Mapping[str, str]]
    autocomplete: bool
    launcher: Launcher = field(default_factory=Launcher)
    backend_directory: Path = DEFAULT_BACKEND_DIRECTORY
    log_verbose: int = 0
    hold: StartHold = NO_HOLD
    process_per_device: bool = False
    """Whether instances on whole GPUs run in worker processes."""
    allow_pickle: bool = True
    """Whether models may have files that their backends unpickle."""

    def of_backend(self, name: str) -> dict[str, str]:
        """The `--backend-config` settings of one backend over the global ones."""
        return {**self.backend_config.get("", {}), **self.backend_config.get(name, {})}


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    """One version, ready for its instances.

    Instances on threads are made from `model`. For an `isolated` version each process loads the model itself. An
    ensemble has neither. `strategy` and `hold` are for the scheduler.
    """

    version: int
    config: ModelConfig
    model: BackendModel | None
    placements: tuple[Placement, ...]
    isolated: Isolated | None = None
    strategy: BatchingStrategy | None = None
    hold: StartHold = NO_HOLD
    state_files: Mapping[str, bytes] = field(default_factory=dict)
    """The contents of the files with initial states of sequences, by the input names of the states."""

    def close(self) -> None:
        """Free what the instances shared. Blocks; called once, after the last instance is closed."""
        if self.model is not None:
            self.model.close()
        if self.isolated is not None:
            self.isolated.close()


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """All selected versions of a model, without instances yet, and how long their load took."""

    labels: Mapping[str, tuple[str, ...]]
    versions: tuple[PreparedVersion, ...]
    load_seconds: float

    @property
    def config(self) -> ModelConfig:
        """The configuration, which all versions share."""
        return self.versions[0].config

    @property
    def is_ensemble(self) -> bool:
        return self.config.ensemble_scheduling is not None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A complete, checked configuration and the versions to load under it.

    `stages` are the steps from the file's configuration to the complete one. `locations` has the position of each field
    in the file, and `notes` the fields without effect. `warnings` are about the model as a whole. An ensemble has no
    `backend`, no `isolation` and no `placements`.
    """

    config: ModelConfig
    backend: Backend | None
    isolation: str
    versions: tuple[int, ...]
    placements: tuple[Placement, ...]
    labels: Mapping[str, tuple[str, ...]]
    stages: tuple[Stage, ...]
    locations: Mapping[str, tuple[int, int]]
    notes: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    state_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def device(self) -> Device | None:
        """The device of the first instance on a GPU."""
        return next((each.device for each in self.placements if each.device is not None), None)


def plan_model(entry: ModelEntry, options: LoadOptions, abandon: Abandon) -> LoadPlan:
    """Read, complete and check the configuration. Raises ConfigError with every problem.

    Raises VersionError if the model file cannot be read, because that is not a mistake in the configuration.
    """
    filename, config, locations, notes = read_model_config(entry)
    stages = [Stage(filename, config)]
    try:
        versions = _versions(entry, config)
        check_alone(entry)
        origin = _backend_origin(config)
        config = _with_backend(entry, config)
        stages.append(Stage(origin, config))
        if config.ensemble_scheduling is not None or config.platform == ENSEMBLE_PLATFORM:
            return _plan_ensemble(entry, filename, stages, versions, locations, notes)
        with _errors_of(versions[-1], versions):
            check_native(entry, config.backend)
            backend = find_backend(config.backend, options.backend_directory)
        usual = backend.isolation
        if isinstance(backend, ChoosesIsolation):
            usual = backend.isolation_for(options.of_backend(config.backend))
        isolation = isolation_of(replace(config, name=entry.name), usual)
        if isolation == PROCESS:
            check_process_options(replace(config, name=entry.name))
        on_gpu = bool(options.inventory.devices) and backend.supports_gpu()
        device = first_device(config, options.inventory) if on_gpu else None
        for version in versions:
            where = source(entry, config, backend, version, options, device)
            with _errors_of(version, versions):
                check_artifact(backend, config, where, allow_pickle=options.allow_pickle)
        if options.autocomplete:
            where = source(entry, config, backend, versions[-1], options, device)
            complete: Callable[[ModelConfig, ModelSource], ModelConfig] = backend.autocomplete
            if isolation == PROCESS:
                complete = partial(_completed_in_process, backend=backend, options=options, abandon=abandon)
            config = _autocompleted(config, complete, where, versions)
            stages.append(Stage("model file", config))
        artifact = model_filename(config, backend.default_model_filename)
        config = apply_defaults(config, entry.name, default_model_filename=artifact)
        raise_problems(entry, filename, locate(validate(config, entry.name), locations))
        config = _with_groups(config, backend, options.inventory)
        placements = plan_instances(config, options.inventory)
        if any(each.device is not None for each in placements):
            named = replace(config, name=entry.name)
            isolation = isolation_on_devices(
                named, isolation, options.inventory, process_per_device=options.process_per_device
            )
            if isolation == PROCESS:
                check_process_options(named)
        if isolation == THREAD and config.is_decoupled:
            raise invalid(
                f"model '{entry.name}': decoupled models run in processes of their own; "
                f"set parameter '{ISOLATION}' to '{PROCESS}'"
            )
        stages.append(Stage(DEFAULT, config))
        find_strategy(config)
        libraries = strategy_libraries(entry, config, versions, options.backend_directory)
        new = [*check_devices(config, {each.kind for each in placements}), *check_batching_options(config, libraries)]
        if isinstance(backend, NamesOptions):
            new += unknown_parameters(config, backend.parameters)
        if isinstance(backend, PythonBackend):
            new += ignored_batch_settings(config, "a python model takes the requests one by one")
        notes = (*notes, *locate(tuple(new), locations))
        labels = _labels(entry, config)
        sequences = sequence_plan(config)
        # Processes read the files again, but a mistake in them is one in the configuration.
        state_files = {} if sequences is None else read_state_files(sequences, str(entry.directory))
    except (ConfigError, VersionError):
        raise
    except InferenceError as error:
        raise ConfigError(error.code, error.message) from error
    except OSError as error:
        raise ConfigError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
    except BaseException as error:
        log.exception("model '%s': its configuration could not be completed", entry.name, extra={"model": entry.name})
        raise ConfigError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
    warnings = tuple(undeclared(config))
    found = (labels, tuple(stages), locations, notes, warnings, state_files)
    return LoadPlan(config, backend, isolation, versions, placements, *found)


def _plan_ensemble(
    entry: ModelEntry,
    filename: str,
    stages: Sequence[Stage],
    versions: tuple[int, ...],
    locations: Mapping[str, tuple[int, int]],
    notes: tuple[Problem, ...],
) -> LoadPlan:
    """The plan of an ensemble, from its own directory only."""
    config = apply_defaults(stages[-1].config, entry.name)
    raise_problems(entry, filename, locate(validate(config, entry.name), locations))
    stages = (*stages, Stage(DEFAULT, config))
    notes = (*notes, *locate(ignored_batch_settings(config, "an ensemble's steps form the batches"), locations))
    return LoadPlan(config, None, "", versions, (), _labels(entry, config), stages, locations, notes)


def load_model(entry: ModelEntry, options: LoadOptions, abandon: Abandon) -> PreparedModel:
    """Load every selected version, or none: if a version fails, the versions loaded before it are closed."""
    begun = time.monotonic()
    plan = plan_model(entry, options, abandon)
    notes = ("; ".join(note.message for note in plan.notes),) if plan.notes else ()
    for text in (*plan.warnings, *notes):
        log.warning("model '%s': %s", entry.name, text, extra={"model": entry.name})
    loaded: list[PreparedVersion] = []
    try:
        for version in plan.versions:
            log.info("loading: %s:%d", entry.name, version, extra={"model": entry.name, "version": version})
            if plan.backend is None:
                loaded.append(PreparedVersion(version, plan.config, None, ()))
                continue
            where = source(entry, plan.config, plan.backend, version, options)
            if plan.isolation == PROCESS:
                with _errors_of(version, plan.versions):
                    isolated = isolated_version(plan.config, plan.backend, where, len(plan.placements), options)
                made = PreparedVersion(version, plan.config, None, plan.placements, isolated)
            else:
                with _faults_of(where, plan.versions):
                    model = plan.backend.load(plan.config, where)
                made = PreparedVersion(version, plan.config, model, plan.placements, state_files=plan.state_files)
            # Before the strategy is made, so that a failure closes the version.
            loaded.append(made)
            with _faults_of(where, plan.versions):
                loaded[-1] = replace(made, strategy=make_strategy(plan.config), hold=options.hold)
    except BaseException:
        for done in loaded:
            try:
                done.close()
            except BaseException:
                about = {"model": entry.name, "version": done.version}
                log.exception("model '%s' version %d: closing failed", entry.name, done.version, extra=about)
        raise
    return PreparedModel(plan.labels, tuple(loaded), time.monotonic() - begun)


def check_versions(entry: ModelEntry, plan: LoadPlan, options: LoadOptions, abandon: Abandon) -> None:
    """Find the problems of a load without loading the model. Raises VersionError. Blocks.

    A python model's file is imported, but its `initialize` is not called.
    """
    if plan.backend is None:
        return
    for version in plan.versions:
        where = source(entry, plan.config, plan.backend, version, options, plan.device)
        # The completion of the configuration has already imported the last version.
        is_imported = options.autocomplete and version == plan.versions[-1]
        with _faults_of(where, plan.versions):
            if isinstance(plan.backend, Checks) and plan.isolation == PROCESS:
                isolated = isolated_version(plan.config, plan.backend, where, 1, options)
                spec = isolated.spec(Placement(f"{where.name}_0", 0, "CPU"))
                check_model(spec, isolated.program, options.launcher, abandon)
            elif isinstance(plan.backend, Checks):
                plan.backend.check(plan.config, where)
            elif isinstance(plan.backend, PythonBackend) and not is_imported:
                _completed_in_process(plan.config, where, backend=plan.backend, options=options, abandon=abandon)


def source(
    entry: ModelEntry,
    config: ModelConfig,
    backend: Backend,
    version: int,
    options: LoadOptions,
    device: Device | None = None,
) -> ModelSource:
    """The place of one version of the model, for its backend. `device` is that of its first instance on a GPU."""
    if isinstance(backend, PythonBackend):
        device = None  # python models complete their configuration without one
    filename = model_filename(config, backend.default_model_filename, device)
    filenames = config.cc_model_filenames if entry.artifact is None else {}
    artifact = entry.artifact or entry.directory / str(version) / filename
    if isinstance(backend, PythonBackend) and backend.program is not None:
        artifact = backend.program
    settings = options.of_backend(config.backend)
    return ModelSource(
        entry.name, version, entry.directory, artifact, settings, filenames, device, options.allow_pickle
    )


@contextmanager
def _faults_of(where: ModelSource, versions: tuple[int, ...]) -> Iterator[None]:
    """Turn every error of the backend into a VersionError."""
    try:
        yield
    except InferenceError as error:
        raise VersionError(where.version, versions, error.code, error.message) from error
    except BaseException as error:
        about = {"model": where.name, "version": where.version}
        log.exception("model '%s' version %d: the backend failed", where.name, where.version, extra=about)
        raise VersionError(where.version, versions, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error


@contextmanager
def _errors_of(version: int, versions: tuple[int, ...]) -> Iterator[None]:
    """Turn an InferenceError into a VersionError."""
    try:
        yield
    except InferenceError as error:
        raise VersionError(version, versions, error.code, error.message) from error


def _versions(entry: ModelEntry, config: ModelConfig) -> tuple[int, ...]:
    try:
        return select_versions(config.version_policy, tuple(entry.versions), entry.name)
    except InferenceError as error:
        there = ", ".join(str(version) for version in sorted(entry.versions))
        hint = f"there are {there}" if there else f"there is no version directory, such as '{entry.directory / '1'}'"
        raise NoVersionError(error.code, f"{error.message}: {hint}") from error


def _labels(entry: ModelEntry, config: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    try:
        return read_labels(entry, {o.name: o.label_filename for o in config.output if o.label_filename})
    except (OSError, ValueError) as error:
        raise ConfigError(ErrorCode.INVALID_ARG, f"a label file cannot be read: {error}") from error


def _with_backend(entry: ModelEntry, config: ModelConfig) -> ModelConfig:
    """With the backend that the configuration or the files say."""
    try:
        return detect_backend(config, entry.name, entry.first_files())
    except InferenceError as error:
        if config_filename(entry) is not None:
            raise
        raise NoModelError(error.code, error.message) from error


def _with_groups(config: ModelConfig, backend: Backend, inventory: Inventory) -> ModelConfig:
    """With complete instance groups."""
    groups = completed_groups(
        config, inventory, default_count=backend.default_instance_count, backend_gpu=backend.supports_gpu()
    )
    return replace(config, instance_group=groups)


def _backend_origin(config: ModelConfig) -> str:
    """The origin of the backend and the platform, for those that the file leaves out."""
    if config.platform:
        return "follows from platform"
    if config.ensemble_scheduling is not None:
        return "follows from ensemble_scheduling"
    return "follows from backend" if config.backend else "model directory"


def isolated_version(
    config: ModelConfig, backend: Backend, where: ModelSource, instances: int, options: LoadOptions
) -> Isolated:
    """How the version runs in processes. Raises InferenceError if its execution environment cannot be used."""
    threads = intra_op_threads(config, available_cores(), instances)
    environment = thread_variables(threads, asked_for=INTRA_OP_THREAD_COUNT in config.parameters)
    python, found = "", None
    path = config.parameters.get(EXECUTION_ENV_PATH) if isinstance(backend, PythonBackend) else None
    if path is not None and path.string_value:
        found = resolve_environment(path.string_value, where.model_directory, default_cache())
        python, environment = str(found.python), {**environment, **found.environment}
    limits = max_concurrency(config), execution_timeout_ms(config), bls_timeout_ms(config)
    preload = backend.preload(where) if isinstance(backend, Preloads) else ""
    program = Program(python, environment, *limits, spins(config), preload)
    return Isolated(config, where, runner_of(backend), program, threads, options.log_verbose, found)


def _completed_in_process(
    config: ModelConfig, where: ModelSource, *, backend: Backend, options: LoadOptions, abandon: Abandon
) -> ModelConfig:
    """The completion of a backend that runs in processes. The model gets the configuration with defaults."""
    shown = apply_defaults(config, where.name, default_model_filename=where.artifact.name)
    isolated = isolated_version(_with_groups(shown, backend, options.inventory), backend, where, 1, options)
    spec = isolated.spec(Placement(f"{where.name}_0", 0, "CPU" if where.device is None else "GPU", where.device))
    try:
        completed = complete_config(spec, isolated.program, options.launcher, abandon)
    finally:
        isolated.close()
    parsed = read_json(json.dumps(completed))
    if parsed.problems:
        texts = "; ".join(problem.message for problem in parsed.problems[:PROBLEM_LIMIT])
        raise invalid(f"auto_complete_config made an invalid configuration: {texts}")
    return parsed.config


def _autocompleted(
    config: ModelConfig,
    complete: Callable[[ModelConfig, ModelSource], ModelConfig],
    where: ModelSource,
    versions: tuple[int, ...],
) -> ModelConfig:
    """The backend's completion. As in Triton, only these fields are taken from it."""
    try:
        completed = complete(config, where)
    except InferenceError as error:
        raise VersionError(where.version, versions, error.code, error.message) from error
    except BaseException as error:
        log.exception("model '%s': auto-complete failed", where.name, extra={"model": where.name})
        text = f"{type(error).__name__}: {error}"
        raise VersionError(where.version, versions, ErrorCode.INTERNAL, text) from error
    return replace(
        config,
        max_batch_size=completed.max_batch_size,
        input=completed.input,
        output=completed.output,
        dynamic_batching=completed.dynamic_batching,
        sequence_batching=completed.sequence_batching,
        model_transaction_policy=completed.model_transaction_policy,
    )
