"""Check the files of a model before its backend gets them: of the right kind, complete, allowed. Blocking.

The server itself looks only at a few bytes of each file: see `file_look`.
"""

from pathlib import Path

from halimede.backends.access import denied
from halimede.backends.api import Backend, ModelSource, Unpickles
from halimede.backends.discover import installed_backend, native_library, native_library_error
from halimede.core.config.model_config import ModelConfig
from halimede.core.repository.layout import DEFAULT_ARTIFACTS
from halimede.core.repository.model_files import (
    NO_MODELS,
    file_problem,
    no_backend_problem,
    pickle_problem,
    unpickled,
    well_known_name,
)
from halimede.core.types import internal, invalid, unsupported
from halimede.runtime.file_look import look_at
from halimede.runtime.repository import ModelEntry

MOST_CHECKED = 100
"""Maximum number of files of a version that may be pickles and are looked at."""


def check_alone(entry: ModelEntry) -> None:
    """Raise INVALID_ARG if the model is a single file that no backend loads."""
    if entry.artifact is None:
        return
    look = look_at(entry.artifact)
    if look is not None and not well_known_name(entry.artifact.name, look):
        raise invalid(no_backend_problem(entry.artifact.name, look))


def check_native(entry: ModelEntry, backend: str) -> None:
    """Raise UNSUPPORTED if the model brings a native library as its backend, which Triton would load."""
    library = native_library(backend)
    if entry.artifact is not None or not library:
        return
    paths = [entry.directory / str(version) for version, files in sorted(entry.versions.items()) if library in files]
    if (entry.directory / library).exists():
        paths.append(entry.directory)
    if paths:
        hint = ""
        if installed_backend(backend) is not None:
            hint = f"; without the file the installed backend '{backend}' runs the model"
        raise native_library_error(backend, str(paths[0] / library), hint)


def check_artifact(backend: Backend, config: ModelConfig, where: ModelSource, *, allow_pickle: bool) -> None:
    """Raise InferenceError if the file cannot be read, is not of a kind that the backend loads, or is a pickle that is
    not allowed."""
    # Tried here for a clear message, because runtimes only report "error 13".
    if problem := denied(where.artifact):
        raise internal(problem)
    name, patterns = config.backend, unpickles(backend)
    for file in _model_files(name, where.artifact):
        look = look_at(file)
        # With `runtime` the backend takes other files than usual, such as weights for a program.
        is_usual = not config.runtime or (look is not None and look.kind in NO_MODELS)
        if look is not None and is_usual and (problem := file_problem(name, file.name, look, patterns)):
            raise invalid(f"model '{where.name}': {problem}")
    for file in () if allow_pickle else _perhaps_pickles(where, patterns):
        look = look_at(file)
        if look is not None and (problem := pickle_problem(name, file.name, look, patterns)):
            raise unsupported(f"model '{where.name}': {problem}")


def _model_files(backend: str, artifact: Path) -> list[Path]:
    """The artifact, or the backend's well-known files in it if it is a version directory."""
    if not artifact.is_dir():
        return [artifact]
    inside = [artifact / each.filename for each in DEFAULT_ARTIFACTS if each.backend == backend]
    return [file for file in inside if file.exists()] or [artifact]


def _perhaps_pickles(where: ModelSource, patterns: tuple[str, ...]) -> list[Path]:
    """The artifact, and the files in its directory, or in itself, that the backend may unpickle as well."""
    artifact = where.artifact
    if artifact.is_dir():
        return _unpickled_in(artifact, patterns)
    # A file that is served alone has no version directory.
    beside = _unpickled_in(artifact.parent, patterns) if artifact.parent != where.model_directory else []
    return [artifact, *beside]


def _unpickled_in(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    if not patterns or not directory.is_dir():
        return []
    found = sorted(each for each in directory.iterdir() if unpickled(each.name, patterns))
    if len(found) > MOST_CHECKED:
        raise unsupported(f"'{directory}' has more than {MOST_CHECKED} files that may be pickles, and none is allowed")
    return found


def unpickles(backend: Backend) -> tuple[str, ...]:
    """Patterns of the names of files that the backend unpickles."""
    return backend.unpickles if isinstance(backend, Unpickles) else ()
