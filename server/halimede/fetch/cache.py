"""Contents that were fetched, by name, in a folder that several processes may share: all pods of a machine.

    entries/<name>/     files/ and manifest.json; appears whole, by a rename
    partial/<name>/     what is being fetched, or was when its fetcher died
    locks/<name>        flock: exclusive for who fetches or evicts, shared for who takes a copy
    locks/.all          flock: held for a moment by who makes room

Nothing is evicted from under its user: a model's folder never refers to the cache. It gets files of its own, hard links
where both are on one mount and copies elsewhere (which share blocks where the file system can), under the shared lock.
So the end of a lock, with its process, is no danger, and there is none to be held for as long as a model serves. An
entry whose files have hard links elsewhere is passed over by eviction, as that would free nothing.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from halimede.fetch.digest import PREFIX, folder_digest
from halimede.fetch.download import FILES, free_bytes
from halimede.fetch.faults import Exit, FetchError
from halimede.fetch.patience import Patience

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RESERVED = "reserved"
"""In a partial entry: how many bytes it will have."""
WAIT_SECS = 0.2
SAY_SECS = 10.0


@dataclass(frozen=True, slots=True)
class Entry:
    """Whole content: the sha256 of each file by its path below `files`. `digest` is that of the folder, or of the file
    or archive that it was fetched as; `is_single` says that it is one file, whose name is its URI's affair."""

    folder: Path
    digest: str
    size_bytes: int
    hashes: Mapping[str, str]
    is_single: bool

    @property
    def files(self) -> Path:
        return self.folder / FILES


class Cache:
    """One folder of contents; without a limit, all that the disk holds."""

    def __init__(self, root: Path, size_limit_bytes: int | None = None) -> None:
        self.root = root
        self._limit = size_limit_bytes
        for name in ("entries", "partial", "locks"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> Entry | None:
        """The entry; held by a lock of this name it stays. One whose files are not as they were is none."""
        folder = self.root / "entries" / name
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            entry = Entry(folder, manifest["digest"], manifest["size_bytes"], manifest["files"], manifest["is_single"])
            sizes = sum((entry.files / path).stat().st_size for path in entry.hashes)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return entry if sizes == entry.size_bytes else None

    def use(self, entry: Entry) -> None:
        """It was needed now, and is the last to go."""
        os.utime(entry.folder / MANIFEST)

    def spoil(self, entry: Entry) -> None:
        """It is found no more; who is reading it goes on."""
        (entry.folder / MANIFEST).unlink(missing_ok=True)

    def partial(self, name: str) -> Path:
        return self.root / "partial" / name

    def commit(
        self, name: str, content: Path, digest: str, hashes: Mapping[str, str], *, is_single: bool = False
    ) -> None:
        """Make the folder `content`, which is in the partial entry of this name, the entry's files. Synced to disk."""
        made = self.partial(name) / "entry"
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        content.rename(made / FILES)
        size = 0
        for path in hashes:
            size += (made / FILES / path).stat().st_size
            os.chmod(made / FILES / path, 0o444)
            sync(made / FILES / path)
        manifest = {"digest": digest, "size_bytes": size, "files": dict(hashes), "is_single": is_single}
        (made / MANIFEST).write_text(json.dumps(manifest))
        sync(made / MANIFEST)
        sync(made)
        self.remove(self.root / "entries" / name)
        made.rename(self.root / "entries" / name)
        sync(self.root / "entries")
        self.remove(self.partial(name))

    def drop(self, name: str) -> None:
        """Remove an entry and what was begun of it; the caller holds its lock exclusively."""
        self.remove(self.root / "entries" / name)
        self.remove(self.partial(name))

    def refuse_impossible(self, total_bytes: int, what: str) -> None:
        """NO_SPACE for an entry that could not fit into an empty cache either."""
        if self._limit is not None and total_bytes > self._limit:
            text = f"{what} has {total_bytes} bytes, and the cache's limit is {self._limit}"
            raise FetchError(Exit.NO_SPACE, text)
        disk = os.statvfs(self.root)
        if total_bytes > disk.f_blocks * disk.f_frsize:
            text = f"{what} needs {total_bytes} bytes, and the disk of {self.root} has {disk.f_blocks * disk.f_frsize}"
            raise FetchError(Exit.NO_SPACE, text)

    def make_room(self, name: str, total_bytes: int, missing_bytes: int, what: str) -> None:
        """Evict until an entry of this size fits; NO_SPACE where it cannot. The caller holds its lock exclusively.

        `missing_bytes` are those that the disk still has to take.
        """
        self.refuse_impossible(total_bytes, what)
        with self._locked(".all", fcntl.LOCK_EX):
            self._empty_trash()
            partial = self.partial(name)
            partial.mkdir(exist_ok=True)
            (partial / RESERVED).write_text(str(total_bytes))
            candidates = sorted(self._kept(except_name=name))
            used = sum(kept.size for kept in candidates)
            while not self._fits(used + total_bytes, missing_bytes):
                if not candidates:
                    self._raise_full(used, total_bytes, missing_bytes, what)
                kept = candidates.pop(0)
                if self._try_evict(kept):
                    used -= kept.size

    def _fits(self, used: int, missing_bytes: int) -> bool:
        return (self._limit is None or used <= self._limit) and missing_bytes <= free_bytes(self.root)

    def _raise_full(self, used: int, total: int, missing: int, what: str) -> None:
        free = free_bytes(self.root)
        if missing > free:
            raise FetchError(Exit.NO_SPACE, f"{what} needs {missing} bytes, and {self.root} has {free} left")
        text = f"{what} has {total} bytes; {used} of the cache's {self._limit} are in use by others"
        raise FetchError(Exit.NO_SPACE, text)

    def _kept(self, except_name: str) -> Iterator["_Kept"]:
        for kind in ("entries", "partial"):
            for folder in (self.root / kind).iterdir():
                if folder.name == except_name:
                    continue
                with suppress(OSError):
                    yield _kept(folder)

    def _try_evict(self, kept: "_Kept") -> bool:
        """Remove what nobody uses: neither by a lock nor by links, which would keep its bytes on the disk."""
        if kept.is_linked:
            return False
        with self._try_locked(kept.folder.name) as is_ours:
            if is_ours:
                log.info("%s leaves the cache: %d bytes", kept.folder.name[:12], kept.size)
                self.remove(kept.folder)
                (self.root / "locks" / kept.folder.name).unlink(missing_ok=True)
            return is_ours

    def remove(self, folder: Path) -> None:
        """In one step for whoever looks, whatever becomes of us while it takes its time."""
        if not folder.exists():
            return
        trash = self.root / f"trash-{os.getpid()}-{time.monotonic_ns()}"
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _empty_trash(self) -> None:
        for folder in self.root.glob("trash-*"):
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def reading(self, name: str, patience: Patience) -> Iterator[None]:
        """While this is held, the entry is not evicted."""
        with self._locked(name, fcntl.LOCK_SH, patience):
            yield

    @contextmanager
    def fetching(self, name: str, patience: Patience) -> Iterator[None]:
        """One process at a time; the others wait, and say so."""
        with self._locked(name, fcntl.LOCK_EX, patience):
            yield

    @contextmanager
    def _locked(self, name: str, kind: int, patience: Patience | None = None) -> Iterator[None]:
        path = self.root / "locks" / name
        said_at = -SAY_SECS
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
            try:
                while not _try_flock(descriptor, kind):
                    if patience is None:
                        fcntl.flock(descriptor, kind)
                        break
                    said_at = _say_waiting(name, patience, said_at)
                    patience.abort.wait(WAIT_SECS)
                # Who evicts removes the lock too: what we hold may be one that nobody else can see.
                if _is_at(descriptor, path):
                    yield
                    return
            finally:
                os.close(descriptor)

    @contextmanager
    def _try_locked(self, name: str) -> Iterator[bool]:
        descriptor = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
        try:
            yield _try_flock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True, order=True)
class _Kept:
    """An entry, or a partial one, by the time at which it was last used."""

    used_ns: int
    folder: Path
    size: int
    is_linked: bool


def _kept(folder: Path) -> _Kept:
    manifest = folder / MANIFEST
    if not manifest.exists():
        reserved = folder / RESERVED
        text = reserved.read_text() if reserved.exists() else ""
        return _Kept(folder.stat().st_mtime_ns, folder, int(text) if text.isdecimal() else 0, False)
    try:
        document = json.loads(manifest.read_bytes())
        is_linked = any((folder / FILES / path).stat().st_nlink > 1 for path in document["files"])
        return _Kept(manifest.stat().st_mtime_ns, folder, int(document["size_bytes"]), is_linked)
    except (OSError, ValueError, KeyError, TypeError):
        # Of no use to anybody: the first to go.
        return _Kept(0, folder, 0, False)


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _say_waiting(name: str, patience: Patience, said_at: float) -> float:
    patience.check("another fetch of the same model", lambda: "it holds the cache's lock")
    now = time.monotonic()
    if now - said_at < SAY_SECS:
        return said_at
    log.info("another process fetches %s; waiting for it, at most %.0f s", name[:12], patience.left_secs())
    return now


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    """The sha256 in hexadecimal digits. OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(hashes: Mapping[str, str], single: str | None) -> str:
    """The digest of a folder's files, or of the single one."""
    return folder_digest(hashes) if single is None else PREFIX + hashes[single]
