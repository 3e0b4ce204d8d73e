"""Floods a server from within its event loop, and measures the loop's turns and in which of them a client is answered."""

import asyncio
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time

LONGEST_S = 0.03
"""The CPU time of the longest turn. The goal is 20 ms: this leaves room for garbage collections, and for machines that
are shared. Without turns most floods of the tests take 40 to 300 ms."""

AFTER_TURNS = 100
"""So many turns are measured after the answer, and after the end of the attackers' connections."""


@dataclass
class Flood:
    """What a flood did: after how many turns the client was answered, and the CPU time of the longest turn."""

    turns: int = 0
    longest_s: float = 0.0


class TurnMeter:
    """`attackers` and `client` are connections that the server has accepted.

    In one turn all attackers send, and after them the client. When it is answered the attackers leave, all at once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        attackers: Sequence[socket.socket],
        data: bytes,
        client: socket.socket,
        request: bytes,
    ) -> None:
        for each in (*attackers, client):
            each.setblocking(False)
        self._loop = loop
        self._attackers = attackers
        self._data = data
        self._client = client
        self._request = request
        self._turn = 0
        self._left_at = 0
        self._began = 0.0
        self._is_over = threading.Event()
        self._flood = Flood()

    def measure(self) -> Flood:
        """Run the flood."""
        self._loop.call_soon_threadsafe(self._send)
        assert self._is_over.wait(30), f"not answered in {self._turn} turns"
        return self._flood

    def _send(self) -> None:
        for each in self._attackers:
            each.send(self._data)
        self._client.send(self._request)
        self._began = thread_time()
        self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        now = thread_time()
        self._flood.longest_s = max(self._flood.longest_s, now - self._began)
        self._turn += 1
        if not self._flood.turns:
            self._look()
        if self._flood.turns and self._turn == self._flood.turns + AFTER_TURNS:
            for each in self._attackers:
                each.close()
        if self._flood.turns and self._turn > self._flood.turns + 2 * AFTER_TURNS:
            self._is_over.set()
            return
        self._began = thread_time()
        self._loop.call_soon(self._tick)

    def _look(self) -> None:
        try:
            if self._client.recv(1 << 16):
                self._flood.turns = self._turn
        except BlockingIOError:
            return
