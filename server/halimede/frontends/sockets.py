"""Listening sockets: TCP addresses and `unix:<path>`, with the options that accepted sockets inherit."""

import errno
import os
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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
# In a container without IPv6, `localhost` resolves to an address that does not exist.
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_ANY_IPV4 = "0.0.0.0"
_ANY_IPV6 = "::"
_FREE_PORT_ATTEMPTS = 10

SocketAddress = tuple[int, tuple[str | int, ...]]
"""The family and the address of a socket, without its port."""


def bind(
    address: str, port: int, service: str, *, reuse_port: bool = False, any_family: bool = False
) -> list[socket.socket]:
    """Listening sockets on each address of this machine that `address` names, all on one port; port 0 is any free one.

    `unix:<path>` has no port. A socket file without a listener is replaced; any other file stays. With `reuse_port`
    several servers may share a TCP port. The wildcard `::` also serves IPv4 clients; with `any_family`, `0.0.0.0` also
    serves IPv6 clients, as in grpc. OSError `failed to start <service> service: Socket '<address>:<port>' already in
    use`, or with another reason.
    """
    try:
        if address.startswith(UNIX):
            return [_bind_unix(address)]
        return _bind_tcp(address, port, reuse_port, any_family)
    except OSError as error:
        raise OSError(f"failed to start {service} service: {error}") from None


def bound_port(sockets: Sequence[socket.socket]) -> int:
    """The port of sockets that `bind` made, 0 for a unix socket."""
    return 0 if sockets[0].family is socket.AF_UNIX else int(sockets[0].getsockname()[1])


def release(sockets: Sequence[socket.socket]) -> None:
    """Close sockets of `bind` that no server has taken, and remove their files."""
    for sock in sockets:
        if (file := SocketFile.of(sock)) is not None:
            file.remove()
        sock.close()


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


def _bind_tcp(address: str, port: int, reuse_port: bool, any_family: bool) -> list[socket.socket]:
    names = (_ANY_IPV6, _ANY_IPV4) if any_family and address == _ANY_IPV4 else (address,)
    addresses = list(dict.fromkeys(address for name in names for address in _resolve(name)))
    try:
        return bind_addresses(addresses, port, reuse_port=reuse_port)
    except OSError as error:
        raise _failure(error, f"[{address}]:{port}" if ":" in address else f"{address}:{port}") from None


def _resolve(name: str) -> list[SocketAddress]:
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"address '{name}': {error.strerror}") from None
    except UnicodeError:
        raise OSError(f"address '{name}': not a host name") from None
    return [(family, (host, *rest)) for family, _, _, _, (host, _, *rest) in found]


def bind_addresses(addresses: Sequence[SocketAddress], port: int, *, reuse_port: bool = False) -> list[socket.socket]:
    """Listening sockets at the addresses that this machine has, all on one port. OSError if it has none."""
    attempts = _FREE_PORT_ATTEMPTS if port == 0 else 1
    while True:
        attempts -= 1
        try:
            return _bind_each(addresses, port, reuse_port)
        except OSError as error:
            # The port that is free at the first address may be in use at another one.
            if error.errno != errno.EADDRINUSE or not attempts:
                raise


def _bind_each(addresses: Sequence[SocketAddress], port: int, reuse_port: bool) -> list[socket.socket]:
    bound: list[socket.socket] = []
    is_any = False
    try:
        for family, (host, *rest) in addresses:
            if is_any and family == socket.AF_INET:
                continue
            try:
                sock = _listen(family, (host, bound_port(bound) if bound else port, *rest), reuse_port)
            except OSError as error:
                if error.errno in _NOT_HERE:
                    continue
                raise
            bound.append(sock)
            is_any = is_any or host == _ANY_IPV6
        if not bound:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    except BaseException:
        for sock in bound:
            sock.close()
        raise
    return bound


def _listen(family: int, where: tuple[str | int, ...], reuse_port: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # For the wildcard, so that it does not depend on the machine's settings whether IPv4 clients are served.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
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


def _bind_unix(target: str) -> socket.socket:
    path = target.removeprefix(UNIX)
    if not path:
        raise OSError(f"cannot listen on '{target}': a path must follow")
    try:
        _make_room(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.bind(path)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        raise _failure(error, target) from None
    return sock


def _make_room(path: str) -> None:
    """Remove the socket file of a server that has ended. OSError when a server listens there, or it is another file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, "a file of that name exists and is not a socket")
    remove_abandoned(path)


def _failure(error: OSError, target: str) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return OSError(f"Socket '{target}' already in use")
    return OSError(f"cannot listen on '{target}': {error.strerror or error}")
