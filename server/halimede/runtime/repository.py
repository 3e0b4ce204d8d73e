"""The model repositories on disk: the models there are, and one model's configuration and labels. Blocking."""

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from halimede.core.repository.layout import duplicate_reason, model_name_problem, version_directories
from halimede.core.types.error import clip

CONFIG_NAME = "config.pbtxt"
MAX_CONFIG_BYTES = 4 << 20
MAX_LABELS_BYTES = 16 << 20
MAX_FILES = 100_000
"""Files and directories below one model's directory: a link to `/` must not keep a load busy for hours."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model directory as found. `files` are the names inside each version directory, `fingerprint` changes when
    anything below the directory does. `artifact` is set for a single file that is served without a repository."""

    name: str
    directory: Path
    versions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()
    artifact: Path | None = None


class DuplicateModelError(LookupError):
    """The name is in several repositories, and so in none that could be told apart."""


class ModelRepository:
    """Several repository directories, or one model file."""

    def __init__(self, roots: tuple[Path, ...], model_file: Path | None = None) -> None:
        self._roots = roots
        self._file = _file_entry(model_file) if model_file is not None else None

    def scan(self) -> tuple[list[str], list[str]]:
        """The names of all models that there are, sorted, and a warning for each thing that cannot be one."""
        if self._file is not None:
            return [self._file.name], []
        found: set[str] = set()
        warnings: list[str] = []
        for root in self._roots:
            try:
                names = _names(root)
            except OSError as error:
                warnings.append(f"repository '{root}' cannot be read: {error}")
                continue
            for name in names:
                if name.startswith(".") or not (root / name).is_dir():
                    continue
                if problem := model_name_problem(name):
                    warnings.append(f"ignoring {name!a} in '{root}': {problem}")
                    continue
                found.add(name)
        return sorted(found), warnings

    def find(self, name: str) -> ModelEntry:
        """The model's directory as it is now. LookupError when there is none, or more than one; OSError."""
        if self._file is not None and name == self._file.name:
            return self._file
        if problem := model_name_problem(name):
            raise LookupError(problem)
        places = [root / name for root in self._roots if (root / name).is_dir()]
        if not places:
            roots = ", ".join(f"'{root}'" for root in self._roots)
            raise LookupError(f"there is no directory '{clip(name)}' in {roots or 'any repository'}")
        if len(places) > 1:
            raise DuplicateModelError(duplicate_reason(name, [str(place) for place in places]))
        return _entry(name, places[0])


def read_config_text(entry: ModelEntry) -> bytes | None:
    """The model's config.pbtxt; None where there is none. OSError when it cannot be read, ValueError when too large."""
    if entry.artifact is not None:
        return None
    path = entry.directory / CONFIG_NAME
    # A link that leads nowhere is a configuration that is missing, and a model served by guesses instead.
    return read_file(path, MAX_CONFIG_BYTES) if os.path.lexists(path) else None


def read_labels(entry: ModelEntry, filenames: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The lines of each output's label file, by output name. OSError or ValueError as `read_file`, or for no UTF-8."""
    labels: dict[str, tuple[str, ...]] = {}
    for output, filename in filenames.items():
        path = entry.directory / filename
        try:
            labels[output] = tuple(read_file(path, MAX_LABELS_BYTES).decode().splitlines())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    return labels


def read_file(path: Path, limit: int) -> bytes:
    """A small regular file, whole. OSError when it cannot be read, ValueError when it is no file or above `limit`."""
    # Without O_NONBLOCK the open of a FIFO waits for a writer that may never come.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return content


def _file_entry(file: Path) -> ModelEntry:
    path = file.resolve()
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in path.stem) or "model"
    info = path.stat()
    return ModelEntry(
        name,
        path.parent,
        {1: (f"model{path.suffix}",)},
        fingerprint=f"{info.st_mtime_ns}-{info.st_size}",
        artifact=path,
    )


def _entry(name: str, directory: Path) -> ModelEntry:
    children = [child for child in sorted(_names(directory)) if (directory / child).is_dir()]
    versions, warnings = version_directories(children)
    return ModelEntry(
        name,
        directory,
        {version: tuple(sorted(_names(directory / str(version)))) for version in versions},
        fingerprint=_fingerprint(directory),
        warnings=tuple(warnings),
    )


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as found:
        return [entry.name for entry in found]


def _fingerprint(directory: Path) -> str:
    """Changes with any file's path, size or modification time below the directory. Links to directories are followed,
    as Triton does, each real directory once, so that a loop of links ends. LookupError for too many files."""
    digest = hashlib.blake2b(digest_size=16)
    top = directory.stat()
    seen = {(top.st_dev, top.st_ino)}
    waiting = [(directory, "")]
    count = 0
    while waiting:
        path, prefix = waiting.pop()
        for name in sorted(_names(path)):
            child = path / name
            count += 1
            if count > MAX_FILES:
                raise LookupError(f"there are more than {MAX_FILES} files below '{directory}'")
            try:
                info = child.stat()
            except OSError:
                continue  # a dangling link changes nothing that can be served
            digest.update(f"{prefix}{name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISDIR(info.st_mode) and (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                waiting.append((child, f"{prefix}{name}/"))
    return digest.hexdigest()
