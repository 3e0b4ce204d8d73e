"""One front-end process: its start, and its restarts when it dies."""

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from enum import IntEnum
from functools import partial

from halimede.core.restarts import describe_exit
from halimede.core.types import InferenceError
from halimede.core.types.error import describe, internal, unavailable
from halimede.facade.server import Server
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.link import FrontLink
from halimede.front_processes.main import Order
from halimede.front_processes.page import Page
from halimede.front_processes.values import encode
from halimede.processes.launcher import Launcher, WorkerProcess
from halimede.processes.output import OutputReader

log = logging.getLogger(__name__)

ENTRY = "halimede.front_processes.main:main"
PRELOAD = "halimede.front_processes.main:preload"

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
LONG_LIFE_S = 60.0
"""The pause before a restart doubles with each death of a process that lived for less."""

END_S = 5.0
"""How long a process may take to end once its channel is closed."""


class FrontProcess:
    """One member of the pool of front-end processes, with its present process."""

    def __init__(
        self,
        order: Order,
        descriptors: tuple[int, ...],
        page: Page,
        server: Server,
        launcher: Launcher,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`descriptors` are those of `Order`; the caller keeps them open until `close`."""
        self._order = order
        self._descriptors = descriptors
        self._page = page
        self._server = server
        self._launcher = launcher
        self._loop = loop
        self.link: FrontLink | None = None
        self._process: WorkerProcess | None = None
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._is_leaving = False
        self.lost_lines = 0
        """Log lines that former processes of this member dropped."""

    async def start(self) -> None:
        """Start the process and return when it serves; it is kept running from then on. InferenceError if it fails."""
        await self._start()
        self._keeping = self._loop.create_task(self._keep())

    def stop_keeping(self) -> None:
        """Do not start the process again when it ends."""
        if self._keeping is not None:
            self._keeping.cancel()

    def send_away(self) -> None:
        """Continue to serve, while clients are asked to connect elsewhere; also after a restart."""
        self._is_leaving = True
        self.tell(FrontFrame.LEAVE)

    def tell(self, kind: IntEnum) -> None:
        """Send LEAVE, DRAIN or REOPEN, if there is a process."""
        if self.link is not None:
            self.link.tell(kind)

    async def drained(self) -> None:
        """Return when the process has no connection left, or has ended; at once if it never served."""
        if self.link is not None and self._keeping is not None:
            await self.link.drained()

    async def close(self) -> None:
        """End the process."""
        self.stop_keeping()
        if self._keeping is not None:
            await asyncio.wait((self._keeping,))
        await self._end()

    async def _start(self) -> None:
        self._lost.clear()
        process = await asyncio.to_thread(
            self._launcher.spawn,
            f"front-end-{self._order.process}",
            entry=ENTRY,
            preload=PRELOAD,
            beats=partial(self._page.beats, self._order.process),
        )
        self._process = process
        about = {"frontend": str(self._order.process)}
        self._output = OutputReader(process.output, "front end", about, self._loop)
        self.link = FrontLink(process.channel, self._server, self._on_lost, self._loop, self._launcher.memory)
        try:
            await self.link.start(encode(Order, self._order), _duplicates(self._descriptors))
        except asyncio.CancelledError:
            if not self._lost.is_set():
                raise
            why = describe_exit(await process.wait())
            await self._end()
            raise internal(f"a front-end process ended by {why} while it started") from None
        except OSError as error:
            await self._end()
            raise unavailable(f"a front-end process cannot be started: {error.strerror or error}") from error
        except InferenceError:
            await self._end()
            raise
        if self._is_leaving:
            self.tell(FrontFrame.LEAVE)

    def _on_lost(self, _reason: str) -> None:
        self._lost.set()

    async def _keep(self) -> None:
        """Start the process again whenever it has ended."""
        pause = FIRST_PAUSE_S
        while True:
            begun = self._loop.time()
            await self._lost.wait()
            process = self._process
            why = "an unknown cause"
            if process is not None:
                process.kill(signal.SIGKILL)
                why = describe_exit(await process.wait())
            await self._end()
            log.error(
                "front-end process %d ended by %s: its connections are lost, and it is started again",
                self._order.process,
                why,
            )
            if self._loop.time() - begun > LONG_LIFE_S:
                pause = FIRST_PAUSE_S
            while self.link is None:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                try:
                    await self._start()
                except InferenceError as error:
                    log.error("%s", error)
                except Exception as error:  # noqa: BLE001  only this task would try again
                    # The machine has no memory or no thread left.
                    log.error("a front-end process cannot be started: %s", describe(error))
                    await self._end()
                else:
                    log.info("front-end process %d serves again", self._order.process)

    async def _end(self) -> None:
        link, self.link = self.link, None
        process, self._process = self._process, None
        if link is not None:
            link.close()
        if process is not None:
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill(signal.SIGKILL)
                await process.wait()
            self._output.close()
            process.close()
        self._page.clear(self._order.process)
        self.lost_lines += self._page.keep_dropped_lines(self._order.process)


def _duplicates(descriptors: Sequence[int]) -> tuple[int, ...]:
    """Duplicates of all descriptors, or none. OSError."""
    made: list[int] = []
    try:
        for each in descriptors:
            made.append(os.dup(each))  # noqa: PERF401  the finished ones are closed after an error
    except OSError:
        for each in made:
            os.close(each)
        raise
    return tuple(made)
