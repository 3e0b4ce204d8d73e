"""Writes to the server without blocking an event loop.

Standard library only, for any CPython from 3.10 on.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable

from halimede.core.types import Buffer


class LoopWriter:
    """Writes what fits. The rest waits here, and is written when the server reads. Runs on the loop's thread."""

    def __init__(self, channel: socket.socket, loop: asyncio.AbstractEventLoop, on_room: Callable[[], None]) -> None:
        """`on_room` is called when all that has waited is written."""
        self._socket = channel
        self._loop = loop
        self._on_room = on_room
        self._unsent: deque[Buffer] = deque()

    @property
    def is_blocked(self) -> bool:
        """Whether something waits for the server to read."""
        return bool(self._unsent)

    def write(self, data: Buffer) -> None:
        """Write data, now or later. OSError if the server has closed the channel."""
        if not self._unsent:
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._go_on)
        self._unsent.append(data)

    def _go_on(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                sent = self._socket.send(unsent[0], socket.MSG_DONTWAIT)
                if sent < len(unsent[0]):
                    unsent[0] = memoryview(unsent[0])[sent:]
                else:
                    unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            # The server has closed the channel, which the next read reports.
            unsent.clear()
        self._loop.remove_writer(self._socket.fileno())
        self._on_room()
