"""Reads frames from the worker's socket.

Standard library only, for any CPython from 3.10 on.
"""

import socket
from collections import deque
from collections.abc import Callable

from halimede.channel.frames import HEADER

_RECEIVE_BYTES = 256 << 10
_DESCRIPTORS_BYTES = socket.CMSG_SPACE(4 * 64)
"""For a frame with the listening sockets of a front-end process. The kernel drops what does not fit."""


class ServerGoneError(Exception):
    """The server has closed the channel: the worker has nothing left to do."""


class FrameReader:
    """Reads frames. Not thread-safe: the caller holds a lock."""

    def __init__(self, channel: socket.socket, dispatch: Callable[[int, memoryview], None]) -> None:
        """`dispatch` gets the kind and the body of each frame. The body is writable memory of its own."""
        self._socket = channel
        self._dispatch = dispatch
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._views = (self._view,)
        self._start = 0
        self._end = 0
        self.descriptors: deque[int] = deque()
        """Descriptors that have arrived and belong to frames that are not dispatched yet, or are being dispatched."""

    def read(self, flags: int) -> None:
        """Read the socket once, and dispatch all frames that are complete then. ServerGoneError."""
        begun = self._end
        try:
            got, ancillary, _, _ = self._socket.recvmsg_into(
                (self._view[begun:],) if begun else self._views, _DESCRIPTORS_BYTES, flags
            )
        except BlockingIOError:
            return
        except OSError as error:
            raise ServerGoneError from error
        if not got:
            raise ServerGoneError
        if ancillary:
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    self.descriptors.extend(memoryview(data).cast("i"))
        if not begun and got >= HEADER.size:
            # The usual case: one complete frame.
            length, number = HEADER.unpack_from(self._buffer)
            if HEADER.size + length == got:
                # A copy of its own, because a model may keep its inputs, and may write to them.
                self._dispatch(number, memoryview(self._buffer[:got])[HEADER.size :])
                return
        self._end = begun + got
        self._take_frames()

    def _take_frames(self) -> None:
        while self._end - self._start >= HEADER.size:
            length, number = HEADER.unpack_from(self._buffer, self._start)
            whole = HEADER.size + length
            have = self._end - self._start
            copied = bytearray(whole)
            if have >= whole:
                copied[:] = self._view[self._start : self._start + whole]
                self._start += whole
            elif whole > _RECEIVE_BYTES // 2:
                copied[:have] = self._view[self._start : self._end]
                self._start = self._end
                self._fill(memoryview(copied)[have:])
            else:
                break
            self._dispatch(number, memoryview(copied)[HEADER.size :])
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start > _RECEIVE_BYTES // 2:
            rest = self._end - self._start
            self._buffer[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest

    def _fill(self, rest: memoryview) -> None:
        """Read the rest of a frame whose beginning has arrived."""
        while rest:
            try:
                got = self._socket.recv_into(rest)
            except OSError as error:
                raise ServerGoneError from error
            if not got:
                raise ServerGoneError
            rest = rest[got:]
