"""Unpack an archive of a directory into an empty directory. The contents of archives are untrusted.

Only files and directories are created. A link becomes a second name (a hard link) of its target, which must be a file
of the same archive; a link to any other place is never made. Devices, absolute paths, `..`, too many files
and too many bytes are errors.
"""

import os
import posixpath
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol, Self

from halimede.fetch.errors import FetchError, cause_of
from halimede.fetch.layout import how_to_pack
from halimede.fetch.tree import MAX_FILES, is_litter
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.uri import path_problem

MAX_RATIO = 50
"""Maximum compression ratio: weights hardly compress, so a higher ratio means an attempt to fill the disk."""
ALWAYS_BYTES = 64 << 20
"""An archive of any size may unpack to this many bytes."""
PIECE_BYTES = 1 << 20


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unpack(archive: Path, folder: Path, where: str, *, max_files: int = MAX_FILES) -> None:
    """Unpack the archive. NOT_A_MODEL if it is incomplete, not an archive, or must not be unpacked."""
    limit = max(archive.stat().st_size * MAX_RATIO, ALWAYS_BYTES)
    unpacking = _Unpacking(folder, where, limit, max_files)
    try:
        if archive.name.lower().endswith(".zip"):
            _unzip(archive, unpacking)
        else:
            _untar(archive, unpacking)
        unpacking.make_links()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        text = f"{where} is not a complete archive: {cause_of(error)}; {how_to_pack(where)}"
        raise FetchError(FetchExit.NOT_A_MODEL, text) from None


class _Member(tarfile.TarInfo):
    """A header with a limit for its extension, which is read into memory whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _EXTENSIONS and member.size > MAX_EXTENSION_BYTES:
            raise tarfile.ReadError
        return member


_EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
MAX_EXTENSION_BYTES = 1 << 20


def _untar(archive: Path, unpacking: "_Unpacking") -> None:
    with tarfile.open(archive, "r|gz", tarinfo=_Member) as tar:
        for member in tar:
            if is_litter(member.name):
                unpacking.skip(member.size)
            elif member.isdir():
                unpacking.folder(member.name)
            elif member.isreg():
                content = tar.extractfile(member)
                if content is None:
                    raise tarfile.TarError
                unpacking.file(member.name, content)
            elif member.issym():
                unpacking.link(member.name, posixpath.join(posixpath.dirname(member.name), member.linkname))
            elif member.islnk():
                unpacking.link(member.name, member.linkname)
            else:
                raise unpacking.refused(member.name, "is a device or a pipe")


def _unzip(archive: Path, unpacking: "_Unpacking") -> None:
    with zipfile.ZipFile(archive) as opened:
        unpacking.check_count(len(opened.filelist))
        for member in opened.infolist():
            mode = member.external_attr >> 16
            if is_litter(member.filename):
                continue
            if member.is_dir():
                unpacking.folder(member.filename)
            elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise unpacking.refused(member.filename, "is a link or a device")
            else:
                with opened.open(member) as content:
                    unpacking.file(member.filename, content)


class _Unpacking:
    """One archive being unpacked into a directory that no other process writes to."""

    def __init__(self, folder: Path, where: str, limit_bytes: int, max_files: int) -> None:
        self._folder = folder
        self._where = where
        self._limit_bytes = limit_bytes
        self._left_bytes = limit_bytes
        self._max_files = max_files
        self._files: set[str] = set()
        self._links: list[tuple[str, str]] = []
        self._count = 0
        folder.mkdir(parents=True)

    def folder(self, name: str) -> None:
        self._count_one()
        if path := self._path(name):
            self._make(self._folder / path, name)

    def file(self, name: str, content: _Readable) -> None:
        path = self._new(name)
        with self._open(self._folder / path, name) as file:
            while piece := content.read(PIECE_BYTES):
                self._take(len(piece))
                file.write(piece)
        self._files.add(path)

    def skip(self, size: int) -> None:
        """Leave out a member of a stream, whose bytes are unpacked all the same."""
        self._count_one()
        self._take(size)

    def link(self, name: str, target: str) -> None:
        self._links.append((name, target))
        self._new(name)

    def make_links(self) -> None:
        for name, target in self._links:
            path = posixpath.normpath(target)
            if target.startswith("/") or path not in self._files:
                raise self.refused(name, "is a link to something that is not a file of the archive")
            self._make((self._folder / self._path(name)).parent, name)
            try:
                os.link(self._folder / path, self._folder / self._path(name))
            except FileExistsError:
                raise self.refused(name, "occurs twice") from None

    def refused(self, name: str, why: str) -> FetchError:
        return FetchError(FetchExit.NOT_A_MODEL, f"{self._where}: {name[:100]!a} {why}")

    def check_count(self, files: int) -> None:
        """NOT_A_MODEL for more files and folders than an archive may hold."""
        if files > self._max_files:
            raise FetchError(FetchExit.NOT_A_MODEL, f"{self._where} holds more than {self._max_files} files")

    def _path(self, name: str) -> str:
        """The path in the directory, "" for the directory itself; an error if it could be outside of it."""
        path = name.removeprefix("./").rstrip("/")
        if path in ("", "."):
            return ""
        if problem := path_problem(path):
            raise self.refused(name, problem)
        return path

    def _new(self, name: str) -> str:
        self._count_one()
        path = self._path(name)
        if not path:
            raise self.refused(name, "is not a valid file name")
        return path

    def _take(self, size: int) -> None:
        self._left_bytes -= size
        if self._left_bytes < 0:
            text = f"{self._where} unpacks to more than {self._limit_bytes} bytes, {MAX_RATIO} times its size"
            raise FetchError(FetchExit.NOT_A_MODEL, text)

    def _count_one(self) -> None:
        self._count += 1
        self.check_count(self._count)

    def _make(self, folder: Path, name: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise self.refused(name, "is both a file and a folder") from None

    def _open(self, path: Path, name: str) -> IO[bytes]:
        if not path.parent.is_dir():
            self._make(path.parent, name)
        try:
            return path.open("xb")
        except FileExistsError:
            raise self.refused(name, "occurs twice") from None


def files_below(folder: Path) -> Iterator[str]:
    """The paths of all files of a model below the directory, with `/`."""
    for root, _, names in os.walk(folder):
        below = os.path.relpath(root, folder)
        paths = (name if below == "." else f"{below}/{name}" for name in names)
        yield from (path for path in paths if not is_litter(path))
