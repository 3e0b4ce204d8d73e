"""All front-end processes of a server, as its core sees them."""

import asyncio
import os
import socket
from collections.abc import Mapping
from itertools import chain

from halimede.backends.cores import available_cores
from halimede.core.hangs import BEAT_SECS
from halimede.core.observe.start_summary import GRPC, HTTP
from halimede.facade.server import Server
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.main import Order
from halimede.front_processes.page import Page
from halimede.front_processes.process import FrontProcess
from halimede.front_processes.services import bind_port
from halimede.frontends.sockets import SocketFile
from halimede.processes.launcher import Launcher
from halimede.settings import Settings


def processes_for(cores: int) -> int:
    """How many front-end processes a machine with so many cores gets by default; 1 means none besides the core's.

    A request costs a front end about twice what it costs the core, so that a few of them keep the core busy.
    """
    if cores < 4:
        return 1
    return 2 if cores < 16 else 4


def wanted_processes(settings: Settings) -> int:
    """The number of front-end processes: `--frontend-processes`, or the default for this machine; 0 if the core's
    process does their work."""
    count = settings.frontend_processes or processes_for(available_cores())
    return count if count > 1 and (settings.allow_http or settings.allow_grpc) else 0


class FrontProcesses:
    """Implements `services.Service` with HTTP and gRPC in processes of their own."""

    def __init__(self, count: int, server: Server, settings: Settings, launcher: Launcher) -> None:
        """OSError if the system has no descriptor left."""
        self.count = count
        self._server = server
        self._settings = settings
        self._launcher = launcher
        self._descriptor = Page.create(count)
        self.page = Page(self._descriptor, count)
        self._sockets: dict[str, list[socket.socket]] = {}
        """By the name of the service in the log."""
        self._files: list[SocketFile] = []
        self._processes: list[FrontProcess] = []
        self._next_beat: asyncio.TimerHandle | None = None

    def bind(self) -> Mapping[str, str]:
        settings, addresses = self._settings, {}
        for name, is_allowed in ((HTTP, settings.allow_http), (GRPC, settings.allow_grpc)):
            if is_allowed:
                self._sockets[name], addresses[name] = bind_port(name, settings)
                self._files += [file for sock in self._sockets[name] if (file := SocketFile.of(sock)) is not None]
        return addresses

    async def start(self) -> None:
        """Start the processes and return when all serve. InferenceError if one fails."""
        self._beat()
        descriptors = (2, self._descriptor, *(sock.fileno() for sock in chain(*self._sockets.values())))
        counts = {name: len(each) for name, each in self._sockets.items()}
        loop = asyncio.get_running_loop()
        for number in range(self.count):
            order = Order(self._settings, self._server.metadata(), number, self.count, counts)
            self._processes.append(FrontProcess(order, descriptors, self.page, self._server, self._launcher, loop))
        await asyncio.gather(*(process.start() for process in self._processes))

    def note_change(self) -> None:
        self.page.note_change()
        if self._server.is_draining():
            self._publish_state()
        else:
            # A change of models has several steps, in one turn of the loop. Loads are answered later.
            asyncio.get_running_loop().call_soon(self._publish_state)

    def dropped_lines(self) -> int:
        return self.page.dropped_lines() + sum(process.lost_lines for process in self._processes)

    def reopen_log(self) -> None:
        for process in self._processes:
            process.tell(FrontFrame.REOPEN)

    def send_away(self) -> None:
        for process in self._processes:
            process.send_away()

    async def drain(self) -> None:
        """Close the ports, and return when all requests are answered and all connections closed."""
        for process in self._processes:
            process.stop_keeping()
            process.tell(FrontFrame.DRAIN)
        self._close_sockets()
        await asyncio.gather(*(process.drained() for process in self._processes))

    async def close(self) -> None:
        """End the processes, and close the ports. A second call has no effect."""
        self._close_sockets()
        if self._next_beat is not None:
            self._next_beat.cancel()
        processes, self._processes = self._processes, []
        await asyncio.gather(*(process.close() for process in processes))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _beat(self) -> None:
        """Show that the core runs. What becomes ready or not without `note_change` is seen by then: the process of an
        instance ends or is back."""
        self.page.beat_core()
        self._publish_state()
        self._next_beat = asyncio.get_running_loop().call_later(BEAT_SECS, self._beat)

    def _publish_state(self) -> None:
        self.page.publish_state(is_ready=self._server.is_ready(), is_draining=self._server.is_draining())

    def _close_sockets(self) -> None:
        for file in self._files:
            file.remove()
        for sock in chain(*self._sockets.values()):
            sock.close()
        self._files.clear()
        self._sockets.clear()
