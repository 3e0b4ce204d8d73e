"""A cache of fetched contents by name, in a directory that several processes may share: all pods of a machine.

    entries/<name>/     files/ and manifest.json; appears complete, by a rename
    partial/<name>/     what is being fetched, or was when the fetching process ended
    locks/<name>        flock: exclusive to fetch or evict, shared to copy
    locks/.all          flock: held briefly to make room

Eviction never affects a served model, because a model's directory never refers to the cache. It has files of its own,
made under the shared lock: hard links if both are on one mount, else copies (which share blocks if the file system
supports it). So it does not matter that a lock ends with its process, and no lock has to be held for as long as a model
serves. Eviction skips an entry whose files have hard links elsewhere, because removing it would free nothing.
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
from halimede.fetch.errors import FetchError
from halimede.fetch.retry import RetryPolicy
from halimede_spec.fetch_exit import FetchExit

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
RESERVED = "reserved"
"""A file in a partial entry: the final size of the entry in bytes."""
WAIT_SECS = 0.2
LOG_WAIT_SECS = 10.0


@dataclass(frozen=True, slots=True)
class CachedContent:
    """A complete content: the sha256 of each file by its path below `files`. `digest` is that of the directory, or of
    the file or archive that it was fetched as; `is_single` means one file, whose name depends on the URI."""

    folder: Path
    digest: str
    size_bytes: int
    hashes: Mapping[str, str]
    is_single: bool

    @property
    def files(self) -> Path:
        return self.folder / FILES


class Cache:
    """A directory of contents; without a size limit, only the disk limits it."""

    def __init__(self, root: Path, size_limit_bytes: int | None = None) -> None:
        self.root = root
        self._limit = size_limit_bytes
        for name in ("entries", "partial", "locks"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def find(self, name: str) -> CachedContent | None:
        """The entry, None if it does not exist or its files changed. A lock of this name prevents its eviction."""
        folder = self.root / "entries" / name
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            entry = CachedContent(
                folder, manifest["digest"], manifest["size_bytes"], manifest["files"], manifest["is_single"]
            )
            sizes = sum((entry.files / path).stat().st_size for path in entry.hashes)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return entry if sizes == entry.size_bytes else None

    def use(self, entry: CachedContent) -> None:
        """Record that the entry is used now, so that it is evicted last."""
        os.utime(entry.folder / MANIFEST)

    def spoil(self, entry: CachedContent) -> None:
        """Make the entry invisible to `find`; current readers are not affected."""
        (entry.folder / MANIFEST).unlink(missing_ok=True)

    def partial(self, name: str) -> Path:
        return self.root / "partial" / name

    def commit(
        self, name: str, content: Path, digest: str, hashes: Mapping[str, str], *, is_single: bool = False
    ) -> None:
        """Make the directory `content`, part of this name's partial entry, the entry's files, and sync it to disk."""
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
        """Remove an entry and its partial entry; the caller holds its lock exclusively."""
        self.remove(self.root / "entries" / name)
        self.remove(self.partial(name))

    def check_possible(self, total_bytes: int, what: str) -> None:
        """Raise NO_SPACE for an entry that would not fit into an empty cache."""
        if self._limit is not None and total_bytes > self._limit:
            text = f"{what} has {total_bytes} bytes, and the cache's limit is {self._limit}"
            raise FetchError(FetchExit.NO_SPACE, text)
        disk = os.statvfs(self.root)
        if total_bytes > disk.f_blocks * disk.f_frsize:
            text = f"{what} needs {total_bytes} bytes, and the disk of {self.root} has {disk.f_blocks * disk.f_frsize}"
            raise FetchError(FetchExit.NO_SPACE, text)

    def make_room(self, name: str, total_bytes: int, missing_bytes: int, what: str) -> None:
        """Evict until an entry of this size fits, else NO_SPACE. The caller holds the entry's lock exclusively.

        `missing_bytes` is how many of them still have to be written to the disk.
        """
        self.check_possible(total_bytes, what)
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
            raise FetchError(FetchExit.NO_SPACE, f"{what} needs {missing} bytes, and {self.root} has {free} left")
        text = f"{what} has {total} bytes; {used} of the cache's {self._limit} are in use by others"
        raise FetchError(FetchExit.NO_SPACE, text)

    def _kept(self, except_name: str) -> Iterator["_Kept"]:
        for kind in ("entries", "partial"):
            for folder in (self.root / kind).iterdir():
                if folder.name == except_name:
                    continue
                with suppress(OSError):
                    yield _kept(folder)

    def _try_evict(self, kept: "_Kept") -> bool:
        """Remove an entry that is neither locked nor linked; links would keep its bytes on the disk."""
        if kept.is_linked:
            return False
        with self._try_locked(kept.folder.name) as is_ours:
            if is_ours:
                log.info("%s is evicted from the cache: %d bytes", kept.folder.name[:12], kept.size)
                self.remove(kept.folder)
                (self.root / "locks" / kept.folder.name).unlink(missing_ok=True)
            return is_ours

    def remove(self, folder: Path) -> None:
        """Remove a directory in one step as seen by others, even if this process dies during the removal."""
        if not folder.exists():
            return
        trash = self.root / f"trash-{os.getpid()}-{time.monotonic_ns()}"
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _empty_trash(self) -> None:
        for folder in self.root.glob("trash-*"):
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def reading(self, name: str, retries: RetryPolicy) -> Iterator[None]:
        """Hold a lock that prevents eviction of the entry."""
        with self._locked(name, fcntl.LOCK_SH, retries):
            yield

    @contextmanager
    def fetching(self, name: str, retries: RetryPolicy) -> Iterator[None]:
        """Hold the exclusive lock of the entry; waiting for it is logged."""
        with self._locked(name, fcntl.LOCK_EX, retries):
            yield

    @contextmanager
    def _locked(self, name: str, kind: int, retries: RetryPolicy | None = None) -> Iterator[None]:
        path = self.root / "locks" / name
        logged_at = -LOG_WAIT_SECS
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
            try:
                while not _try_flock(descriptor, kind):
                    if retries is None:
                        fcntl.flock(descriptor, kind)
                        break
                    logged_at = _log_wait(name, retries, logged_at)
                    retries.abort.wait(WAIT_SECS)
                # Eviction also removes the lock file. Then the locked file is a deleted one, which no process can open.
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
    """An entry, or a partial one, by the time of its last use."""

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
        # An unusable entry: evict it first.
        return _Kept(0, folder, 0, False)


def _try_flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _log_wait(name: str, retries: RetryPolicy, logged_at: float) -> float:
    # No time limit: the other process fails by itself if it makes no progress.
    retries.progress("another fetch of the same model")
    now = time.monotonic()
    if now - logged_at < LOG_WAIT_SECS:
        return logged_at
    log.info("another process fetches %s; waiting for it", name[:12])
    return now


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(path: Path) -> str:
    """The sha256 in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(hashes: Mapping[str, str], single: str | None) -> str:
    """The digest of a directory's files, or of the single one."""
    return folder_digest(hashes) if single is None else PREFIX + hashes[single]
