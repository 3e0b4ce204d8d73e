"""Makes the new versions of one model, while the old ones serve."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from halimede.core.repository.load_errors import LeftBehindError, VersionError
from halimede.core.types import ErrorCode, InferenceError
from halimede.runtime.lifecycle.closing import Closing, close_prepared
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.record import ModelRecord
from halimede.runtime.model import ModelVersion, start_version
from halimede.runtime.prepare import LoadOptions, PreparedModel, load_model
from halimede.runtime.repository import ModelEntry
from halimede.runtime.requests import RequestTable
from halimede.runtime.services import ModelServices
from halimede.runtime.threads import run_in_thread
from halimede.workers.abandon import Abandon

log = logging.getLogger(__name__)


class Builder:
    """Loads models on threads, a limited number at a time, and starts their instances."""

    def __init__(
        self,
        options: LoadOptions,
        load_threads: int,
        table: RequestTable,
        services: ModelServices,
        closing: Closing,
        left_behind: LeftBehind,
        slot_wait_secs: float,
    ) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(load_threads)
        self._table = table
        self._services = services
        self._closing = closing
        self._left_behind = left_behind
        self._slot_wait_secs = slot_wait_secs

    @asynccontextmanager
    async def slot(self, record: ModelRecord) -> AsyncIterator[None]:
        """Wait for one of the load slots. Raises LeftBehindError."""
        await self._left_behind.unless_unloaded(
            record, self._slots.acquire(), self._free_slot, limit_secs=self._slot_wait_secs
        )
        try:
            yield
        finally:
            self._slots.release()

    async def prepare(self, record: ModelRecord, entry: ModelEntry) -> PreparedModel:
        """Load the versions that the policy selects, without instances. Raises ConfigError, VersionError and
        LeftBehindError."""
        abandon = Abandon()
        loading = run_in_thread(f"load-{record.name}", lambda: load_model(entry, self._options, abandon))
        try:
            return await self._left_behind.unless_unloaded(
                record, loading, lambda made: close_prepared(record.name, made)
            )
        except (LeftBehindError, asyncio.CancelledError):
            abandon.set()
            raise

    async def start(self, record: ModelRecord, prepared: PreparedModel) -> dict[int, ModelVersion]:
        """Start the instances of all selected versions. Raises VersionError and LeftBehindError."""
        starting = self._start(record.name, prepared)
        ends = all(version.isolated is not None for version in prepared.versions)
        return await self._left_behind.unless_unloaded(
            record, starting, self._closing.close_versions, ends_by_cancelling=ends
        )

    async def _start(self, name: str, prepared: PreparedModel) -> dict[int, ModelVersion]:
        """Close the other versions and raise the VersionError of the one that failed."""
        started: dict[int, ModelVersion] = {}
        selected = tuple(version.version for version in prepared.versions)
        for version in prepared.versions:
            try:
                started[version.version] = await start_version(
                    name,
                    version,
                    prepared.labels,
                    prepared.load_seconds,
                    self._table,
                    self._options.launcher,
                    self._services,
                )
            except (Exception, asyncio.CancelledError) as error:
                if not isinstance(error, InferenceError | asyncio.CancelledError):
                    log.exception("model '%s': an instance did not start", name, extra={"model": name})
                await self._closing.close_versions(started)
                rest = [other for other in prepared.versions if other.version not in started]
                await close_prepared(name, replace(prepared, versions=tuple(rest)))
                if isinstance(error, asyncio.CancelledError):
                    raise
                code, text = ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"
                if isinstance(error, InferenceError):
                    code, text = error.code, error.message
                raise VersionError(version.version, selected, code, text) from error
        return started

    async def _free_slot(self, _: bool) -> None:
        self._slots.release()
