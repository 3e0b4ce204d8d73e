"""Reads the repository on a limited number of threads, because clients may request it often and disks may be slow."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from halimede.core.repository.load_errors import ConfigError, LeftBehindError
from halimede.core.types import ErrorCode, shortage_of
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.record import ModelRecord
from halimede.runtime.repository import Listing, ModelEntry, ModelRepository
from halimede.runtime.threads import run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_READERS = 16
"""Number of threads that read the repository."""


class RepositoryReader:
    """A model repository, read off the event loop."""

    def __init__(self, repository: ModelRepository, left_behind: LeftBehind) -> None:
        self._repository = repository
        self._left_behind = left_behind
        self._slots = asyncio.Semaphore(MAX_READERS)
        self._next_listing: asyncio.Task[Listing] | None = None
        self._listing_turn = asyncio.Lock()
        self._duplicates: Mapping[str, str] = {}

    async def unreadable(self) -> Mapping[Path, str]:
        """The repositories that cannot be read now, with the reason."""
        return await self._read_in_thread("read-repository", self._repository.unreadable)

    async def scan(self) -> Listing:
        """The repository's content, for the start. It is read once, and its warnings are not logged."""
        return await self._read_in_thread("list-repository", self._repository.scan)

    async def listing(self) -> Listing:
        """The repository's content, read after this call. Calls during one reading share the next one, because parallel
        readings would compete with the event loop for the interpreter."""
        if self._next_listing is None:
            self._next_listing = asyncio.get_running_loop().create_task(self._list_in_turn())
        return await asyncio.shield(self._next_listing)

    async def sources(self, names: Sequence[str]) -> dict[str, str]:
        """By name, the current fingerprints of the sources of these models, without those that cannot be read."""
        reading = self._read_in_thread("read-sources", lambda: {name: self._repository.sources(name) for name in names})
        return {name: sources for name, sources in (await reading).items() if sources is not None}

    async def read(self, record: ModelRecord) -> ModelEntry:
        """The current content of the model's directory. Raises ConfigError and LeftBehindError."""
        self._left_behind.check_room()
        try:
            finding = self._read_in_thread(f"read-{record.name}", lambda: self._repository.find(record.name))
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
            listing = await self.scan()
            for name, problem in listing.duplicates.items():
                if self._duplicates.get(name) != problem:
                    log.warning("model '%s': %s", name, problem, extra={"model": name})
            self._duplicates = listing.duplicates
            return listing

    async def _read_in_thread(self, name: str, read: Callable[[], T]) -> T:
        async with self._slots:
            return await run_in_thread(name, read)
