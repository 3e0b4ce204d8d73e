"""Reloads models when their files change (`--watch`). The old version serves until the new one does."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from halimede.core.repository.changes import Changes
from halimede.core.types import InferenceError
from halimede.runtime.clock import monotonic_ns

log = logging.getLogger(__name__)

NS_PER_SEC = 1_000_000_000

CHECK_INTERVAL_SECS = 0.5
CHECK_SHARE = 0.1
"""The share of time that checks may take: a large repository is checked less often."""
SETTLE_NS = NS_PER_SEC // 2
"""How long files must be unchanged before they are loaded."""


class Watched(Protocol):
    """Models that are loaded; see `lifecycle.ModelLifecycle`."""

    async def read_sources(self) -> tuple[Mapping[str, str], Mapping[str, str]]: ...

    async def reload(self, name: str) -> None: ...


async def watch(models: Watched) -> None:
    """Runs until it is cancelled, which cancels the reloads that are under way."""
    changes = Changes(SETTLE_NS)
    async with asyncio.TaskGroup() as reloads:
        while True:
            begun = monotonic_ns()
            try:
                found, loaded = await models.read_sources()
            except Exception:
                log.exception("the models' files could not be read")
                found, loaded = {}, {}
            now = monotonic_ns()
            for name in changes.due(found, loaded, now):
                reloads.create_task(_reload(models, name))
            await asyncio.sleep(max(CHECK_INTERVAL_SECS, (now - begun) / NS_PER_SEC / CHECK_SHARE))


async def _reload(models: Watched, name: str) -> None:
    log.info("reloading model '%s' because its files have changed", name, extra={"model": name})
    try:
        await models.reload(name)
    except InferenceError:
        # The load has logged its cause.
        text = "model '%s' was not reloaded; the next change of its files starts another reload"
        log.error(text, name, extra={"model": name})
    except Exception:
        log.exception("model '%s' could not be reloaded", name, extra={"model": name})
