"""How a process ended is what is said of it, even if its channel closes before that is known."""

import asyncio
import os
import socket
from typing import cast

from halimede.core.restarts import ProcessExit
from halimede.processes.launcher import WorkerProcess
from halimede.workers.supervision.completion import NO_OWNERS
from halimede.workers.supervision.life import Life
from support.channel import OUTPUTS, SPEC


class ReportedLate:
    """A process whose end is reported some turns of the loop after it was killed."""

    def __init__(self) -> None:
        self.channel, self.its_end = socket.socketpair()
        self.output, self._its_output = os.pipe()
        os.set_blocking(self.output, False)
        self._killed = asyncio.Event()

    def kill(self, _signal_number: int) -> None:
        self._killed.set()

    async def wait(self) -> ProcessExit:
        await self._killed.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        return ProcessExit(signal=9)

    def close(self) -> None:
        self.its_end.close()
        os.close(self.output)
        os.close(self._its_output)


def test_the_signal_that_ended_a_process_is_awaited_after_its_channel_closed():
    async def main() -> str:
        process = ReportedLate()
        life = Life(cast("WorkerProcess", process), SPEC, OUTPUTS, NO_OWNERS, asyncio.get_running_loop())
        process.its_end.shutdown(socket.SHUT_RDWR)
        try:
            return await life.wait_end()
        finally:
            await life.end()

    assert asyncio.run(main()) == "signal 9"
