"""What the connections of one listener share: the limits, the receive buffer, and what all of them hold together."""

from halimede.frontends.http.framing import HeadReader, Limits

_BUFFER_BYTES = 64 << 10


class Shared:
    """One per listener; the listener and its connections change it, on the loop's thread alone.

    `limits` may be replaced at any time. `buffer` is where every connection receives: it is filled and used up within
    one callback of the transport, so one is enough for all; `view` is the same memory. `held_bytes` are those of
    requests that are received or in work, `unsent_bytes` those of answers that clients have not taken. Once
    `is_leaving`, answers say that the connection closes. Once `is_draining`, connections also close after a stream that
    did not say so.
    """

    __slots__ = (
        "buffer",
        "heads",
        "held_bytes",
        "is_draining",
        "is_leaving",
        "limits",
        "max_body",
        "unsent_bytes",
        "view",
    )

    def __init__(self, limits: Limits, max_body: int, *, keep_names: bool = False) -> None:
        """`max_body` is in bytes; `keep_names`: heads have `sent_headers`."""
        self.limits = limits
        self.max_body = max_body
        self.heads = HeadReader(keep_names=keep_names)
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.held_bytes = 0
        self.unsent_bytes = 0
        self.is_leaving = False
        self.is_draining = False
