"""When one connection reads, and how much at a time.

The transport reads up to megabytes in one turn of the loop, and header blocks can take microseconds for each byte. So a
connection whose input takes long lets the others have their turn, and reads less at a time.
"""

import asyncio

TURN_S = 0.002
"""After input that took longer, the other connections have their turn."""

MIN_READ_BYTES = 4 << 10
"""Connections begin with this."""


class Reading:
    """Reads into `view`, which connections share. `room` is the part of it to receive into next."""

    __slots__ = ("_gives_way", "_is_blocked", "_loop", "_transport", "_view", "room")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, view: memoryview) -> None:
        self._transport = transport
        self._loop = loop
        self._view = view
        self._gives_way = False
        self._is_blocked = False
        self.room = view[:MIN_READ_BYTES]

    def took(self, seconds: float) -> None:
        """Input was processed for `seconds`."""
        size = len(self.room)
        if seconds > TURN_S:
            self.room = self._view[: max(size // 2, MIN_READ_BYTES)]
            self._give_way()
        elif size < len(self._view):
            self.room = self._view[: size * 2]

    def block(self) -> None:
        """Read nothing until `unblock`."""
        self._is_blocked = True
        self._transport.pause_reading()

    def unblock(self) -> None:
        """Read again."""
        self._is_blocked = False
        self._read_on()

    def _give_way(self) -> None:
        if not self._gives_way and not self._transport.is_closing():
            self._gives_way = True
            self._transport.pause_reading()
            self._loop.call_soon(self._turn_over)

    def _turn_over(self) -> None:
        self._gives_way = False
        self._read_on()

    def _read_on(self) -> None:
        if not self._gives_way and not self._is_blocked and not self._transport.is_closing():
            self._transport.resume_reading()
