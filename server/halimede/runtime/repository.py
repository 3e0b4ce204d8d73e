"""The model repositories on disk: their models, and the configuration and labels of each model. Blocking.

Links are trusted: a person who can make a link in a repository can also put a model there. So a model, a version and
its files may be links to any place, which large weights and mounted volumes need. A path in a *configuration* must stay
in the model's directory as it is written (`validate`). If the server shows a file's content to clients, as it does with
labels, its links must also stay in the model's real directory or its repository.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from halimede.backends.access import denied, repository_problem
from halimede.core.config.files import config_file, config_name_problem
from halimede.core.config.names import model_name_problem
from halimede.core.repository.file_kinds import is_served_alone
from halimede.core.repository.layout import (
    NOT_MODELS,
    duplicate_problem,
    is_model_directory,
    is_source_name,
    is_version,
    no_model_warnings,
    version_directories,
)
from halimede.core.repository.model_files import well_known_name
from halimede.core.types.error import clip, invalid
from halimede.runtime.file_look import look_at

MAX_CONFIG_BYTES = 4 << 20
MAX_LABELS_BYTES = 16 << 20
MAX_LABELS = 1 << 20
"""For all outputs of a model together, like MAX_LABELS_BYTES, because each label is a separate object in memory."""
MAX_FILES = 100_000
"""Maximum number of files and directories of one model, so that no load is busy for hours."""
MAX_FILES_ELSEWHERE = 1_000
"""How many files and directories elsewhere, to which links of a model lead, are looked at for changes. A link to `/`
must not keep a load busy."""

READ_LIMIT_SECS = 30.0
"""How long a file system or a store may give no answer. Then the read fails, and its thread is left behind."""

NOT_THERE = "it is not there"

_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


@dataclass(slots=True)
class ReadProgress:
    """How far a read of a repository has come. Only the thread that reads changes it; the event loop watches it."""

    steps: int = 0
    """Goes up with each answer of the file system, so that a long read differs from one that hangs."""
    repository: str = ""
    """The repository that is being read."""
    has_own_limit: bool = False
    """Whether the read ends what hangs by itself now, as a fetch from a store does."""

    def begin(self, repository: object) -> None:
        """This repository is read next."""
        self.steps += 1
        self.repository = str(repository)


UNWATCHED = ReadProgress()
"""For reads whose progress is not watched."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model directory of a repository. `files` are the names in each version directory. `fingerprint` changes with
    every change below the directory, `sources` only with changes to files that people put there. `artifact` is set for
    a single file that is served without a directory.
    `config_name` is the name under `configs/` of the configuration to prefer; "" for none."""

    name: str
    repository: Path
    directory: Path
    versions: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    fingerprint: str = ""
    sources: str = ""
    warnings: tuple[str, ...] = ()
    artifact: Path | None = None
    config_name: str = ""

    def first_files(self) -> tuple[str, ...]:
        """The files of the first version directory, the only one that decides the backend."""
        return self.versions[min(self.versions)] if self.versions else ()


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of the repositories: the names of all models, sorted; a warning for each entry that cannot be one;
    and the names that are in several repositories, with the text for the log."""

    names: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = field(default_factory=dict)


class DuplicateModelError(LookupError):
    """The name is in several repositories, so that it is not clear which model it means."""


class ModelRepository:
    """Several repository directories, or one model file."""

    def __init__(self, roots: tuple[Path, ...], model_file: Path | None = None, config_name: str = "") -> None:
        """`config_name` is the value of `--model-config-name`. Raises INVALID_ARG if it is not a plain name."""
        if config_name and (problem := config_name_problem(config_name)):
            raise invalid(problem)
        self._config_name = config_name
        # A repository that is given twice, by any path, would make a duplicate of each of its models.
        distinct: dict[str, Path] = {}
        for root in roots:
            distinct.setdefault(os.path.realpath(root), root)
        self._roots = tuple(distinct.values())
        self._file = _file_entry(model_file) if model_file is not None else None
        self._file_path = model_file

    def close(self) -> None:
        """Free what the repository holds; no effect for directories. Blocks."""

    def unreadable(self, progress: ReadProgress = UNWATCHED) -> dict[Path, str]:
        """The repositories that cannot be read now, with the reason."""
        problems: dict[Path, str] = {}
        for root in self._roots:
            progress.begin(root)
            if problem := repository_problem(root):
                problems[root] = problem
        return problems

    def scan(self, progress: ReadProgress = UNWATCHED) -> Listing:
        """The current content. An entry that cannot be read gives one warning and does not affect the others."""
        if self._file is not None:
            return Listing((self._file.name,))
        found: dict[str, list[str]] = {}
        warnings: list[str] = []
        unreadable = self.unreadable(progress)
        for root in self._roots:
            if root in unreadable:
                continue
            progress.begin(root)
            try:
                names = _names(root)
            except OSError as error:
                warnings.append(f"repository '{root}' cannot be read: {error}")
                continue
            ignored: list[str] = []
            models: list[str] = []
            for name in sorted(names):
                progress.steps += 1
                if name.startswith(".") or name in NOT_MODELS:
                    continue
                if problem := model_problem(root, name):
                    ignored.append(f"ignoring {name!a} in '{root}': {problem}")
                    continue
                models.append(name)
                found.setdefault(name, []).append(str(root / name))
            if models or self._fills_later(root):
                warnings += ignored
            else:
                # Absolute, because the text may name the folder above.
                warnings += no_model_warnings(Path(os.path.abspath(root)), names, ignored)
        duplicates = {name: duplicate_problem(paths) for name, paths in found.items() if len(paths) > 1}
        return Listing(tuple(sorted(found)), tuple(warnings), duplicates)

    def _fills_later(self, root: Path) -> bool:  # noqa: ARG002  # for repositories of another kind
        """Whether models are put into this repository only when a client asks for them."""
        return False

    def find(self, name: str, progress: ReadProgress = UNWATCHED) -> ModelEntry:
        """The model's directory. Raises LookupError for no directory or several ones, and OSError."""
        if self._file is not None and self._file_path is not None and name == self._file.name:
            progress.begin(self._file_path)
            return _file_entry(self._file_path)
        if problem := model_name_problem(name):
            raise LookupError(problem)
        if name.startswith("."):
            raise LookupError(f"'{clip(name)}' is hidden: a name that begins with '.' is not a model's")
        problems: dict[Path, str | None] = {}
        for root in self._roots:
            progress.begin(root)
            problems[root] = _directory_problem(root / name)
        roots = [root for root, problem in problems.items() if problem is None]
        if not roots:
            raise LookupError(_nowhere(name, problems))
        if len(roots) > 1:
            raise DuplicateModelError(duplicate_problem([str(root / name) for root in roots]))
        progress.begin(roots[0])
        return _entry(name, roots[0], self._config_name, progress)

    def sources(self, name: str) -> str | None:
        """The current `ModelEntry.sources`; None if they cannot be read."""
        try:
            return ModelRepository.find(self, name).sources
        except (OSError, LookupError):
            return None

    def is_gone(self, name: str) -> bool:
        """Whether no repository has an entry of this name. False if one cannot be read: its volume may return."""
        return self._file is None and not any(
            repository_problem(root) or _directory_problem(root / name) != NOT_THERE for root in self._roots
        )


def model_problem(root: Path, name: str) -> str | None:
    """Why an entry of a repository is not a model; None for a model, whether or not it can be loaded."""
    if problem := model_name_problem(name) or _directory_problem(root / name):
        return problem
    try:
        names = _names(root / name)
    except OSError:
        return None  # its load reports why it cannot be read
    if not is_model_directory(names):
        return "there is neither a config.pbtxt nor a version directory, such as '1', in it"
    return None


def check_readable(path: Path) -> None:
    """Raise PermissionError, with the way to fix it, for a file or folder that exists and cannot be read."""
    if problem := denied(path):
        raise PermissionError(problem)


def config_filename(entry: ModelEntry) -> str | None:
    """The configuration's file, relative to the model's directory; None for a model without one.

    Raises ValueError for two files, and PermissionError if `configs/` cannot be read.
    """
    if entry.artifact is not None:
        return None
    if entry.config_name:
        check_readable(entry.directory / "configs")
    # If a broken link counted as a missing configuration, the model would be served with guessed settings.
    return config_file(entry.config_name, lambda name: os.path.lexists(entry.directory / name))


def read_config_text(entry: ModelEntry, filename: str) -> bytes:
    """The text of the configuration. Raises OSError if it cannot be read and ValueError if it is too large."""
    return read_file(entry.directory / filename, MAX_CONFIG_BYTES)


def read_labels(entry: ModelEntry, filenames: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The lines of each output's label file, by output name.

    Raises OSError and ValueError as `read_file` does, and ValueError for a file that is outside the repository or not
    UTF-8, and for too many labels.
    """
    labels: dict[str, tuple[str, ...]] = {}
    left_bytes, left = MAX_LABELS_BYTES, MAX_LABELS
    for output, filename in filenames.items():
        path = _inside(entry, filename)
        content = read_file(path, MAX_LABELS_BYTES)
        left_bytes -= len(content)
        if left_bytes < 0:
            raise ValueError(f"{path}: the label files of a model have more than {MAX_LABELS_BYTES} bytes together")
        try:
            labels[output] = tuple(islice(_lines(content.decode()), left + 1))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
        left -= len(labels[output])
        if left < 0:
            raise ValueError(f"{path}: the outputs of a model have more than {MAX_LABELS} labels together")
    return labels


def _lines(text: str) -> Iterator[str]:
    """Yield the lines one by one: one call of `splitlines` on millions of lines would stop the event loop."""
    at = 0
    for end in _LINE_END.finditer(text):
        yield text[at : end.start()]
        at = end.end()
    if at < len(text):
        yield text[at:]


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes. Raises OSError, and ValueError for any other file."""
    check_readable(path)
    # Without O_NONBLOCK the open of a FIFO waits for a writer that may never come.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes")
    return content


def _inside(entry: ModelEntry, filename: str) -> Path:
    """The real path of a file that the configuration names. Raises ValueError if clients must not see the file.

    They may see files of the repository, because models share files, and of the real directory of a model that is a
    link. The checked path is the opened one: it has no links.
    """
    path = entry.directory / filename
    real = Path(os.path.realpath(path))
    if not any(real.is_relative_to(os.path.realpath(root)) for root in (entry.directory, entry.repository)):
        raise ValueError(f"{path} is a link that leads out of the repository '{entry.repository}'; copy the file there")
    return real


def _directory_problem(path: Path) -> str | None:
    """Why this is not a directory that can be reached; None for a directory."""
    try:
        return None if stat.S_ISDIR(path.stat().st_mode) else "it is not a directory"
    except FileNotFoundError:
        return "it is a link that leads nowhere" if os.path.lexists(path) else NOT_THERE
    except OSError as error:
        return "it is a loop of links" if error.errno == errno.ELOOP else f"it cannot be read: {denied(path) or error}"


def _nowhere(name: str, problems: Mapping[Path, str | None]) -> str:
    """Why no repository has the model: the problems of the entries with its name, if any.

    Clients get the text, whatever name they ask for, so it does not say where the repositories are.
    """
    there = [f"'{clip(name)}': {problem}" for problem in problems.values() if problem != NOT_THERE]
    return "; ".join(there) or f"there is no directory '{clip(name)}' in a repository"


def is_model_file(path: Path) -> bool:
    """Whether this can be served alone: a file, or a directory that is the file of a model, such as a SavedModel."""
    return is_served_alone(_names(path)) if path.is_dir() else path.is_file()


def _file_entry(file: Path) -> ModelEntry:
    path = file.resolve()
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in path.stem) or "model"
    info = path.stat()
    look = look_at(path)
    wanted = well_known_name(path.name, look) if look is not None else ""
    fingerprint = f"{info.st_mtime_ns}-{info.st_size}"
    return ModelEntry(
        name,
        path.parent,
        path.parent,
        {1: (wanted or path.name,)},
        fingerprint=fingerprint,
        sources=fingerprint,
        artifact=path,
    )


def _entry(name: str, root: Path, config_name: str, progress: ReadProgress) -> ModelEntry:
    directory = root / name
    check_readable(directory)
    children: list[str] = []
    warnings: list[str] = []
    for child in sorted(_names(directory)):
        progress.steps += 1
        if is_version(child):
            # Without this error an older version would be served instead of the one that cannot be read.
            check_readable(directory / child)
        problem = _directory_problem(directory / child)
        if problem is None:
            children.append(child)
        elif is_version(child):
            warnings.append(f"ignoring version '{child}': {problem}")
    versions, ignored = version_directories(children)
    fingerprint, sources = _fingerprints(directory, progress)
    return ModelEntry(
        name,
        root,
        directory,
        {version: tuple(sorted(_names(directory / str(version)))) for version in versions},
        fingerprint=fingerprint,
        sources=sources,
        warnings=(*ignored, *warnings),
        config_name=config_name,
    )


def _names(directory: Path) -> list[str]:
    with os.scandir(directory) as found:
        return [entry.name for entry in found]


def _fingerprints(directory: Path, progress: ReadProgress) -> tuple[str, str]:
    """The fingerprint and the sources of a directory.

    The fingerprint changes with the path, size or modification time of any file in it. The sources leave out files that
    editors and interpreters make: hidden names, names that end in `~`, `__pycache__`, and the times of directories.
    Of what links to directories elsewhere lead to, MAX_FILES_ELSEWHERE files count, and no part of a link's directory
    if it has more. Raises LookupError for too many files.
    """
    everything, sources = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    left_elsewhere = MAX_FILES_ELSEWHERE
    for found in _files_below(directory, MAX_FILES, progress, takes_versions=True):
        below = [found]
        if found.leads_elsewhere:
            try:
                elsewhere = list(_files_below(directory / found.name, left_elsewhere, progress, found.is_source))
                left_elsewhere -= len(elsewhere)
                below += elsewhere
            except (LookupError, OSError):
                left_elsewhere = 0
        for each in below:
            size, time = each.info.st_size, each.info.st_mtime_ns
            what = f"{each.name}\0{size}\0{time}\0".encode("utf-8", "surrogateescape")
            everything.update(what)
            if each.is_source and not stat.S_ISDIR(each.info.st_mode):
                sources.update(what)
    return everything.hexdigest(), sources.hexdigest()


@dataclass(frozen=True, slots=True)
class _File:
    """A file or directory below another one, with its path from there. `info` is that of the target of a link."""

    name: str
    info: os.stat_result
    is_source: bool
    leads_elsewhere: bool = False


def _files_below(
    directory: Path, limit: int, progress: ReadProgress, is_source: bool = True, *, takes_versions: bool = False
) -> Iterator[_File]:
    """What is below a directory, without what is below links that lead out of it.

    With `takes_versions`, version directories that are links belong to it. Links within it are followed, as in Triton,
    and each real directory is read once, so that a loop of links ends. Raises LookupError for more than `limit` files.
    """
    top = directory.stat()
    seen = {(top.st_dev, top.st_ino)}
    roots = [os.path.realpath(directory)]
    waiting = [(directory, "", is_source)]
    count = 0
    while waiting:
        path, prefix, is_source = waiting.pop()
        try:
            names = sorted(_names(path))
        except PermissionError:
            continue  # a model that needs it fails with an error of its own
        for name in names:
            child = path / name
            count += 1
            progress.steps += 1
            if count > limit:
                raise LookupError(f"there are more than {limit} files below '{directory}'")
            try:
                info = child.stat()
            except OSError:
                continue  # a dangling link changes nothing that can be served
            counts = is_source and is_source_name(name)
            is_new = stat.S_ISDIR(info.st_mode) and (info.st_dev, info.st_ino) not in seen
            leads_elsewhere = False
            if is_new and child.is_symlink():
                real = os.path.realpath(child)
                if takes_versions and not prefix and is_version(name):
                    roots.append(real)
                leads_elsewhere = not any(Path(real).is_relative_to(root) for root in roots)
            yield _File(prefix + name, info, counts, leads_elsewhere)
            if is_new and not leads_elsewhere:
                seen.add((info.st_dev, info.st_ino))
                waiting.append((child, f"{prefix}{name}/", counts))
