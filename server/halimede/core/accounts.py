"""Accounts of the bytes that clients can make the server hold.

Each account has one kind of bytes and one bound. Whoever takes bytes remembers how many, and gives back that number at
the end, whatever the end is. With nothing in progress every account is at zero.
"""

from collections.abc import Callable
from enum import Enum


class ByteKind(Enum):
    """What the bytes of an account are."""

    WIRE = "wire"
    """Requests as they are received, and what is inflated and decoded from them, for one protocol."""
    DECODED = "decoded"
    """Inputs of the requests in flight."""
    STATE = "state"
    """What is kept for sequences: states and correlation ids."""


class Account:
    """The bytes of one kind that are held in this process, and the bound of the server."""

    __slots__ = ("_publish", "held_bytes", "kind", "limit_bytes")

    def __init__(self, kind: ByteKind, limit_bytes: int, publish: Callable[[int], int] | None = None) -> None:
        """`publish` tells the server's other processes what is held here, and returns the sum of all."""
        self.kind = kind
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._publish = publish

    def take(self, size_bytes: int) -> bool:
        """Count bytes. Returns whether the server is within its bound; the bytes are counted in either case."""
        self.held_bytes += size_bytes
        return self.total_bytes <= self.limit_bytes

    def give_back(self, size_bytes: int) -> None:
        """Count bytes that were taken as free."""
        self.held_bytes -= size_bytes
        if self._publish is not None:
            self._publish(self.held_bytes)

    @property
    def total_bytes(self) -> int:
        """What all processes of the server hold."""
        return self.held_bytes if self._publish is None else self._publish(self.held_bytes)

    def __repr__(self) -> str:
        return f"<Account {self.kind.value} held={self.held_bytes} limit={self.limit_bytes}>"
