"""All front-end processes of a server, as its core sees them."""

import asyncio
import os
import socket
from collections.abc import Sequence

from halimede.backends.cores import available_cores
from halimede.core.hangs import BEAT_SECS
from halimede.facade.server import Server
from halimede.front_processes.main import Order
from halimede.front_processes.page import Page
from halimede.front_processes.process import FrontProcess
from halimede.frontends.sockets import SocketFile, bind, bound_port
from halimede.settings import Settings
from halimede.workers.frames.kinds import FrameKind
from halimede.workers.launcher import Launcher


def processes_for(cores: int) -> int:
    """How many front-end processes a machine with so many cores gets by default; 1 means none besides the core's.

    A request costs a front end about twice what it costs the core, so that a few of them keep the core busy.
    """
    if cores < 4:
        return 1
    return 2 if cores < 16 else 4


def wanted_processes(settings: Settings) -> int:
    """`--frontend-processes`, or the default for this machine."""
    return settings.frontend_processes or processes_for(available_cores())


class FrontProcesses:
    """Order of use: `bind_http` and `bind_grpc`, `start`, optionally `send_away`, `drain`, `close`."""

    def __init__(self, count: int, server: Server, settings: Settings, launcher: Launcher) -> None:
        """OSError if the system has no descriptor left."""
        self.count = count
        self._server = server
        self._settings = settings
        self._launcher = launcher
        self._descriptor = Page.create(count)
        self.page = Page(self._descriptor, count)
        self._http: list[socket.socket] = []
        self._grpc: list[socket.socket] = []
        self._files: list[SocketFile] = []
        self._processes: list[FrontProcess] = []
        self._next_beat: asyncio.TimerHandle | None = None

    def bind_http(self) -> int:
        """Bind HTTP's port and return it, 0 for a unix socket. OSError as `sockets.bind`."""
        settings = self._settings
        self._http = bind(settings.http_address, settings.http_port, "HTTP", reuse_port=settings.reuse_http_port)
        return self._bound(self._http)

    def bind_grpc(self) -> int:
        """Bind gRPC's port and return it, 0 for a unix socket. OSError as `sockets.bind`."""
        settings = self._settings
        self._grpc = bind(
            settings.grpc_address, settings.grpc_port, "GRPC", reuse_port=settings.reuse_grpc_port, any_family=True
        )
        return self._bound(self._grpc)

    def _bound(self, sockets: Sequence[socket.socket]) -> int:
        self._files += [file for sock in sockets if (file := SocketFile.of(sock)) is not None]
        return bound_port(sockets)

    async def start(self) -> None:
        """Start the processes and return when all serve. InferenceError if one fails."""
        self._beat()
        descriptors = (2, self._descriptor, *(sock.fileno() for sock in (*self._http, *self._grpc)))
        loop = asyncio.get_running_loop()
        for number in range(self.count):
            order = Order(self._settings, self._server.metadata(), number, self.count, len(self._http), len(self._grpc))
            self._processes.append(FrontProcess(order, descriptors, self.page, self._server, self._launcher, loop))
        await asyncio.gather(*(process.start() for process in self._processes))

    def note_change(self) -> None:
        """The models that serve change in this turn of the loop, or the state of the server has changed."""
        self.page.note_change()
        if self._server.is_draining():
            self._publish_state()
        else:
            # A change of models has several steps, in one turn of the loop. Loads are answered later.
            asyncio.get_running_loop().call_soon(self._publish_state)

    def dropped_lines(self) -> int:
        """Log lines that front-end processes dropped."""
        return self.page.dropped_lines() + sum(process.lost_lines for process in self._processes)

    def reopen_log(self) -> None:
        """Let the processes reopen their log file."""
        for process in self._processes:
            process.tell(FrameKind.REOPEN)

    def send_away(self) -> None:
        """Continue to serve, while clients are asked to connect elsewhere."""
        for process in self._processes:
            process.send_away()

    async def drain(self) -> None:
        """Close the ports, and return when all requests are answered and all connections closed."""
        for process in self._processes:
            process.stop_keeping()
            process.tell(FrameKind.DRAIN)
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
        for sock in (*self._http, *self._grpc):
            sock.close()
        self._files.clear()
        self._http, self._grpc = [], []
