"""The end of one connection: everything is written, and the client is to close.

Until it does, input is discarded: closing with unread input would reset the connection before the client has read the
GOAWAY.
"""

import asyncio
from time import monotonic

from halimede.core.wire.http2.keepalive import Keepalive
from halimede.frontends.grpc.limits import GrpcLimits


class Closing:
    """`has_begun`: nothing more is sent, and input is discarded."""

    __slots__ = ("_discarded", "_loop", "_timer", "has_begun")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._discarded = 0
        self.has_begun = False

    def begin(self, transport: asyncio.Transport, keepalive: Keepalive, limits: GrpcLimits, *, is_failed: bool) -> None:
        """End the sending side. After a fault (`is_failed`) unsent answers are not waited for."""
        if self.has_begun:
            return
        self.has_begun = True
        linger_s = limits.linger_s if is_failed else limits.goaway_answer_s
        if transport.can_write_eof():
            transport.write_eof()
        else:
            # With TLS this tells the client by close_notify. A client that has calls ignores it until the connection is
            # closed: waiting for an answer as long as TLS does by default, half a minute, would keep its calls open.
            transport.close()
            linger_s = min(linger_s, limits.goaway_answer_s)
        busy_until = 0.0 if is_failed else monotonic() + limits.goaway_busy_s
        self._timer = self._loop.call_later(linger_s, self._end, transport, keepalive, linger_s, busy_until)

    def discard(self, size: int, transport: asyncio.Transport, limits: GrpcLimits) -> None:
        """`size` bytes of input have come."""
        self._discarded += size
        if self._discarded > limits.linger_bytes:
            transport.abort()

    def cancel(self) -> None:
        """The connection is closed."""
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, transport: asyncio.Transport, keepalive: Keepalive, linger_s: float, busy_until: float) -> None:
        """Close, but not while the client receives the end of its answers.

        Then the transport holds bytes, or the client sends credit for those that it reads. Credit that arrived after
        the close would reset the connection, and the client would lose what it has not read.
        """
        now = monotonic()
        wait_s = linger_s if transport.get_write_buffer_size() else linger_s - keepalive.quiet_s(now)
        if wait_s > 0 and now < busy_until:
            self._timer = self._loop.call_later(wait_s, self._end, transport, keepalive, linger_s, busy_until)
        else:
            transport.abort()
