"""From a store's listing to safe file paths: the keys in a store are untrusted text. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from halimede.fetch.errors import FetchError
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.uri import path_problem

MAX_FILES = 100_000
MAX_NAMED = 5
"""Maximum number of keys that an error names; further ones are counted."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file, by its path below the URI. `validator` changes with its content; "" if the store has none. `size` is in
    bytes; None if the store does not report it."""

    path: str
    size: int | None
    validator: str = ""


def safe_tree(listed: Iterable[RemoteFile], where: str) -> tuple[RemoteFile, ...]:
    """The files, sorted by path, without the empty objects that represent directories in stores.

    NOT_A_MODEL if a key cannot be a file below one directory, or if there are too many files.
    """
    files: dict[str, RemoteFile] = {}
    problems: list[str] = []
    for each in listed:
        if len(files) == MAX_FILES:
            raise FetchError(
                FetchExit.NOT_A_MODEL, f"{where} holds more than {MAX_FILES} objects: use the folder of one model"
            )
        if not each.path or is_litter(each.path):
            continue  # the directory's own marker, or no file of the model
        if problem := path_problem(each.path):
            problems.append(f"{_quoted(each.path)} {problem}")
        elif each.path in files:
            problems.append(f"{_quoted(each.path)} is listed twice")
        else:
            files[each.path] = each
    folders = {folder for path in files for folder in _parents(path)}
    for folder in sorted(folders & files.keys()):
        if files[folder].size == 0:
            del files[folder]
        else:
            problems.append(f"{_quoted(folder)} is both a file and a folder")
    if problems:
        raise FetchError(FetchExit.NOT_A_MODEL, f"{where} has objects that cannot be files: {named(problems, '; ')}")
    return tuple(files[path] for path in sorted(files, key=str.encode))


def is_litter(path: str) -> bool:
    """Whether macOS has put this file beside those of the model."""
    return any(part in ("__MACOSX", ".DS_Store") or part.startswith("._") for part in path.split("/"))


def named(items: Iterable[str], separator: str = ", ") -> str:
    """The first few items, and the number of further ones."""
    items = list(items)
    more = len(items) - MAX_NAMED
    return separator.join(items[:MAX_NAMED]) + (f"{separator}and {more} more" if more > 0 else "")


def _quoted(key: str) -> str:
    return ascii(key if len(key) <= 100 else key[:100] + "...")


def _parents(path: str) -> Iterable[str]:
    end = path.find("/")
    while end != -1:
        yield path[:end]
        end = path.find("/", end + 1)
