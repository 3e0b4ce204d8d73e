"""Find backends: installed ones by the entry point group `halimede.backends`, of this and of other distributions, and
backends written like python models, `<backend directory>/<name>/model.py`."""

import os
import threading
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import cast

from halimede.backends.api import Backend
from halimede.backends.python.backend import PythonBackend
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, internal, invalid, unsupported

GROUP = "halimede.backends"
DEFAULT_BACKEND_DIRECTORY = Path("/opt/tritonserver/backends")

# Backends import parts of each other. Two threads that import a package and a module in it at once can fail with
# importlib's _DeadlockError, which is then the model's.
_importing = threading.Lock()


def backend_names() -> tuple[str, ...]:
    """The names of the installed backends, whether or not their runtimes are installed."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def find_backend(name: str, directory: Path | None = None) -> Backend:
    """The backend of that name; `directory` is `--backend-directory`.

    An installed backend takes precedence over one in the directory. Raises INVALID_ARG for an unknown name,
    INTERNAL for a broken backend.
    """
    backend = installed_backend(name)
    if backend is not None:
        return backend
    program = _program(name, directory) if directory is not None else None
    if program is None:
        raise invalid(f"unable to find backend library for backend '{clip(name)}'; {_installed()}")
    return PythonBackend(program)


@cache
def installed_backend(name: str) -> Backend | None:
    """The installed backend, one shared object; None if no distribution has it."""
    # Sorted by value: if two distributions name the same backend, every start must choose the same one.
    found = sorted(entry_points(group=GROUP, name=name), key=lambda point: point.value)
    if not found:
        return None
    try:
        with _importing:
            return cast(Backend, found[0].load()())
    except Exception as error:
        raise internal(
            f"unable to load backend '{name}' ({found[0].value}): {type(error).__name__}: {error}"
        ) from error


def _program(name: str, directory: Path) -> Path | None:
    """The program of a backend in the backend directory; None if the name is not a single path component."""
    if not native_library(name):
        return None
    folder = directory / name
    # Triton looks for the library first, and then ignores the program beside it.
    library = native_library(name)
    if os.path.exists(folder / library):
        raise native_library_error(name, library)
    program = folder / "model.py"
    return program if os.path.isfile(program) else None


def native_library(name: str) -> str:
    """The file name of a backend that is a native library, as Triton's are; "" if the name is no path component."""
    return "" if name in ("", ".", "..") or "/" in name or "\0" in name else f"libtriton_{name}.so"


def native_library_error(name: str, library: str, hint: str = "") -> InferenceError:
    return unsupported(
        f"backend '{clip(name)}' is a native library ({clip(library)}), which cannot be run here{hint}; {_installed()}"
    )


def _installed() -> str:
    return f"the backends that are installed: {', '.join(backend_names())}"
