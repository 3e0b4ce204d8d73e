"""Accepting connections on one listening socket, also when the process has no file descriptors left.

The event loop's own accepting is not enough. Without descriptors libuv closes connections silently, or calls an error
handler in a loop when it has lost its reserve; asyncio stops for a second and logs each time. Accepting here costs some
15 us of CPU per connection.

    OPEN     accepts connections, some per turn of the loop
    OPEN without descriptors: a reserved descriptor takes one connection at a time and answers that it is refused
    PAUSED   the reserve is used too, or the socket failed: no accepting for RETRY_S      -> OPEN
    YIELDING another process has fewer connections: no accepting for YIELD_S, then one -> OPEN
    CLOSED   by `close`
"""

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from halimede.frontends.sockets import BACKLOG

RETRY_S = 0.05
YIELD_S = 0.002
"""How long a connection is left to a process with fewer ones."""
MORE_FILES = "a larger `ulimit -n` is right"
_PER_TURN = 16
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
# Errors of a connection that ended before it was accepted, not of the listening socket (accept(2)).
_PASSING = {
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.EPERM,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENONET,
    errno.ENOPROTOOPT,
    errno.EOPNOTSUPP,
    errno.EINTR,
}
_READ_AT_ONCE = 64 << 10


def refuse_connection(connection: socket.socket, answer: bytes) -> None:
    """Send an answer to a connection that is not served, and close it."""
    with connection, suppress(OSError):
        connection.setblocking(False)
        connection.send(answer)
        connection.shutdown(socket.SHUT_WR)
        # Closing with unread input would reset the connection before the client reads the answer.
        connection.recv(_READ_AT_ONCE)


class ConnectionAcceptor:
    """Passes each accepted socket, which is not blocking, to `take`.

    `on_shortage` is called with the reason each time that a connection cannot be accepted. It returns the answer for
    the client.
    """

    def __init__(
        self,
        sock: socket.socket,
        take: Callable[[socket.socket], None],
        on_shortage: Callable[[str], bytes],
        is_ours: Callable[[], bool] | None = None,
    ) -> None:
        """`is_ours` is for a socket that several processes have: whether this one should take the next connection."""
        self._is_ours = is_ours
        self._sock = sock
        self._take = take
        self._on_shortage = on_shortage
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._reserve = _open_reserve()
        self._loop.add_reader(sock, self._accept_some)

    def accept_all(self) -> None:
        """Accept every connection in the kernel's queue."""
        for _ in range(BACKLOG + 1):
            if (self._retry is not None and self._is_ours is None) or not self._accept_one():
                return

    def close(self) -> None:
        """Stop; the listening socket is closed. A second call does nothing."""
        if self._sock.fileno() < 0:
            return
        if self._retry is None:
            self._loop.remove_reader(self._sock)
        else:
            self._retry.cancel()
        self._sock.close()
        if self._reserve is not None:
            os.close(self._reserve)

    def _accept_some(self) -> None:
        if self._is_ours is not None:
            # One at a time, so that the counts are right when the next one comes.
            if self._is_ours():
                self._accept_one()
            else:
                self._stop_for(YIELD_S)
            return
        for _ in range(_PER_TURN):
            if not self._accept_one():
                return

    def _accept_one(self) -> bool:
        """Accept one connection. Returns whether there may be more."""
        try:
            connection, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _PASSING:
                return True
            if error.errno in _OUT_OF_DESCRIPTORS:
                return self._refuse_one(f"{os.strerror(error.errno)}; {MORE_FILES}")
            self._pause(str(error))
            return False
        connection.setblocking(False)
        self._take(connection)
        return True

    def _refuse_one(self, reason: str) -> bool:
        if self._reserve is None:
            self._pause(reason)
            return False
        os.close(self._reserve)
        self._reserve = None
        try:
            connection, _ = self._sock.accept()
        except BlockingIOError:
            return False
        except OSError:  # another thread took the descriptor first
            self._pause(reason)
            return False
        else:
            refuse_connection(connection, self._on_shortage(reason))
            return True
        finally:
            self._reserve = _open_reserve()

    def _pause(self, reason: str) -> None:
        """Stop accepting for RETRY_S: the loop would call again at once, without effect."""
        self._on_shortage(reason)
        self._stop_for(RETRY_S)

    def _stop_for(self, secs: float) -> None:
        self._loop.remove_reader(self._sock)
        self._retry = self._loop.call_later(secs, self._resume)

    def _resume(self) -> None:
        self._retry = None
        if self._is_ours is not None:
            # The processes with fewer connections are busy, or gone.
            self._accept_one()
        if self._retry is not None:
            return
        if self._reserve is None:
            self._reserve = _open_reserve()
        self._loop.add_reader(self._sock, self._accept_some)


def _open_reserve() -> int | None:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
