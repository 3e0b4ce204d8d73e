"""Looks at an address before grpc binds it: grpc says neither why it failed nor that it got only some of a name's
addresses, and it takes a unix socket away from a server that listens on it.

Errors are OSError `failed to start GRPC service: …`.
"""

import errno
import os
import socket
import stat

UNIX = "unix:"

_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


def cannot_listen(target: str, cause: str = "") -> OSError:
    """The error of an address that cannot be bound, for a cause that may be unknown."""
    return OSError(f"failed to start GRPC service: cannot listen on '{target}'{cause and f': {cause}'}")


def check_tcp(address: str, port: int, target: str, *, reuse_port: bool) -> None:
    """Raise unless the machine has an address of the name, and each that it has is free."""
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
            # In a container without IPv6, `localhost` has an address that is not there.
            if error.errno in _NOT_HERE:
                absent += 1
                continue
            raise _failure(error, target) from None
    if absent == len(places):
        raise cannot_listen(target, os.strerror(errno.EADDRNOTAVAIL))


def check_unix(target: str) -> None:
    """Raise unless `unix:<path>` is free; a socket on which nobody listens any more is removed."""
    path = target.removeprefix(UNIX)
    if not path:
        raise cannot_listen(target, "a path must follow")
    if os.path.lexists(path):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise cannot_listen(target, "there is something of that name that is no socket")
        _remove_abandoned(path, target)
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.bind(path)
        except OSError as error:
            raise _failure(error, target) from None
        os.unlink(path)


def _remove_abandoned(path: str, target: str) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        # A server that is too busy to accept must not hold up this one.
        caller.setblocking(False)
        error = caller.connect_ex(path)
    if error in (0, errno.EAGAIN):
        raise _in_use(target)
    if error != errno.ECONNREFUSED:
        raise cannot_listen(target, os.strerror(error))
    try:
        os.unlink(path)
    except OSError as failure:
        raise cannot_listen(target, f"its old socket cannot be removed: {failure.strerror}") from None


def _failure(error: OSError, target: str) -> OSError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(target)
    return cannot_listen(target, error.strerror or str(error))


def _in_use(target: str) -> OSError:
    return OSError(f"failed to start GRPC service: Socket '{target}' already in use")
