"""Limits on frames that cost the server work and bring no request forward. Pure: `now` is in seconds.

Such frames are legal (PING, SETTINGS, PRIORITY, WINDOW_UPDATE, RST_STREAM, empty DATA and CONTINUATION, frames of
closed streams and of unknown types), so each connection may send them at a rate that no client reaches: a burst of
`BURST`, then `PER_SECOND`. RFC 9113 section 10.5 recommends ENHANCE_YOUR_CALM for more.
"""

from halimede.core.wire.http2.codes import ConnectionFault, H2Code

BURST = 10_000.0
PER_SECOND = 5_000.0

CHEAP = 1.0
"""The cost of a frame that is read and dropped, or answered at once."""

RESET = 5.0
"""The cost of a request that its client resets before it is answered: 2,000 at once, then 1,000 a second. The rapid
reset attack (CVE-2023-44487) sends tens of thousands a second."""

WINDOW_UPDATES_PER_DATA = 10.0
"""WINDOW_UPDATE frames that a client may send for each DATA frame that it gets, without any cost."""


class FloodGuard:
    """One connection's allowance."""

    __slots__ = ("_left", "_paid_updates", "_since")

    def __init__(self, now: float) -> None:
        self._left = BURST
        self._since = now
        self._paid_updates = 0.0

    def spend(self, cost: float, now: float, what: str) -> None:
        """ConnectionFault when the allowance is used up. `what` names the frames for the client."""
        self._left -= cost
        if self._left >= 0:
            return
        self._left = min(BURST, self._left + (now - self._since) * PER_SECOND)
        self._since = now
        if self._left < 0:
            raise ConnectionFault(H2Code.ENHANCE_YOUR_CALM, f"too many {what}")

    def data_sent(self) -> None:
        """A DATA frame was sent, for which the client will send WINDOW_UPDATE frames."""
        self._paid_updates += WINDOW_UPDATES_PER_DATA

    def window_update(self, now: float) -> None:
        """A WINDOW_UPDATE frame has arrived. ConnectionFault as of `spend`."""
        if self._paid_updates >= 1:
            self._paid_updates -= 1
        else:
            self.spend(CHEAP, now, "WINDOW_UPDATE frames")
