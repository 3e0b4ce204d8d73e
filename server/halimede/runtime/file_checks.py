"""Check the files of a model before its backend gets them: of the right kind, complete, allowed. Blocking.

The server itself looks only at a few bytes of each file: see `file_look`.
"""

from halimede.backends.access import denied
from halimede.backends.api import Backend, ModelSource, Unpickles
from halimede.backends.discover import installed_backend, native_library, native_library_error
from halimede.core.repository.model_files import (
    file_problem,
    no_backend_problem,
    pickle_problem,
    unpickled,
    well_known_name,
)
from halimede.core.types import ErrorCode, InferenceError
from halimede.runtime.file_look import look_at
from halimede.runtime.repository import ModelEntry

MOST_CHECKED = 100
"""Maximum number of files of a version that are looked at, besides its artifact."""


def check_alone(entry: ModelEntry) -> None:
    """Raise INVALID_ARG if the model is a single file that no backend loads."""
    if entry.artifact is None:
        return
    look = look_at(entry.artifact)
    if look is not None and not well_known_name(entry.artifact.name, look):
        raise InferenceError(ErrorCode.INVALID_ARG, no_backend_problem(entry.artifact.name, look))


def check_native(entry: ModelEntry, backend: str) -> None:
    """Raise UNSUPPORTED if the model brings a native library as its backend, which Triton would load."""
    library = native_library(backend)
    if entry.artifact is not None or not library:
        return
    places = [entry.directory / str(version) for version, files in sorted(entry.versions.items()) if library in files]
    if (entry.directory / library).exists():
        places.append(entry.directory)
    if places:
        hint = ""
        if installed_backend(backend) is not None:
            hint = f"; without the file the installed backend '{backend}' runs the model"
        raise native_library_error(backend, str(places[0] / library), hint)


def check_artifact(backend: Backend, name: str, where: ModelSource, *, allow_pickle: bool) -> None:
    """Raise InferenceError if the file cannot be read, is not of a kind that the backend `name` loads, or is a pickle
    that is not allowed."""
    # Tried here for a clear message, because runtimes only report "error 13".
    if problem := denied(where.artifact):
        raise InferenceError(ErrorCode.INTERNAL, problem)
    look = look_at(where.artifact)
    patterns = unpickles(backend)
    if look is not None and (problem := file_problem(name, where.artifact.name, look, patterns)):
        raise InferenceError(ErrorCode.INVALID_ARG, f"model '{where.name}': {problem}")
    if allow_pickle:
        return
    files = [where.artifact]
    if patterns and where.artifact.is_file():
        beside = sorted(each for each in where.artifact.parent.iterdir() if unpickled(each.name, patterns))
        # The file alone, if it is served without a version directory.
        files += beside[:MOST_CHECKED] if where.artifact.parent != where.model_directory else []
    for file in files:
        look = look_at(file)
        if look is not None and (problem := pickle_problem(name, file.name, look, patterns)):
            raise InferenceError(ErrorCode.UNSUPPORTED, f"model '{where.name}': {problem}")


def unpickles(backend: Backend) -> tuple[str, ...]:
    """Patterns of the names of files that the backend unpickles."""
    return backend.unpickles if isinstance(backend, Unpickles) else ()
