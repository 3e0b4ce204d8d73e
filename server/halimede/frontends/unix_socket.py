"""Addresses `unix:<path>`: their prefix, and the removal of the socket file of a stopped server."""

import errno
import os
import socket

UNIX = "unix:"


def remove_abandoned(path: str) -> None:
    """Remove a socket file without a listening process. OSError (EADDRINUSE) if a process listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        # A server that is too busy to accept is alive (EAGAIN), and must not hold up this one.
        caller.setblocking(False)
        answer = caller.connect_ex(path)
    if answer in {0, errno.EAGAIN}:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if answer != errno.ECONNREFUSED:
        raise OSError(answer, os.strerror(answer))
    os.unlink(path)
