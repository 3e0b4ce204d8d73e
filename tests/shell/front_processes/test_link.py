"""The core's end of the channel to a front end."""

import asyncio
import socket
from typing import cast

from halimede.facade.server import Server
from halimede.front_processes.link import FrontLink
from support.ensemble_bench import PlayedServer


def test_closing_the_link_closes_the_channel():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reasons: list[str] = []
        link = FrontLink(ours, cast("Server", PlayedServer()), reasons.append, asyncio.get_running_loop())
        link.close()
        link.close()
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
        assert reasons == []
        theirs.close()

    asyncio.run(main())
