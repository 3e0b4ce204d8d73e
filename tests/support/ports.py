"""Ports for servers that need a fixed port."""

import secrets
import socket

LOWEST, COUNT = 10_000, 20_000


def free_port() -> int:
    """A port without a listener. It is below 32768, so that no client connection of another test gets it."""
    while True:
        port = LOWEST + secrets.randbelow(COUNT)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
