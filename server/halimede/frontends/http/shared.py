"""State that the connections of one listener share: limits, the receive buffer, and totals."""

from halimede.core.accounts import UNBOUNDED, Account, ByteKind, MemoryBounds
from halimede.frontends.http.cors import Cors
from halimede.frontends.http.framing import HeadReader, Limits
from halimede.frontends.totals import Total

_BUFFER_BYTES = 64 << 10


class Shared:
    """One per listener. The listener and its connections change it on the loop's thread only.

    `limits` may be replaced at any time. All connections receive into `buffer`: it is filled and used within one
    callback of the transport, so one is enough for all; `view` is the same memory. `wire` has the bytes of requests
    that are received or processed, `unsent_bytes` counts answers that clients have not read. When `is_leaving`, answers
    say that the connection closes. When `is_draining`, connections also close after a stream whose head did not say so.
    `cors` adds its header lines to the answers; None adds none.
    """

    __slots__ = (
        "buffer",
        "cors",
        "heads",
        "is_draining",
        "is_leaving",
        "limits",
        "max_body",
        "unsent_bytes",
        "view",
        "wire",
    )

    def __init__(
        self,
        limits: Limits,
        max_body: int,
        *,
        keep_names: bool = False,
        total_held: Total | None = None,
        memory: MemoryBounds = UNBOUNDED,
        cors: Cors | None = None,
    ) -> None:
        """`max_body` is in bytes; `keep_names`: heads have `sent_headers`. `total_held` adds up `wire` over all
        front-end processes."""
        self.limits = limits
        self.max_body = max_body
        self.heads = HeadReader(keep_names=keep_names)
        self.buffer = bytearray(_BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        publish = None if total_held is None else total_held.publish
        self.wire = Account(ByteKind.WIRE, limits.max_held_bytes, publish, memory)
        self.cors = cors
        self.unsent_bytes = 0
        self.is_leaving = False
        self.is_draining = False
