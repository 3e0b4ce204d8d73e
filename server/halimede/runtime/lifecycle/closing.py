"""Drains and frees the versions that were replaced or unloaded."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from halimede.core.repository.status import VersionStatus, finish_unload
from halimede.runtime.lifecycle.left_behind import LeftBehind
from halimede.runtime.lifecycle.record import ModelRecord, by_text
from halimede.runtime.malloc import release_free_memory
from halimede.runtime.model import ModelVersion
from halimede.runtime.prepare import PreparedModel
from halimede.runtime.threads import run_in_thread

log = logging.getLogger(__name__)


class Closing:
    """The versions that were replaced or unloaded and are not closed yet."""

    def __init__(self, left_behind: LeftBehind, timeout_secs: float) -> None:
        """`timeout_secs`: how long instances and model may take to close after the last request."""
        self._left_behind = left_behind
        self._timeout_secs = timeout_secs
        self._closing: dict[asyncio.Task[None], ModelVersion] = {}
        self._memory_was_freed = False
        self._releasing: asyncio.Task[None] | None = None

    @property
    def versions(self) -> list[ModelVersion]:
        """The versions that are not closed yet."""
        return list(self._closing.values())

    async def closed(self) -> None:
        """Wait until all of them are closed."""
        if self._closing:
            await asyncio.wait(self._closing)

    def retire(self, record: ModelRecord, old: Mapping[int, ModelVersion]) -> None:
        """Let replaced or unloaded versions finish in the background."""
        gone = {number: version for number, version in old.items() if number not in record.versions}
        # Requests that an ensemble accepted may still need the version, and find it until they are answered.
        users = [task for task, version in self._closing.items() if record.name in version.steps]
        if users:
            record.leaving.update(by_text(gone))
        for number, version in old.items():
            is_gone = number in gone
            status = record.status.unload(number) if is_gone else None
            finishing = self._finish(record, version, status, users if is_gone else ())
            task = asyncio.get_running_loop().create_task(finishing)
            self._closing[task] = version
            task.add_done_callback(self._closing.pop)

    async def close_version(self, version: ModelVersion) -> None:
        """Close a version without requests in flight; stop waiting if it takes too long."""
        task = asyncio.get_running_loop().create_task(version.close())
        await asyncio.wait((task,), timeout=self._timeout_secs)
        if not task.done():
            log.error(
                "model '%s' version %s does not close: it is left behind after %g s, with its threads and memory",
                *(version.name, version.version, self._timeout_secs),
                extra={"model": version.name, "version": version.version},
            )
            self._left_behind.leave(version.name, task)
        elif error := task.exception():
            about = {"model": version.name, "version": version.version}
            text = f"model '{version.name}' version {version.version}: closing failed"
            log.error("%s", text, exc_info=error, extra=about)

    async def close_versions(self, versions: Mapping[int, ModelVersion]) -> None:
        """Close versions that never served."""
        for version in versions.values():
            await self.close_version(version)

    async def _finish(
        self,
        record: ModelRecord,
        version: ModelVersion,
        status: VersionStatus | None,
        users: Sequence[asyncio.Task[None]],
    ) -> None:
        version.executor.expect_few()
        if users:
            await asyncio.wait(users)
            record.leaving = {text: each for text, each in record.leaving.items() if each.version is not version}
        version.executor.expect_no_more()
        await version.drained()
        await self.close_version(version)
        self._release_memory()
        if status is not None and finish_unload(status):
            about = {"model": version.name, "version": version.version}
            log.info("successfully unloaded '%s' version %s", version.name, version.version, extra=about)

    def _release_memory(self) -> None:
        """Return the memory of closed models to the system, once for all that close at the same time."""
        self._memory_was_freed = True
        if self._releasing is None or self._releasing.done():
            self._releasing = asyncio.get_running_loop().create_task(self._release_while_freed())

    async def _release_while_freed(self) -> None:
        while self._memory_was_freed:
            self._memory_was_freed = False
            await run_in_thread("release-memory", release_free_memory)


async def close_prepared(name: str, prepared: PreparedModel) -> None:
    """Close models that have no instances."""
    for version in prepared.versions:
        try:
            await run_in_thread(f"close-{name}", version.close)
        except Exception:
            about = {"model": name, "version": version.version}
            log.exception("model '%s' version %d: closing failed", name, version.version, extra=about)
