"""The model repositories on disk: the models there are, and one model's configuration and labels. Blocking."""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from halimede.core.repository.layout import duplicate_reason, model_name_problem, version_directories
from halimede.core.types.error import clip

log = logging.getLogger(__name__)

CONFIG_NAME = "config.pbtxt"
MAX_CONFIG_BYTES = 16 << 20


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

    def names(self) -> list[str]:
        """The names of all models that there are, sorted. What cannot be a model is warned of and left out."""
        if self._file is not None:
            return [self._file.name]
        found: set[str] = set()
        for root in self._roots:
            try:
                names = _names(root)
            except OSError as error:
                log.warning("repository '%s' cannot be read: %s", root, error)
                continue
            for name in names:
                if name.startswith(".") or not (root / name).is_dir():
                    continue
                if problem := model_name_problem(name):
                    log.warning("ignoring %s in '%s': %s", ascii(name), root, problem)
                    continue
                found.add(name)
        return sorted(found)

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
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(text) > MAX_CONFIG_BYTES:
        raise ValueError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    return text


def read_labels(entry: ModelEntry, filenames: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The lines of each output's label file, by output name."""
    return {
        output: tuple((entry.directory / filename).read_text("utf-8").splitlines())
        for output, filename in filenames.items()
    }


def _file_entry(file: Path) -> ModelEntry:
    path = file.resolve()
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in path.stem) or "model"
    stat = path.stat()
    return ModelEntry(
        name,
        path.parent,
        {1: (f"model{path.suffix}",)},
        fingerprint=f"{stat.st_mtime_ns}-{stat.st_size}",
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
    as Triton does, each real directory once, so that a loop of links ends."""
    digest = hashlib.blake2b(digest_size=16)
    seen: set[tuple[int, int]] = set()

    def walk(path: Path, prefix: str) -> None:
        stat = path.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            return
        seen.add((stat.st_dev, stat.st_ino))
        for name in sorted(_names(path)):
            child = path / name
            try:
                info = child.stat()
            except OSError:
                continue  # a dangling link changes nothing that can be served
            digest.update(f"{prefix}{name}\0{info.st_size}\0{info.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
            if child.is_dir():
                walk(child, f"{prefix}{name}/")

    walk(directory, "")
    return digest.hexdigest()
