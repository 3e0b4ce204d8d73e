"""Listening sockets: TCP addresses and `unix:<path>`, with the options that accepted sockets inherit."""

import errno
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass

from halimede.core.types import ErrorCode, InferenceError
from halimede.frontends.unix_socket import UNIX, remove_abandoned

BACKLOG = 1024
# A connection whose peer vanished is closed within two minutes: an idle one by the probes, one with unsent data by the
# last option.
_VANISHED = (
    (socket.TCP_KEEPIDLE, 60),
    (socket.TCP_KEEPINTVL, 15),
    (socket.TCP_KEEPCNT, 4),
    (socket.TCP_USER_TIMEOUT, 120_000),
)


def bind(address: str, port: int, service: str, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket on `address`:`port`; port 0 takes a free one (`getsockname()[1]`).

    `unix:<path>` has no port. A socket file without a listener is replaced; any other file stays.
    With `reuse_port` several servers may share a TCP port. UNAVAILABLE
    `failed to start <service> service: Socket '<address>:<port>' already in use` (or the other reason) on failure.
    """
    is_unix = address.startswith(UNIX)
    try:
        return _bind_unix(address.removeprefix(UNIX)) if is_unix else _bind_tcp(address, port, reuse_port)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "already in use" if in_use else f"cannot be opened: {error.strerror or error}"
        name = address if is_unix else f"{address}:{port}"
        raise InferenceError(
            ErrorCode.UNAVAILABLE, f"failed to start {service} service: Socket '{name}' {reason}"
        ) from None


def bound_port(sock: socket.socket) -> int:
    """The port of a listening socket, 0 for a unix socket."""
    return 0 if sock.family is socket.AF_UNIX else int(sock.getsockname()[1])


@dataclass(frozen=True, slots=True)
class SocketFile:
    """The file of a unix socket, identified by its inode."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, sock: socket.socket) -> "SocketFile | None":
        """The file of a bound socket, None for TCP."""
        if sock.family is not socket.AF_UNIX:
            return None
        path = sock.getsockname()
        found = os.lstat(path)
        return cls(path, found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Remove the file unless it is gone or replaced by another."""
        with suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)


def _bind_tcp(address: str, port: int, reuse_port: bool) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option, value in _VANISHED:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setblocking(False)
        sock.bind(where)
        # At once, because Linux lets two sockets bind one port as long as neither listens.
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    if not path:
        raise OSError(errno.EINVAL, "unix: has no path after it")
    _make_room(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.bind(path)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _make_room(path: str) -> None:
    """Remove the socket file of a server that has ended. OSError when a server listens there, or it is another file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "another file of this name exists and is not a socket")
    remove_abandoned(path)
