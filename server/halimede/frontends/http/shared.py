"""State that the connections of one listener share: limits, the receive buffer, and totals."""

from halimede.frontends.http.framing import HeadReader, Limits
from halimede.frontends.totals import Total

_BUFFER_BYTES = 64 << 10


class Shared:
    """One per listener. The listener and its connections change it on the loop's thread only.

    `limits` may be replaced at any time. All connections receive into `buffer`: it is filled and used within one
    callback of the transport, so one is enough for all; `view` is the same memory. `held_bytes` counts requests that
    are received or processed, `unsent_bytes` answers that clients have not read. When `is_leaving`, answers say that
    the connection closes. When `is_draining`, connections also close after a stream whose head did not say so.
    """

    __slots__ = (
        "buffer",
        "heads",
        "held_bytes",
        "is_draining",
        "is_leaving",
        "limits",
        "max_body",
        "total_held",
        "unsent_bytes",
        "view",
    )

    def __init__(
        self, limits: Limits, max_body: int, *, keep_names: bool = False, total_held: Total | None = None
    ) -> None:
        """`max_body` is in bytes; `keep_names`: heads have `sent_headers`. `total_held` counts `held_bytes` over all
        front-end processes."""
        self.limits = limits
        self.max_body = max_body
        self.heads = HeadReader(keep_names=keep_names)
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.held_bytes = 0
        self.total_held = total_held
        self.unsent_bytes = 0
        self.is_leaving = False
        self.is_draining = False

    def hold(self, size: int) -> int:
        """Count bytes that are held for requests; negative when they are freed. Returns how many are held in all."""
        self.held_bytes += size
        return self.held_bytes if self.total_held is None else self.total_held.publish(self.held_bytes)
