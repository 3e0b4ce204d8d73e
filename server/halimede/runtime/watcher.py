"""Reloads models when their files change (`--watch`). The old version serves until the new one does.

If the server serves the whole repository, it also loads models that are new there, and unloads those that are gone.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from halimede.core.repository.changes import ABSENT, Changes
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

    async def read_sources(self, *, is_whole: bool) -> tuple[Mapping[str, str], Mapping[str, str]]: ...

    async def load(self, name: str) -> None: ...

    async def reload(self, name: str) -> None: ...

    async def unload(self, name: str) -> None: ...


async def watch(models: Watched, *, is_whole: bool) -> None:
    """Runs until it is cancelled, which cancels the reloads that are under way.

    `is_whole`: the server serves every model of its repositories, whatever is put there.
    """
    changes = Changes(SETTLE_NS)
    async with asyncio.TaskGroup() as reloads:
        while True:
            begun = monotonic_ns()
            try:
                found, loaded = await models.read_sources(is_whole=is_whole)
            except Exception:
                log.exception("the models' files could not be read")
                found, loaded = {}, {}
            now = monotonic_ns()
            for name in changes.due(found, loaded, now):
                if found[name] == ABSENT:
                    reloads.create_task(_unload(models, name))
                else:
                    reloads.create_task(_load(models, name, is_new=loaded.get(name) == ABSENT))
            await asyncio.sleep(max(CHECK_INTERVAL_SECS, (now - begun) / NS_PER_SEC / CHECK_SHARE))


async def _load(models: Watched, name: str, *, is_new: bool) -> None:
    text = "loading model '%s', which is new" if is_new else "reloading model '%s' because its files have changed"
    log.info(text, name, extra={"model": name})
    try:
        await (models.load(name) if is_new else models.reload(name))
    except InferenceError:
        # The load has logged its cause.
        text = "model '%s' was not %s; the next change of its files starts another %s"
        log.error(text, name, *(("loaded", "load") if is_new else ("reloaded", "reload")), extra={"model": name})
    except Exception:
        log.exception("model '%s' could not be loaded", name, extra={"model": name})


async def _unload(models: Watched, name: str) -> None:
    log.info("unloading model '%s' because its directory is gone", name, extra={"model": name})
    try:
        await models.unload(name)
    except Exception:
        log.exception("model '%s' could not be unloaded", name, extra={"model": name})
