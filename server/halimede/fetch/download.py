"""Download files from a store into a directory: parallel ranges, bounded memory, resumed after a kill.

The directory has `files/` and a journal of the ranges that are on disk. Written bytes survive the death of the process
but not that of the machine, so the journal is valid only within one boot of one machine; the code that takes over
complete files syncs them.
"""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from halimede.fetch.errors import FetchError, TransientError, cause_of
from halimede.fetch.retry import AbortedError, RetryPolicy
from halimede.fetch.source import Source
from halimede.fetch.tree import RemoteFile
from halimede_spec.fetch_exit import FetchExit

log = logging.getLogger(__name__)

WORKERS = 8
RANGE_BYTES = 8 << 20
"""At most this much of each unfinished range is fetched again after a kill."""
PROGRESS_SECS = 10.0
FILES = "files"
JOURNAL = "journal"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of one file; `stop` is None if the file's size is unknown."""

    file: int
    number: int
    start: int
    stop: int | None


class Download:
    """The download of the files of one listing, in its order, into one directory."""

    def __init__(
        self,
        source: Source,
        files: Sequence[RemoteFile],
        listing: str,
        folder: Path,
        name: str,
        where: str,
        retries: RetryPolicy,
    ) -> None:
        """`listing` has the files as they are in the store now: partial files of another listing are removed. `name` is
        the model's, `where` its URI."""
        self._source = source
        self._files = list(files)
        self._folder = folder
        self._what = f"model '{name}'"
        self._where = where
        self._retries = retries
        self._parts = [part for i, file in enumerate(files) for part in _parts(i, file, source.is_ranged)]
        self._done = self._read_journal(f"{_boot_id()} {listing}".encode())
        self._total_bytes = sum(file.size or 0 for file in files)
        self._missing_at_start = self.missing_bytes
        self._fetched_bytes = 0
        self._lock = threading.Lock()

    @property
    def missing_bytes(self) -> int:
        """The bytes still to download, of files whose size is known."""
        return sum(part.stop - part.start for part in self._waiting() if part.stop is not None)

    def run(self) -> list[RemoteFile]:
        """Download all missing ranges; returns the files with their actual sizes."""
        for file in self._files:
            (self._folder / FILES / file.path).parent.mkdir(parents=True, exist_ok=True)
        waiting = iter(self._waiting())
        with full_disk_reported(self._what), open(self._folder / JOURNAL, "ab", buffering=0) as journal:
            with ThreadPoolExecutor(WORKERS, "fetch") as pool:
                workers = [pool.submit(self._work, waiting, journal.write) for _ in range(WORKERS)]
                try:
                    while wait(workers, PROGRESS_SECS, FIRST_EXCEPTION).not_done and not _failures(workers):
                        log.info("%s: %s", self._what, self._progress())
                finally:
                    if _failures(workers):
                        self._retries.abort.set()
            self._retries.abort.clear()
            # An aborted worker is not the cause of a failure.
            failures = _failures(workers)
            for failure in failures:
                if not isinstance(failure, AbortedError):
                    raise failure
            if failures:
                raise failures[0]
        return self._files

    def _work(self, waiting: Iterator[_Part], note: Callable[[bytes], object]) -> None:
        while True:
            with self._lock:
                part = next(waiting, None)
            if part is None:
                return
            try:
                self._download_part(part)
            except BaseException:
                self._retries.abort.set()
                raise
            note(f"{part.file} {part.number}\n".encode())

    def _download_part(self, part: _Part) -> None:
        """Download one part. Each try resumes where the one before it ended, if the store supports ranges."""
        file = self._files[part.file]
        descriptor = os.open(self._folder / FILES / file.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            at, failures = part.start, 0
            while part.stop is None or at < part.stop:
                before = at
                if not self._source.is_ranged:
                    at = part.start
                try:
                    for piece in self._source.read(file, at, part.stop):
                        self._retries.progress(self._where, is_of_file=True)
                        if part.stop is not None and at + len(piece) > part.stop:
                            raise TransientError("it sends more bytes than the file has")
                        _write(descriptor, piece, at)
                        at += len(piece)
                        with self._lock:
                            self._fetched_bytes += len(piece)
                    if part.stop is None:
                        os.ftruncate(descriptor, at)
                        self._files[part.file] = replace(file, size=at)
                        return
                    if at < part.stop:
                        raise TransientError("the connection was cut")
                except TransientError as fault:
                    failures = 1 if at > before else failures + 1
                    # Without the file's name: a store that fails does so for all files.
                    self._retries.pause(self._where, failures, fault)
        finally:
            os.close(descriptor)

    def _waiting(self) -> list[_Part]:
        return [part for part in self._parts if (part.file, part.number) not in self._done]

    def _progress(self) -> str:
        # Bytes that had to be fetched twice count twice: this is only informative.
        have = self._total_bytes - self._missing_at_start + self._fetched_bytes
        return f"{have >> 20} of {self._total_bytes >> 20} MB"

    def _read_journal(self, header: bytes) -> set[tuple[int, int]]:
        """The parts that are on disk. Untrusted data is removed, and a new journal begun."""
        path = self._folder / JOURNAL
        can_go_on = all(file.validator for file in self._files)
        done: set[tuple[int, int]] = set()
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
        if can_go_on and lines and lines[0] == header:
            # The last line may be incomplete.
            for line in lines[1:-1]:
                file, _, number = line.partition(b" ")
                done.add((int(file), int(number)))
            return done
        shutil.rmtree(self._folder / FILES, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header + b"\n")
        return done


def _parts(index: int, file: RemoteFile, is_ranged: bool) -> Iterator[_Part]:
    if file.size is None:
        yield _Part(index, 0, 0, None)
    elif not is_ranged or file.size <= RANGE_BYTES:
        yield _Part(index, 0, 0, file.size)
    else:
        for number, start in enumerate(range(0, file.size, RANGE_BYTES)):
            yield _Part(index, number, start, min(start + RANGE_BYTES, file.size))


def _write(descriptor: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(descriptor, view, at)
        view = view[written:]
        at += written


def _boot_id() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.exists() else "unknown"


def _failures(workers: Sequence[Future[None]]) -> list[BaseException]:
    return [failure for worker in workers if worker.done() and (failure := worker.exception()) is not None]


@contextmanager
def full_disk_reported(what: str) -> Iterator[None]:
    """Turn the error of a full disk into the FetchError for it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise FetchError(FetchExit.NO_SPACE, f"{what}: the disk is full: {cause_of(error)}") from None
        raise


def check_space(folder: Path, needed: int, what: str) -> None:
    """NO_SPACE if the file system has fewer bytes than this available for the process."""
    free = free_bytes(folder)
    if needed > free:
        raise FetchError(FetchExit.NO_SPACE, f"{what} needs {needed} bytes, and {folder} has {free} left")


def free_bytes(folder: Path) -> int:
    info = os.statvfs(folder)
    return info.f_bavail * info.f_frsize
