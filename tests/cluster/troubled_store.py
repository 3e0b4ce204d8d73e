"""A store in trouble: `python -m cluster.troubled_store ADDRESS PORT MODE`.

`silent` accepts connections and never answers, `error` answers 500, and a port number forwards every connection
to the store at this port.
"""

import asyncio
import sys

from cluster.forwarder import pump

ERROR = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


async def main(address: str, port: int, mode: str) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if mode == "silent":
            await reader.read()
        elif mode == "error":
            # A client that begins with TLS gets the same answer, and no head of a request ends its message.
            await reader.read(1 << 16)
            writer.write(ERROR)
            await writer.drain()
        else:
            inner_reader, inner_writer = await asyncio.open_connection(address, int(mode))
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
            inner_writer.close()
        writer.close()

    async with await asyncio.start_server(connected, address, port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
