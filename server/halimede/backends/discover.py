"""Finds backends: by the entry point group `halimede.backends`, ours and those of any other installed distribution; and
those that are written as python models are, `<backend directory>/<name>/model.py`."""

import os
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from halimede.backends.api import Backend
from halimede.backends.python.backend import PythonBackend
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

GROUP = "halimede.backends"
DEFAULT_BACKEND_DIRECTORY = Path("/opt/tritonserver/backends")


def backend_names() -> tuple[str, ...]:
    """The names of the backends that are installed, whether or not their runtimes are."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def find_backend(name: str, directory: Path | None = None) -> Backend:
    """The backend of that name; `directory` is `--backend-directory`.

    What is installed goes before what lies there. INVALID_ARG when there is none, INTERNAL when it is broken.
    """
    backend = installed_backend(name)
    if backend is not None:
        return backend
    program = _program(name, directory) if directory is not None else None
    if program is None:
        raise InferenceError(
            ErrorCode.INVALID_ARG, f"unable to find backend library for backend '{clip(name)}'; {_installed()}"
        )
    return PythonBackend(program)


@cache
def installed_backend(name: str) -> Backend | None:
    """One object for all who ask; None when no distribution has it."""
    # Sorted by value: two distributions that both name a backend are told apart in the same way on every start.
    found = sorted(entry_points(group=GROUP, name=name), key=lambda point: point.value)
    if not found:
        return None
    try:
        return cast(Backend, found[0].load()())
    except Exception as error:
        raise InferenceError(
            ErrorCode.INTERNAL, f"unable to load backend '{name}' ({found[0].value}): {type(error).__name__}: {error}"
        ) from error


def _program(name: str, directory: Path) -> Path | None:
    """The program of a backend in the backend directory. A name that is not one folder's finds nothing."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        return None
    folder = directory / name
    # Triton, which looks for the library first, runs it and not the program beside it.
    library = f"libtriton_{name}.so"
    if os.path.exists(folder / library):
        raise InferenceError(
            ErrorCode.UNSUPPORTED,
            f"backend '{clip(name)}' is a native library ({clip(library)}), which cannot be run here; {_installed()}",
        )
    program = folder / "model.py"
    return program if os.path.isfile(program) else None


def _installed() -> str:
    return f"the backends that are installed: {', '.join(backend_names())}"
