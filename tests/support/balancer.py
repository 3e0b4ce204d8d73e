"""A Service without Kubernetes: one address; new connections go to the servers in turn."""

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

BLOCK_BYTES = 1 << 16


class Balancer:
    """Serves `url` until the end of its `with`. `lead_to` does not move existing connections.

    `connections` were accepted; `upstream_bytes` of clients and `downstream_bytes` of servers have passed.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        self.lead_to(ports)
        self._lock = threading.Lock()
        self.connections = self.upstream_bytes = self.downstream_bytes = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not end an accept.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def lead_to(self, ports: Sequence[int]) -> None:
        """Send new connections to these ports."""
        self._next = itertools.cycle(ports)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connections += 1
                try:
                    server = socket.create_connection(("127.0.0.1", next(self._next)))
                except OSError:
                    client.close()
                    continue
                threading.Thread(target=self._connect, args=(client, server), daemon=True).start()

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(server, client, self._count_downstream), daemon=True)
            back.start()
            _pump(client, server, self._count_upstream)
            back.join()

    def _count_upstream(self, size: int) -> None:
        with self._lock:
            self.upstream_bytes += size

    def _count_downstream(self, size: int) -> None:
        with self._lock:
            self.downstream_bytes += size


def _pump(source: socket.socket, target: socket.socket, count: Callable[[int], None]) -> None:
    """Copy bytes until the source ends. Then the target's side ends too, or both sides if a connection was reset."""
    try:
        while block := source.recv(BLOCK_BYTES):
            count(len(block))
            target.sendall(block)
        # Not both: a side that still sends would be reset, and lose what it has not read.
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
