"""A connection to the real code of a worker."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from halimede.backends.hosting import HostedRequest, Reply
from halimede.channel.server_end.memory import ARENA_BYTES
from support.channel import (
    LIMIT_S,
    HonestWorker,
    Script,
    Stage,
    echo,
    stage,
)


@asynccontextmanager
async def working(
    run: Callable[[Sequence[HostedRequest]], list[Reply]] = echo, arena_bytes: int = ARENA_BYTES
) -> AsyncIterator[tuple[Stage, HonestWorker]]:
    """Start a worker, and check that it ends normally."""
    async with stage(arena_bytes) as each:
        worker = HonestWorker(os.dup(each.worker_end.fileno()), lambda _: Script(run))
        each.worker_end.close()
        try:
            yield each, worker
            assert each.lost == []
            await asyncio.wait_for(each.connection.stop(), LIMIT_S)
        finally:
            each.connection.close()
            await asyncio.to_thread(worker.join, LIMIT_S)
        assert worker.failure is None
        assert not worker.is_alive()
        del worker.memory, worker.channel, worker.host
