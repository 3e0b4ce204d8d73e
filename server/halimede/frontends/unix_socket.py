"""Addresses `unix:<path>`: their prefix, and the removal of a socket file whose server has ended."""

import errno
import os
import socket

UNIX = "unix:"


def remove_abandoned(path: str) -> None:
    """Remove a socket file without a listener. OSError: EADDRINUSE when a server listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        # A server that is too busy to accept is alive (EAGAIN); a blocking connect would delay this one.
        caller.setblocking(False)
        answer = caller.connect_ex(path)
    if answer in {0, errno.EAGAIN}:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if answer != errno.ECONNREFUSED:
        raise OSError(answer, os.strerror(answer))
    os.unlink(path)
