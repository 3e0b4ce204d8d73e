"""Forwards ports of the machine's loopback into the cluster's network: `python -m cluster.forwarder SOCKET`.

A socket belongs to the network namespace in which it was created. So other processes create listening sockets outside
and send them to this process, which runs inside and connects from there.
"""

import asyncio
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.commands import listen

BLOCK_BYTES = 1 << 16


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything from one side to the other, then the end of it."""
    with suppress(OSError):
        while block := await reader.read(BLOCK_BYTES):
            writer.write(block)
            await writer.drain()
    with suppress(OSError, RuntimeError):
        writer.write_eof()


class Doors:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._servers: list[asyncio.Server] = []

    def open(self, order: Any, descriptors: list[int]) -> None:
        """From the one listening socket that came along to `host` and `port`."""
        (descriptor,) = descriptors
        outside = socket.socket(fileno=descriptor)
        asyncio.run_coroutine_threadsafe(self._open(outside, order["host"], order["port"]), self._loop).result()

    async def _open(self, outside: socket.socket, host: str, port: int) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner_reader, inner_writer = await asyncio.open_connection(host, port)
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
            for each in (writer, inner_writer):
                each.close()

        self._servers.append(await asyncio.start_server(connected, sock=outside))


async def main() -> None:
    listen(Path(sys.argv[1]), Doors(asyncio.get_running_loop()).open)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
