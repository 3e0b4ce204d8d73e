"""Check an address before grpc binds it. grpc reports neither why binding failed nor that it bound only some addresses
of a name, and it replaces a unix socket on which another server listens.

Errors are OSError `failed to start GRPC service: …`.
"""

import errno
import os
import socket
import stat

from halimede.frontends.unix_socket import UNIX, remove_abandoned

_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def cannot_listen(target: str, cause: str = "") -> OSError:
    """The error for an address that cannot be bound; `cause` is "" if unknown."""
    return OSError(f"failed to start GRPC service: cannot listen on '{target}'{cause and f': {cause}'}")


def check_tcp(address: str, port: int, target: str, *, reuse_port: bool) -> None:
    """Raise unless the machine has an address of this name, and all of those that it has are free."""
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"failed to start GRPC service: address '{address}': {error.strerror}") from None
    absent = 0
    for family, kind, protocol, _, place in places:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                probe.bind(place)
        except OSError as error:
            # In a container without IPv6, `localhost` resolves to an address that does not exist.
            if error.errno in _NOT_HERE:
                absent += 1
                continue
            raise _failure(error, target) from None
    if absent == len(places):
        raise cannot_listen(target, os.strerror(errno.EADDRNOTAVAIL))


def check_unix(target: str) -> None:
    """Raise unless `unix:<path>` is free; a stale socket, on which no process listens, is removed."""
    path = target.removeprefix(UNIX)
    if not path:
        raise cannot_listen(target, "a path must follow")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise cannot_listen(target, "a file of that name exists and is not a socket")
        try:
            remove_abandoned(path)
        except OSError as error:
            raise _failure(error, target) from None
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(path)
        except OSError as error:
            raise _failure(error, target) from None
        os.unlink(path)


def _failure(error: OSError, target: str) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(target)
    return cannot_listen(target, error.strerror or str(error))


def _in_use(target: str) -> OSError:
    return OSError(f"failed to start GRPC service: Socket '{target}' already in use")
