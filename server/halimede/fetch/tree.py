"""What a store lists, on its way to files on disk: keys are other people's text. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from halimede.fetch.faults import Exit, FetchError
from halimede.fetch.uri import path_problem

MAX_FILES = 100_000
MAX_NAMED = 5
"""Keys that an error names; it says how many more there are."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at its path below the URI. `validator` changes with its content, "" where the store gives none; `size` is
    in bytes, None where the store does not say."""

    path: str
    size: int | None
    validator: str = ""


def safe_tree(listed: Iterable[RemoteFile], where: str) -> tuple[RemoteFile, ...]:
    """The files, sorted by path, without the empty objects that stores have in the place of folders.

    NOT_A_MODEL where a key could not be a file below one folder, or where there are too many.
    """
    files: dict[str, RemoteFile] = {}
    problems: list[str] = []
    for each in listed:
        if len(files) == MAX_FILES:
            raise FetchError(
                Exit.NOT_A_MODEL, f"{where} holds more than {MAX_FILES} objects: right is one model's folder"
            )
        if not each.path:
            continue  # the folder's own marker
        if problem := path_problem(each.path):
            problems.append(f"{_quoted(each.path)} {problem}")
        elif each.path in files:
            problems.append(f"{_quoted(each.path)} is there twice")
        else:
            files[each.path] = each
    folders = {folder for path in files for folder in _parents(path)}
    for folder in sorted(folders & files.keys()):
        if files[folder].size == 0:
            del files[folder]
        else:
            problems.append(f"{_quoted(folder)} is both a file and a folder")
    if problems:
        raise FetchError(Exit.NOT_A_MODEL, f"{where} has objects that cannot be files: {named(problems, '; ')}")
    return tuple(files[path] for path in sorted(files, key=str.encode))


def named(items: Iterable[str], separator: str = ", ") -> str:
    """The first of them, and how many more there are."""
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
