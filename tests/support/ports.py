"""Ports for servers that must be told theirs."""

import secrets
import socket

LOWEST, COUNT = 10_000, 20_000


def free_port() -> int:
    """Nobody listens there, and no connection that another test opens meanwhile gets it: those are numbered from 32768 on."""
    while True:
        port = LOWEST + secrets.randbelow(COUNT)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
