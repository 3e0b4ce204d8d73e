"""When one connection reads, and how much at a time.

The transport reads up to megabytes in one turn of the loop, and header blocks can take microseconds for each byte. So a
connection whose input takes long lets the others have their turn, and reads less at a time.
"""

import asyncio
from enum import IntFlag

TURN_S = 0.002
"""After input that took longer, the other connections have their turn."""

MIN_READ_BYTES = 4 << 10
"""Connections begin with this."""


class Pause(IntFlag):
    """Why a connection does not read."""

    NONE = 0
    UNSENT = 1
    """Its client does not take what is written."""
    LONG = 2
    """Its last input took long: the others are first in this turn of the loop."""
    UNREAD = 4
    """Bytes that the connection has read wait for its turn."""


class Reading:
    """Reads into `view`, which connections share. `room` is the part of it to receive into next."""

    __slots__ = ("_loop", "_pause", "_transport", "_view", "room")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, view: memoryview) -> None:
        self._transport = transport
        self._loop = loop
        self._view = view
        self._pause = Pause.NONE
        self.room = view[:MIN_READ_BYTES]

    def took(self, seconds: float) -> None:
        """Input was processed for `seconds`."""
        size = len(self.room)
        if seconds > TURN_S:
            self.room = self._view[: max(size // 2, MIN_READ_BYTES)]
            if not self._pause & Pause.LONG:
                self.pause(Pause.LONG)
                self._loop.call_soon(self.resume, Pause.LONG)
        elif size < len(self._view):
            self.room = self._view[: size * 2]

    def pause(self, reason: Pause) -> None:
        """Read nothing until `resume` with the same reason."""
        if not self._pause and not self._transport.is_closing():
            self._transport.pause_reading()
        self._pause |= reason

    def resume(self, reason: Pause) -> None:
        """Read again, unless there is another reason not to. No effect without a pause for this one."""
        if not self._pause & reason:
            return
        self._pause &= ~reason
        if not self._pause and not self._transport.is_closing():
            self._transport.resume_reading()
