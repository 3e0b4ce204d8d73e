"""Unpack the archive of an environment, as a separate process: `python unpack.py ARCHIVE DIRECTORY`.

A process, because unpacking occupies the interpreter for minutes and takes as much memory as the archive demands, and a
server can spare neither. It imports only the standard library.

Nothing is written outside of the directory, and nothing in it points outside: members and links are checked by their
names, a member below a link is refused, and a link may have `..` only at its beginning. So a name resolves to the
path that it spells, even through links.

Exits with 0; with 1 if the archive is invalid, or 2 if the system fails, and then prints the reason in one line.
"""

import gzip
import os
import resource
import shutil
import sys
import tarfile
import zlib
from pathlib import Path

MAX_BYTES = 32 << 30
MAX_MEMBERS = 1_000_000
MAX_MEMORY_BYTES = 4 << 30
CHUNK_BYTES = 1 << 20
MAX_TIME = 1 << 33
"""Maximum modification time, in seconds since the epoch: every file system can store it."""

ARCHIVE_AT_FAULT, SYSTEM_AT_FAULT = 1, 2


class _Target:
    """The directory that is being filled."""

    def __init__(self, directory: Path, max_members: int) -> None:
        self._directory = directory
        self._left = max_members
        self._max_members = max_members
        self._folders = {""}
        """Directories created here, which therefore are not links."""

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one member; ValueError if it is not allowed."""
        parts = _parts(member.name, member.name)
        if not parts:
            return
        self._enter(parts[:-1], member.name)
        path = self._directory / "/".join(parts)
        if member.isdir():
            self._enter(parts, member.name)
            return
        self._count()
        try:
            if member.isreg():
                self._write(tar, member, path)
            elif member.issym():
                _check_link(member, depth=len(parts) - 1)
                path.symlink_to(member.linkname)
            elif member.islnk():
                self._link(member, path)
            else:
                raise ValueError(f"'{member.name}' is a device or a pipe")
        except FileExistsError:
            raise ValueError(f"'{member.name}' is in it twice") from None

    def _enter(self, parts: list[str], name: str) -> None:
        """Create the directory and its parents."""
        for end in range(1, len(parts) + 1):
            folder = "/".join(parts[:end])
            if folder in self._folders:
                continue
            self._count()
            try:
                (self._directory / folder).mkdir(mode=0o755)
            except FileExistsError:
                raise ValueError(f"'{name}' lies below '{folder}', which is not a folder of the archive") from None
            self._folders.add(folder)

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        source = tar.extractfile(member)
        if source is None:
            raise ValueError(f"'{member.name}' has no content")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)
            os.fchmod(descriptor, 0o600 | member.mode & 0o755)
            target.flush()
            # Compiled modules are valid only for the modification time of their source.
            seconds = min(max(0, int(member.mtime)), MAX_TIME)
            os.utime(descriptor, (seconds, seconds))

    def _link(self, member: tarfile.TarInfo, path: Path) -> None:
        parts = _parts(member.linkname, member.name)
        target = self._directory / "/".join(parts)
        if "/".join(parts[:-1]) not in self._folders or target.is_symlink() or not target.is_file():
            raise ValueError(f"'{member.name}' is a link to '{member.linkname}', which is not a file of the archive")
        os.link(target, path)

    def _count(self) -> None:
        if self._left == 0:
            raise ValueError(f"it has more than {self._max_members} files and folders")
        self._left -= 1


def unpack(archive: Path, directory: Path, *, max_bytes: int = MAX_BYTES, max_members: int = MAX_MEMBERS) -> None:
    """Unpack a tar.gz into an empty directory. ValueError if the archive is invalid, OSError if the system fails."""
    target = _Target(directory, max_members)
    left = max_bytes
    try:
        # As a stream, which also checks the checksum at the end and reads everything once.
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            while (member := tar.next()) is not None:
                left -= member.size
                if left < 0:
                    raise ValueError(f"it has more than {max_bytes} bytes unpacked")
                target.add(tar, member)
                # tarfile keeps a list of all members, and there may be a million.
                tar.members.clear()  # type: ignore[attr-defined]  # the stubs do not have it
            while chunk := stream.read(CHUNK_BYTES):
                left -= len(chunk)
                if left < 0:
                    raise ValueError(f"it has more than {max_bytes} bytes unpacked")
    except (gzip.BadGzipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise ValueError(f"it is damaged or not a tar.gz: {error}") from error
    except MemoryError as error:
        raise ValueError("a header in it is too large") from error


def _parts(name: str, of: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise ValueError(f"'{of}' leads out of it ('{name}')" if name != of else f"'{of}' leads out of it")
    return parts


def _check_link(member: tarfile.TarInfo, depth: int) -> None:
    parts = [part for part in member.linkname.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    if member.linkname.startswith("/") or up > depth or ".." in parts[up:]:
        raise ValueError(
            f"'{member.name}' is a link to '{member.linkname}', which leads out of it; expected an environment with "
            "copies, as conda-pack and `venv --copies` make them"
        )


def main(archive: str, directory: str) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        unpack(Path(archive), Path(directory))
    except ValueError as error:
        print(ascii(str(error))[1:-1])
        return ARCHIVE_AT_FAULT
    except OSError as error:
        # Without the path, because it is a path of the server.
        print(error.strerror or type(error).__name__)
        return SYSTEM_AT_FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
