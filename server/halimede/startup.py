"""The server's output once its models are loaded: Triton's tables, which scripts and people read."""

import json
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from halimede import __version__
from halimede.backends.api import NamesOptions
from halimede.backends.discover import GROUP, backend_names, find_backend, installed_backend
from halimede.core.config.unknown_options import unknown_settings
from halimede.core.types import InferenceError, ModelIndexEntry, ModelReadyState, ServerMetadata
from halimede.settings import Settings

Rows = list[tuple[str, ...]]

AGENTS = ("Repository Agent", "Path")
BACKENDS = ("Backend", "Path", "Config")
MODELS = ("Model", "Version", "Status")
OPTIONS = ("Option", "Value")


def backend_rows(settings: Settings) -> Rows:
    """Every installed backend, its file, and its `--backend-config`, merged with the settings of all backends."""
    points = {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.value)}
    common = settings.backend_config.get("", {})
    return [
        (name, _path(point), _compact({"cmdline": {**common, **settings.backend_config.get(name, {})}}))
        for name, point in sorted(points.items())
    ]


def unknown_settings_in(settings: Settings) -> list[str]:
    """Warnings of the `--backend-config` settings that no backend has."""
    found: list[str] = []
    for name, given in settings.backend_config.items():
        if not name:
            # Reading the names imports the modules of all backends, which most command lines can do without.
            if unusual := [each for each in given if each != "default-max-batch-size"]:
                found += unknown_settings("", unusual, _all_settings())
            continue
        try:
            backend = find_backend(name, settings.backend_directory)
        except InferenceError as error:
            found.append(f"--backend-config={name},{', '.join(given)} has no effect: {error.message}")
            continue
        if isinstance(backend, NamesOptions):
            found += unknown_settings(name, given, backend.settings)
    return found


def _all_settings() -> tuple[str, ...]:
    names: set[str] = set()
    for name in backend_names():
        try:
            backend = installed_backend(name)
        except InferenceError:
            backend = None  # the load of a model of this backend reports it
        if not isinstance(backend, NamesOptions):
            return ("*",)
        names |= {*backend.settings}
    return tuple(sorted(names))


def model_rows(index: Sequence[ModelIndexEntry]) -> Rows:
    """One row per version in the repository index, with the reason after the state. Models that were never requested
    have no state and no row, because readers look in this table for models that are not READY."""
    return [
        (entry.name, entry.version, f"{entry.state.value}: {entry.reason}" if entry.reason else entry.state.value)
        for entry in index
        if entry.state is not None
    ]


def failed_loads(index: Sequence[ModelIndexEntry]) -> list[str]:
    """Name, version if it has one, and cause of each version that failed to load."""
    return [
        f"{' version '.join(filter(None, (entry.name, entry.version)))}: {entry.reason}"
        for entry in index
        if entry.state is ModelReadyState.UNAVAILABLE and entry.reason
    ]


def termination_message(failures: Sequence[str]) -> str:
    """Why the server does not start, a line for each of `failed_loads`. The operator knows the first words."""
    return "\n".join(f"failed to load {failure}" for failure in failures)


def option_rows(settings: Settings, metadata: ServerMetadata) -> Rows:
    """The server's options, under the names of Triton's table."""
    paths = [(f"model_repository_path[{number}]", str(path)) for number, path in enumerate(settings.model_repository)]
    if settings.model_file is not None:
        paths = [("model_file", str(settings.model_file))]
    return [
        ("server_id", metadata.name),
        ("server_version", metadata.version),
        ("halimede_version", __version__),
        ("server_extensions", " ".join(metadata.extensions)),
        *paths,
        ("model_control_mode", f"MODE_{settings.model_control_mode.name}"),
        ("strict_model_config", str(int(settings.disable_auto_complete_config))),
        ("model_config_name", settings.model_config_name),
        ("rate_limit", "OFF"),
        ("min_supported_compute_capability", ".".join(map(str, settings.min_supported_compute_capability))),
        ("strict_readiness", str(int(settings.strict_readiness))),
        ("drain_delay", f"{settings.drain_delay_secs:g}"),
        ("exit_timeout", f"{settings.exit_timeout_secs:g}"),
        ("cache_enabled", "0"),
    ]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _path(point: EntryPoint) -> str:
    """The backend's file, found without importing it."""
    try:
        spec = find_spec(point.module)
    except ImportError:
        spec = None
    return point.value if spec is None or spec.origin is None else spec.origin
