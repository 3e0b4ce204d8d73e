"""How the clients of a process share the turns of its event loop.

A turn takes a limited number of new calls, and a limited time for them. What is above the limits waits, and the next
turns begin with it: addresses take turns, and the connections of an address do (`core.fairness`). So a client that
floods the server does not keep the calls of other clients waiting for long.

Requests of a trusted proxy count by the address that it has added to them, or by its connection without one.
"""

import asyncio
import logging
import select
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from math import inf
from time import monotonic

from halimede.core.fairness import FairQueue

Network = IPv4Network | IPv6Network

CALLS_PER_TURN = 32
WORK_S = 0.005

FRAMES_OF_A_CALL = 16
"""So many frames of HTTP/2 count as a call, whatever they are: they cost as much, or more."""

CALLS_AT_ONCE = 8
"""Calls of one connection in one of its turns, while others wait."""

_UNMARKED_CALLS = 8
"""So many calls begin before the end of the turn is awaited, which costs a callback: for few calls it is not needed."""

PEERS = 1024
"""Of how many addresses it is known whether they are trusted proxies."""

LONGEST_ADDRESS = 64
"""More than an address of IPv6 with its scope."""

FORWARDED = "x-forwarded-for"

log = logging.getLogger(__name__)


class Turns:
    """One per event loop. Everything runs on its thread."""

    def __init__(self, trusted_proxies: Sequence[Network] = ()) -> None:
        self._has_proxies = bool(trusted_proxies)
        self._trusts = lru_cache(PEERS)(partial(_is_within, tuple(trusted_proxies)))
        self._queue: FairQueue[Callable[[], None]] = FairQueue()
        self._left = CALLS_PER_TURN
        self._until = inf
        self._is_marked = False
        """Whether `_turn` is called in the next turn."""

    def admits(self, now: float) -> int:
        """How many new calls may begin in this turn; 0 or less if new work of a client is to `wait`."""
        return self._left if now < self._until else 0

    def begins(self, now: float, calls: int = 1) -> None:
        """Calls begin, or something that costs as much as so many."""
        self._left -= calls
        if not self._is_marked and self._left <= CALLS_PER_TURN - _UNMARKED_CALLS:
            self._until = now + WORK_S
            self._mark()

    def wait(self, address: Hashable, connection: Hashable, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is the turn of this connection, which does not wait yet."""
        self._queue.push(address, connection, go_on)
        if not self._is_marked:
            self._mark()

    def _mark(self) -> None:
        self._is_marked = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        queue = self._queue
        now = monotonic()
        self._left, self._until = CALLS_PER_TURN, now + WORK_S
        while queue and self.admits(monotonic()) > 0:
            try:
                queue.pop()()
            except Exception:
                # The others go on.
                log.exception("a client's turn failed")
        if queue or self._left < CALLS_PER_TURN:
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._is_marked = False
            self._until = inf

    # Addresses.

    def is_proxy(self, peer: object) -> bool:
        """Whether a connection's peer is a trusted proxy."""
        return self._has_proxies and isinstance(peer, tuple) and self._trusts(str(peer[0]))

    def forwarded_for(self, value: str) -> Hashable | None:
        """The address that trusted proxies have added to a request: the last one in `value`, the request's
        X-Forwarded-For, that is no trusted proxy's. None without a valid one."""
        for text in reversed(value.split(",")):
            address = _without_port(text.strip())
            if len(address) > LONGEST_ADDRESS or not self._trusts(address):
                return address_of((address,))
        return None


def _without_port(text: str) -> str:
    """The address of `address`, `address:port` or `[address]:port`: some proxies add the port."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _is_within(networks: Sequence[Network], text: str) -> bool:
    """Whether a text is an address in one of the networks."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return any((mapped or address) in network for network in networks)


def address_of(peer: object) -> Hashable | None:
    """What connections of a peer count by: its IPv4 address, or the first half of its IPv6 address, because a client
    has as many of these as it likes. None for what is no address; all clients of a unix socket count together."""
    if not isinstance(peer, tuple):
        return "unix"
    try:
        address = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return None
    if not isinstance(address, IPv6Address):
        return int(address)
    return int(address.ipv4_mapped) if address.ipv4_mapped else (6, int(address) >> 64)


def has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its end of an open connection, or it is lost, even if input is unread."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
