"""From a model directory to loaded backend models: everything of a load that blocks. Runs on a load thread.

The order: read the configuration, find the backend, let it complete the configuration from the model file, fill
defaults, check the result whole, then load each version that the policy selects. Whatever is wrong is raised as one
InferenceError that names every problem.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from halimede.backends.api import Backend, BackendModel, ModelSource
from halimede.backends.discover import find_backend
from halimede.core.config.explain import DEFAULT, Stage
from halimede.core.config.files import CONFIG_NAME
from halimede.core.config.instances import completed_groups, plan_instances
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import PROBLEM_LIMIT, ParsedConfig, locate, read_config
from halimede.core.config.support import check_support
from halimede.core.config.validate import apply_defaults, validate
from halimede.core.config.versions import select_versions
from halimede.core.inventory import Inventory
from halimede.core.repository.layout import detect_backend
from halimede.core.types import ErrorCode, InferenceError, Placement, Problem
from halimede.runtime.repository import ModelEntry, config_filename, read_config_text, read_labels

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a load depends on beside the model itself."""

    inventory: Inventory
    backend_config: Mapping[str, Mapping[str, str]]
    autocomplete: bool

    def of_backend(self, name: str) -> dict[str, str]:
        """The `--backend-config` settings of one backend over the global ones."""
        return {**self.backend_config.get("", {}), **self.backend_config.get(name, {})}


@dataclass(frozen=True, slots=True)
class PreparedVersion:
    version: int
    config: ModelConfig
    model: BackendModel
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """All selected versions of a model, loaded, without instances yet."""

    labels: Mapping[str, tuple[str, ...]]
    versions: tuple[PreparedVersion, ...]
    load_seconds: float


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A complete, checked configuration and the versions to load under it.

    `stages` are the steps from what the file says to it, `locations` the places in the file, and `notes` what in the
    file has no effect.
    """

    config: ModelConfig
    backend: Backend
    versions: tuple[int, ...]
    placements: tuple[Placement, ...]
    labels: Mapping[str, tuple[str, ...]]
    stages: tuple[Stage, ...]
    locations: Mapping[str, tuple[int, int]]
    notes: tuple[Problem, ...]


class ConfigError(InferenceError):
    """The configuration is at fault, before any version could be tried. `problems` are what the message joins."""

    def __init__(self, code: ErrorCode, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(code, message)
        self.problems = problems or (message,)


class NoVersionError(ConfigError):
    """The version policy finds no version to serve."""


class VersionError(InferenceError):
    """One version could not be loaded, and so none of `selected`, the versions that were to be."""

    def __init__(self, version: int, selected: tuple[int, ...], code: ErrorCode, message: str) -> None:
        super().__init__(code, message)
        self.version = version
        self.selected = selected


def plan_model(entry: ModelEntry, options: LoadOptions) -> ModelPlan:
    """Read and complete the configuration and check all of it; ConfigError names every problem.

    VersionError where the model file cannot even be read: that is no fault of the configuration.
    """
    filename, config, locations, notes = _read(entry)
    stages = [Stage(filename, config)]
    try:
        versions = _versions(entry, config)
        origin = _backend_origin(config)
        config = detect_backend(config, entry.name, _first_files(entry))
        stages.append(Stage(origin, config))
        backend = _find_backend(config, versions)
        if options.autocomplete:
            config = _autocompleted(config, backend, source(entry, config, backend, versions[-1], options), versions)
            stages.append(Stage("model file", config))
        artifact = config.default_model_filename or backend.default_model_filename
        config = apply_defaults(config, entry.name, default_model_filename=artifact)
        _raise_problems(entry, filename, locate(validate(config, entry.name), locations))
        for note in notes:
            log.info("model '%s': %s", entry.name, note.message, extra={"model": entry.name})
        placements = plan_instances(
            config,
            options.inventory,
            default_count=backend.default_instance_count,
            backend_gpu=backend.supports_gpu(),
        )
        config = replace(
            config,
            instance_group=completed_groups(
                config,
                options.inventory,
                default_count=backend.default_instance_count,
                backend_gpu=backend.supports_gpu(),
            ),
        )
        stages.append(Stage(DEFAULT, config))
        labels = _labels(entry, config)
    except (ConfigError, VersionError):
        raise
    except InferenceError as error:
        raise ConfigError(error.code, error.message) from error
    except OSError as error:
        raise ConfigError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
    except BaseException as error:
        log.exception("model '%s': its configuration could not be completed", entry.name, extra={"model": entry.name})
        raise ConfigError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}") from error
    return ModelPlan(config, backend, versions, placements, labels, tuple(stages), locations, notes)


def load_model(entry: ModelEntry, options: LoadOptions) -> PreparedModel:
    """Load every selected version, or none: what was loaded is closed again when a later version fails."""
    begun = time.monotonic()
    plan = plan_model(entry, options)
    loaded: list[PreparedVersion] = []
    try:
        for version in plan.versions:
            log.info("loading: %s:%d", entry.name, version, extra={"model": entry.name, "version": version})
            where = source(entry, plan.config, plan.backend, version, options)
            loaded.append(PreparedVersion(version, plan.config, _load(plan, where), plan.placements))
    except VersionError:
        for done in loaded:
            try:
                done.model.close()
            except BaseException:
                about = {"model": entry.name, "version": done.version}
                log.exception("model '%s' version %d: closing failed", entry.name, done.version, extra=about)
        raise
    return PreparedModel(plan.labels, tuple(loaded), time.monotonic() - begun)


def source(entry: ModelEntry, config: ModelConfig, backend: Backend, version: int, options: LoadOptions) -> ModelSource:
    """Where one version of the model lies, for its backend."""
    filename = config.default_model_filename or backend.default_model_filename
    artifact = entry.artifact or entry.directory / str(version) / filename
    return ModelSource(entry.name, version, entry.directory, artifact, options.of_backend(config.backend))


def _load(plan: ModelPlan, where: ModelSource) -> BackendModel:
    try:
        return plan.backend.load(plan.config, where)
    except InferenceError as error:
        raise VersionError(where.version, plan.versions, error.code, error.message) from error
    except BaseException as error:
        about = {"model": where.name, "version": where.version}
        log.exception("model '%s' version %d: the backend failed", where.name, where.version, extra=about)
        text = f"{type(error).__name__}: {error}"
        raise VersionError(where.version, plan.versions, ErrorCode.INTERNAL, text) from error


def _read(
    entry: ModelEntry,
) -> tuple[str, ModelConfig, Mapping[str, tuple[int, int]], tuple[Problem, ...]]:
    """The configuration and its file, the place of each field in the text, and notes on fields without effect."""
    try:
        filename = config_filename(entry)
    except ValueError as error:
        raise ConfigError(ErrorCode.INVALID_ARG, str(error)) from error
    if filename is None:
        return CONFIG_NAME, ModelConfig(), {}, ()
    try:
        text = read_config_text(entry, filename)
    except (OSError, ValueError) as error:
        raise ConfigError(ErrorCode.INTERNAL, f"{filename} cannot be read: {error}") from error
    parsed = read_config(filename, text)
    refusals, notes = check_support(parsed.config)
    problems = [*parsed.problems, *locate((*refusals, *_wrong_as_written(entry, parsed)), parsed.locations)]
    _raise_problems(entry, filename, sorted(problems, key=lambda problem: (problem.line, problem.column)))
    return filename, parsed.config, parsed.locations, locate(notes, parsed.locations)


def _wrong_as_written(entry: ModelEntry, parsed: ParsedConfig) -> list[Problem]:
    """What no completion can put right: problems of fields that the file itself gives.

    Found before the backend has a say, so that one look at a file shows all that is wrong with it.
    """
    config = parsed.config
    # What is left out may come from the model file: of the batch size the most that there is stands in for it.
    completed = replace(config, name=config.name or entry.name, max_batch_size=config.max_batch_size or 2**31 - 1)
    said = {problem.path for problem in (*parsed.problems, *check_support(config)[0])}
    return [p for p in validate(completed, entry.name) if p.path in parsed.locations and p.path not in said]


def _versions(entry: ModelEntry, config: ModelConfig) -> tuple[int, ...]:
    try:
        return select_versions(config.version_policy, tuple(entry.versions), entry.name)
    except InferenceError as error:
        there = ", ".join(str(version) for version in sorted(entry.versions))
        hint = f"there are {there}" if there else f"there is no version directory, such as '{entry.directory / '1'}'"
        raise NoVersionError(error.code, f"{error.message}: {hint}") from error


def _find_backend(config: ModelConfig, versions: tuple[int, ...]) -> Backend:
    try:
        return find_backend(config.backend)
    except InferenceError as error:
        raise VersionError(versions[-1], versions, error.code, error.message) from error


def _labels(entry: ModelEntry, config: ModelConfig) -> Mapping[str, tuple[str, ...]]:
    try:
        return read_labels(entry, {o.name: o.label_filename for o in config.output if o.label_filename})
    except (OSError, ValueError) as error:
        raise ConfigError(ErrorCode.INVALID_ARG, f"a label file cannot be read: {error}") from error


def _raise_problems(entry: ModelEntry, filename: str, problems: Sequence[Problem]) -> None:
    if problems:
        # The text goes to a client and into the index. One more than the limit is a reader's own count of the rest.
        texts = [in_file(entry, filename, problem) for problem in problems[: PROBLEM_LIMIT + 1]]
        if unlisted := len(problems) - len(texts):
            texts.append(f"{unlisted} more problems are not listed")
        raise ConfigError(ErrorCode.INVALID_ARG, "; ".join(texts), tuple(texts))


def in_file(entry: ModelEntry, filename: str, problem: Problem) -> str:
    """The problem's text with file, line and column as compilers write them, and editors follow."""
    path = Path(entry.name) / filename
    return f"{path}:{problem}" if problem.line else f"{path}: {problem}"


def _backend_origin(config: ModelConfig) -> str:
    """What tells the backend, or its platform, where the file leaves one or both of them out."""
    if config.platform:
        return "follows from platform"
    return "follows from backend" if config.backend else "model directory"


def _autocompleted(config: ModelConfig, backend: Backend, where: ModelSource, versions: tuple[int, ...]) -> ModelConfig:
    """The backend's completion, of which Triton takes over these fields and no other."""
    try:
        said = backend.autocomplete(config, where)
    except InferenceError as error:
        raise VersionError(where.version, versions, error.code, error.message) from error
    except BaseException as error:
        log.exception("model '%s': auto-complete failed", where.name, extra={"model": where.name})
        text = f"{type(error).__name__}: {error}"
        raise VersionError(where.version, versions, ErrorCode.INTERNAL, text) from error
    return replace(
        config,
        max_batch_size=said.max_batch_size,
        input=said.input,
        output=said.output,
        dynamic_batching=said.dynamic_batching,
        sequence_batching=said.sequence_batching,
        model_transaction_policy=said.model_transaction_policy,
    )


def _first_files(entry: ModelEntry) -> tuple[str, ...]:
    """The files of the first version directory: there alone the backend is looked for."""
    return entry.versions[min(entry.versions)] if entry.versions else ()
