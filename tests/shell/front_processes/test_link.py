"""The core's end of the channel to a front end."""

import asyncio
import socket
from typing import cast

import pytest

from halimede.channel.frames import encode_frame
from halimede.facade.server import Server
from halimede.front_processes.frames import FrontFrame
from halimede.front_processes.link import FrontLink
from support.ensemble_bench import PlayedServer
from support.loops import in_a_loop


@in_a_loop
async def test_closing_the_link_closes_the_channel():
    ours, theirs = socket.socketpair()
    reasons: list[str] = []
    link = FrontLink(ours, cast("Server", PlayedServer()), reasons.append, asyncio.get_running_loop())
    link.close()
    link.close()
    theirs.settimeout(10)
    assert theirs.recv(1) == b""
    assert reasons == []
    theirs.close()


@pytest.mark.parametrize("body", [b"\1\0\0\0\xff[]", b'\1\0\0\0\1["m"]'], ids=["question", "arguments"])
def test_a_process_that_asks_what_it_cannot_is_ended(body: bytes):
    async def main() -> str:
        ours, theirs = socket.socketpair()
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        FrontLink(ours, cast("Server", PlayedServer()), lost.set_result, asyncio.get_running_loop())
        theirs.sendall(encode_frame(FrontFrame.ASK, body))
        async with asyncio.timeout(20):
            reason = await lost
        theirs.close()
        return reason

    assert asyncio.run(main()).startswith("it sent garbage: ASK: ")
