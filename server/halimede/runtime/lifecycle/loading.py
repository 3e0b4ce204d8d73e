"""Loads one model.

A reload builds the new versions beside the old ones, which serve until the swap (one synchronous step) and then drain
in the background. A reload that fails leaves the old ones as they are. An ensemble is loaded after the models of its
steps.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from halimede.core.ensemble.graph import members_of
from halimede.core.repository.load_errors import (
    ConfigError,
    LeftBehindError,
    LoadError,
    VersionError,
    client_error,
    log_text,
    retry_pause_secs,
    steps_error,
)
from halimede.core.repository.plan import LATEST, steps_to_load
from halimede.core.repository.status import Attempt
from halimede.core.types import ErrorCode, InferenceError, shortage_of
from halimede.runtime.lifecycle.building import Builder
from halimede.runtime.lifecycle.closing import Closing
from halimede.runtime.lifecycle.ensembles import Ensembles
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.reading import RepositoryReader
from halimede.runtime.lifecycle.record import ModelRecord, Records, find_step
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import PreparedModel
from halimede.runtime.repository import ModelEntry
from halimede.runtime.services import ModelServices

log = logging.getLogger(__name__)


class Loader:
    """Loads and reloads models, one load of a model at a time.

    A failed load is tried again up to `retry_count` times, with growing pauses, unless another try cannot help.
    """

    def __init__(
        self,
        records: Records,
        reader: RepositoryReader,
        builder: Builder,
        ensembles: Ensembles,
        closing: Closing,
        left_behind: LeftBehind,
        services: ModelServices,
        *,
        retry_count: int,
    ) -> None:
        self._records = records
        self._reader = reader
        self._builder = builder
        self._ensembles = ensembles
        self._closing = closing
        self._left_behind = left_behind
        self._waits = services.loads
        self._retry_count = retry_count

    async def load(self, name: str, *, for_model: bool = False) -> None:
        """Load or reload one model; no effect if it is loaded and unchanged.

        Raises InferenceError with a text for clients; its `__cause__` is the root cause.

        `for_model`: a model's code requested the load. It then takes no load slot, because the load of that model may
        hold one while it waits.
        """
        while not await self._load_once(name, for_model):
            pass

    async def _load_once(self, name: str, for_model: bool) -> bool:
        """Whether the record is still the model's after the wait: a failed load before this one drops it."""
        record = self._records.obtain(name)
        async with record.lock:
            if self._records.get(name) is not record:
                return False
            was_wanted = record.status.wanted
            record.failed = None
            try:
                await self._load_with_retries(record, for_model)
                return True
            except (ConfigError, VersionError, LeftBehindError) as error:
                _log_failure(name, error)
                record.failed = client_error(name, error)
                raise record.failed from error
            finally:
                record.loading = False
                record.loads += 1
                record.status.end(record.versions, was_wanted=was_wanted)
                if not record.status.is_known():
                    del self._records[name]

    async def _load_with_retries(self, record: ModelRecord, for_model: bool) -> None:
        """Load, and try again after failures while another try may help and no unload waits."""
        attempt = 1
        while True:
            try:
                await self._try_load(record, for_model)
                return
            except (ConfigError, VersionError) as error:
                pause = retry_pause_secs(error, attempt, self._retry_count)
                if pause is None or record.unloads.count:
                    raise
                log.warning(
                    "model '%s': load attempt %d of %d failed, the next one in %g s: %s",
                    *(record.name, attempt, self._retry_count + 1, pause, error.message),
                    extra={"model": record.name},
                )
                try:
                    await asyncio.wait_for(record.unloads.asked.wait(), pause)
                except TimeoutError:
                    attempt += 1
                else:
                    raise

    async def _try_load(self, record: ModelRecord, for_model: bool) -> None:
        status, attempt = record.status, Attempt()
        try:
            entry = await self._reader.read(record)
            if record.versions and record.fingerprint == entry.fingerprint and not record.refuses():
                record.sources = entry.sources
                status.forget_failures(record.versions)
                return
            record.loading = True
            attempt = status.begin(entry.versions)
            versions, ensemble = await self._build(record, entry, attempt, for_model)
        except (ConfigError, VersionError, LeftBehindError) as error:
            status.fail(attempt, error)
            raise
        old = record.replace(versions)
        record.ensemble = ensemble
        status.succeed(attempt, versions)
        record.fingerprint, record.sources = entry.fingerprint, entry.sources
        self._ensembles.follow(record.name)
        self._closing.retire(record, old)
        status.forget_failures(record.versions)
        log.info("successfully loaded '%s'", record.name, extra={"model": record.name})

    async def _build(
        self, record: ModelRecord, entry: ModelEntry, attempt: Attempt, for_model: bool
    ) -> tuple[dict[int, ModelVersion], PreparedModel | None]:
        """New versions with their instances started, all or none, and what an ensemble is made of; None for a model.

        Raises ConfigError, VersionError and LeftBehindError.
        """
        try:
            async with nullcontext() if for_model else self._builder.slot(record):
                record.status.start(attempt, record.versions)
                prepared = await self._builder.prepare(record, entry)
                record.status.select(attempt, {version.version for version in prepared.versions})
                if not prepared.is_ensemble:
                    return await self._builder.start(record, prepared), None
            # Without a slot, because the loads for which it waits need slots.
            await self._load_steps(record, prepared, for_model)
            return self._ensembles.make(prepared), prepared
        except (ConfigError, VersionError, LeftBehindError):
            raise
        except Exception as error:
            log.exception("model '%s': the load failed", record.name, extra={"model": record.name})
            shortage, text = shortage_of(error), f"{type(error).__name__}: {error}"
            raise ConfigError(ErrorCode.INTERNAL, shortage.message if shortage else text) from error

    async def _load_steps(self, record: ModelRecord, prepared: PreparedModel, for_model: bool) -> None:
        """Load the models of an ensemble's steps that do not serve, in parallel. Raises EnsembleError if one cannot be
        loaded, also if its load waits for this one."""
        steps = members_of(prepared.config)
        found = {step: find_step(self._records, step) for step in steps}
        usable = {step for step, version in found.items() if version is not None and version.executor.refusal is None}
        names = steps_to_load(record.name, steps, usable, self._waits)
        self._waits.add(record.name, names)
        try:
            loading = self._load_in_parallel(names, for_model)
            failures = await self._left_behind.unless_unloaded(record, loading, ends_by_cancelling=True)
        finally:
            self._waits.remove(record.name, names)
        # A model whose reload failed still serves its old versions, so it can be a step's model.
        failures = {name: error for name, error in failures.items() if find_step(self._records, (name, LATEST)) is None}
        if failures:
            raise steps_error(record.name, failures)

    async def _load_in_parallel(self, names: Sequence[str], for_model: bool) -> Mapping[str, InferenceError]:
        """Load these models; return the errors of those that failed."""
        failures = await asyncio.gather(*(self._load_step(name, for_model) for name in names))
        return {name: failure for name, failure in zip(names, failures, strict=True) if failure is not None}

    async def _load_step(self, name: str, for_model: bool) -> InferenceError | None:
        record = self._records.get(name)
        if record is not None and record.lock.locked():
            loads = record.loads
            async with record.lock:
                # A load that has just failed for another model is not tried again.
                if record.loads > loads and record.failed is not None:
                    return record.failed
        try:
            await self.load(name, for_model=for_model)
        except InferenceError as error:
            return error
        return None


def _log_failure(name: str, error: LoadError) -> None:
    about = {"model": name}
    if isinstance(error, VersionError):
        about["version"] = str(error.version)
    log.error("%s", log_text(name, error), extra=about)
    if isinstance(error, VersionError):
        log.info("failed to load '%s'", name, extra=about)
