"""Import a model's file with the module names and search path that authors expect, and report its errors."""

import contextlib
import importlib.util
import os
import stat
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from halimede.backends.access import denied
from halimede.backends.hosting import Host, WorkerSpec
from halimede.backends.python.utils.errors import bounded, describe, full_traceback
from halimede.core.types import InferenceError, internal

_SPAWNED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spawned")


class ModelErrors:
    """Converts exceptions of a model to errors: the cause for the caller, the traceback for the log."""

    __slots__ = ("_directories", "_host", "_own", "_who")

    def __init__(self, spec: WorkerSpec, host: Host) -> None:
        self._host = host
        self._who = f"model '{spec.model}' version {spec.version} instance '{spec.instance}'"
        # Frames have absolute paths, also if the repository was given as a relative path.
        own = tuple(map(os.path.abspath, (os.path.dirname(spec.artifact), version_directory(spec), spec.repository)))
        self._own = [directory + "/" for directory in own]
        known = {*own, sys.prefix, *sys.path}
        # The longest first, so that of nested directories the longest known prefix is removed from a path.
        self._directories = sorted((path for path in known if len(path) > 1 and os.path.isabs(path)), key=len)[::-1]

    def log(self, doing: str, error: BaseException, note: str = "") -> str:
        """Log the traceback; returns the text of the cause. Both end with the note."""
        # Logging may fail, for example out of memory; the caller's error then has to be enough.
        with contextlib.suppress(Exception):
            self._host.log("ERROR", f"{self._who}: {doing} failed: {full_traceback(error, self._own)}{note}")
        cause = describe(error, self._directories)
        return bounded(f"{cause}; {note}") if note else cause

    def error(self, doing: str, error: BaseException) -> InferenceError:
        """The error of a load."""
        if isinstance(error, InferenceError):
            return error
        text = self.log(doing, error)
        if isinstance(error, PermissionError) and isinstance(error.filename, str):
            # The model itself opened this file. If it failed to write, nothing denies reading.
            problem = denied(Path(error.filename))
            text += f"; {problem}" if problem else ""
        return internal(text)


def version_directory(spec: WorkerSpec) -> str:
    return os.path.join(spec.repository, str(spec.version))


def model_class(spec: WorkerSpec, errors: ModelErrors) -> Any:
    """The TritonPythonModel of the file. InferenceError with the cause."""
    try:
        module = _import_model(spec)
    except BaseException as error:  # noqa: BLE001  a model may raise what it likes, SystemExit too
        raise errors.error("the import of its file", error) from None
    found = getattr(module, "TritonPythonModel", None)
    if found is None:
        raise internal(
            f"AttributeError: module '{module.__name__}' has no attribute 'TritonPythonModel':"
            f" {os.path.basename(spec.artifact)} must have a class of this name"
        )
    if not callable(getattr(found, "execute", None)):
        raise internal(f"Python model {os.path.basename(spec.artifact)} does not implement `execute` method.")
    return found


class _Loader(SourceFileLoader):
    """Compiles the file at each load.

    Python's compiled files have the time of the source in whole seconds and its size. So a reload of a model that was
    changed twice within a second would run the old code.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_model(spec: WorkerSpec) -> ModuleType:
    directory, file = os.path.split(spec.artifact)
    stem, extension = os.path.splitext(file)
    if extension != ".py":
        raise internal(f"Model name must end with '.py'. Model name is \"{file}\".")
    _check_file(spec)
    name = stem
    if _is_same(directory, version_directory(spec)):
        # A package that only has a search path: a search for a package named `1` could find another one.
        package = ModuleType(str(spec.version))
        package.__path__ = [directory]
        package.__package__ = package.__name__
        package.__spec__ = ModuleSpec(package.__name__, None, is_package=True)
        sys.modules[package.__name__] = package
        name = f"{spec.version}.{stem}"
        sys.path += [directory, spec.repository]
    else:
        # The code of a python-based backend is shared by several models.
        sys.path.append(directory)
    # As in Triton, but last, so that files in the server's working directory hide no installed module.
    with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
        sys.path.append(os.getcwd())
    # For processes that the model spawns; this process already has the module.
    sys.path.append(_SPAWNED)
    # Absolute, so that tracebacks and what the model derives from `__file__` do not depend on the working directory.
    loader = _Loader(name, os.path.abspath(spec.artifact))
    module_spec = ModuleSpec(name, loader, origin=loader.path)
    module_spec.has_location = True
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _check_file(spec: WorkerSpec) -> None:
    """InferenceError if the model's file is not there. It names the outermost path that cannot be read."""
    file = os.path.basename(spec.artifact)
    missing = f"Python model file not found: model '{spec.model}' has no {file}"
    paths = {
        f"the repository of model '{spec.model}'": os.path.dirname(spec.repository),
        f"the directory of model '{spec.model}'": spec.repository,
        f"the directory of {file} of model '{spec.model}'": os.path.dirname(spec.artifact),
        f"{file} of model '{spec.model}'": spec.artifact,
    }
    try:
        is_file = stat.S_ISREG(os.stat(spec.artifact).st_mode)
    except OSError:
        for what, path in paths.items():
            try:
                os.stat(path or ".")
            except OSError as error:
                is_missing = path is spec.artifact and isinstance(error, FileNotFoundError)
                text = missing if is_missing else f"{what} cannot be read: {error.strerror}"
                raise internal(text) from error
        raise
    if not is_file:
        raise internal(missing)


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
