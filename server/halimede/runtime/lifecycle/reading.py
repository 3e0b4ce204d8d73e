"""Reads the repository on a limited number of threads, because clients may request it often and disks may be slow.

A file system that hangs (a network file system without its server) blocks the thread that reads it, and the thread
cannot be ended. So a read fails if the file system gives no answer for a time limit. The number of files does not
matter: a long read makes progress. Such a read no longer holds its place among the readers. For the index, which
clients may request again and again, only one thread reads at a time.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from halimede.core.hangs import Silence, check_interval_ns
from halimede.core.repository.changes import ABSENT
from halimede.core.repository.load_errors import ConfigError, LeftBehindError
from halimede.core.types import ErrorCode, shortage_of, unavailable
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.record import ModelRecord
from halimede.runtime.repository import Listing, ModelEntry, ModelRepository, ReadProgress
from halimede.runtime.threads import run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_READERS = 16
"""Number of threads that read the repository."""

_NS_PER_SEC = 1_000_000_000


class RepositoryReader:
    """A model repository, read off the event loop."""

    def __init__(self, repository: ModelRepository, left_behind: LeftBehind, limit_secs: float) -> None:
        self._repository = repository
        self._left_behind = left_behind
        self._limit_ns = int(limit_secs * _NS_PER_SEC)
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._next_listing: asyncio.Task[Listing] | None = None
        self._listing_turn = asyncio.Lock()
        self._listed = ReadProgress()
        """The progress of the listing that is being read."""
        self._duplicates: Mapping[str, str] = {}

    async def unreadable(self) -> Mapping[Path, str]:
        """The repositories that cannot be read now, with the reason. InferenceError if one gives no answer."""
        return await _answered(self._read_watched("repository", self._repository.unreadable))

    async def scan(self) -> Listing:
        """The repository's content, for the start. It is read once, and its warnings are not logged. InferenceError if
        a repository gives no answer."""
        return await _answered(self._read_watched("repository", self._repository.scan))

    async def listing(self) -> Listing:
        """The repository's content, read after this call. Calls during one reading share the next one, because parallel
        readings would compete with the event loop for the interpreter. InferenceError if a repository gives no answer.
        """
        if self._next_listing is None:
            self._next_listing = asyncio.get_running_loop().create_task(self._list_in_turn())
        return await _answered(self._result(self._next_listing, self._listed))

    async def sources(self, names: Sequence[str], *, find_gone: bool) -> dict[str, str]:
        """By name, the current fingerprints of the sources of these models, without those that cannot be read.
        `find_gone`: with ABSENT for models whose directory is gone."""

        def read() -> dict[str, str | None]:
            found = {name: self._repository.sources(name) for name in names}
            gone = [
                name for name, each in found.items() if find_gone and each is None and self._repository.is_gone(name)
            ]
            return found | dict.fromkeys(gone, ABSENT)

        reading = self._read_in_thread("read-sources", read)
        return {name: sources for name, sources in (await reading).items() if sources is not None}

    async def read(self, record: ModelRecord) -> ModelEntry:
        """The current content of the model's directory. Raises ConfigError and LeftBehindError."""
        self._left_behind.check_room()
        try:
            finding = self._read_watched(record.name, partial(self._repository.find, record.name))
            entry = await self._left_behind.unless_unloaded(record, finding)
        except LeftBehindError:
            raise
        except Exception as error:
            if not isinstance(error, OSError | LookupError | ValueError):
                log.exception("model '%s': its directory could not be read", record.name, extra={"model": record.name})
            shortage = shortage_of(error)
            raise ConfigError(ErrorCode.INTERNAL, shortage.message if shortage else str(error)) from error
        for warning in entry.warnings:
            if warning not in record.warned:
                log.warning("model '%s': %s", record.name, warning, extra={"model": record.name})
        record.warned = frozenset(entry.warnings)
        return entry

    async def _list_in_turn(self) -> Listing:
        async with self._listing_turn:
            self._next_listing = None
            listing = await self._read_in_thread("list-repository", partial(self._repository.scan, self._listed))
            for name, problem in listing.duplicates.items():
                if self._duplicates.get(name) != problem:
                    log.warning("model '%s': %s", name, problem, extra={"model": name})
            self._duplicates = listing.duplicates
            return listing

    async def _read_watched(self, name: str, read: Callable[[ReadProgress], T]) -> T:
        """As `_read_in_thread`. Raises TimeoutError if the repository gives no answer, and leaves the read behind."""
        progress = ReadProgress()
        async with self._slots:
            work = run_in_thread(f"read-{name}", partial(read, progress))
            reading = asyncio.get_running_loop().create_task(work)
            try:
                return await self._result(reading, progress)
            except TimeoutError:
                if not reading.done():
                    self._left_behind.leave(name, reading)
                raise

    async def _result(self, reading: "asyncio.Task[T]", progress: ReadProgress) -> T:
        """The result of a read. Raises TimeoutError if it makes no progress for the time limit."""
        silence, seen = Silence(self._limit_ns), -1
        while not (await asyncio.wait((reading,), timeout=check_interval_ns(self._limit_ns) / _NS_PER_SEC))[0]:
            before, seen = seen, progress.steps
            if silence.check(monotonic_ns(), is_alive=progress.has_own_limit or seen != before):
                secs = self._limit_ns / _NS_PER_SEC
                raise TimeoutError(f"repository '{progress.repository}' has not answered for {secs:g} s")
        return reading.result()

    async def _read_in_thread(self, name: str, read: Callable[[], T]) -> T:
        async with self._slots:
            return await run_in_thread(name, read)


async def _answered(read: Awaitable[T]) -> T:
    """The result of a read. InferenceError UNAVAILABLE if a repository gives no answer."""
    try:
        return await read
    except TimeoutError as error:
        raise unavailable(str(error)) from error
