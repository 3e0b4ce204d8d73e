"""Accounts of the bytes that clients can make the server hold.

Each account has one kind of bytes and one bound. Whoever takes bytes remembers how many, and gives back that number at
the end, whatever the end is. With nothing in progress every account is at zero.

In a container with little memory the kernel kills a process long before the usual bounds are reached. There a bound is
at most a quarter of the container's memory, and requests are refused while too little of it is free for what is made
from them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

COPIES = 4
"""How many bytes may still be needed for each byte of a request that is held: the copy for the model's process, the
outputs, their copy for the server, and what the allocators keep. Measured with outputs as large as the inputs."""

FRONT_END_COPIES = 6
"""The same for a front-end process, from which the core has copies too."""

ASK_BYTES = 1 << 20
"""Free memory is asked for once in so many bytes that are taken, because the answer takes microseconds."""


class ByteKind(Enum):
    """What the bytes of an account are."""

    WIRE = "wire"
    """Requests as they are received, and what is inflated and decoded from them, for one protocol."""
    DECODED = "decoded"
    """Inputs of the requests in flight."""
    STATE = "state"
    """What is kept for sequences: states and correlation ids."""


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """The memory of the container, or else of the machine. `has_free` says whether so many bytes of the container are
    free; None without a container's limit. `copies` as in COPIES."""

    total_bytes: int = 1 << 64
    has_free: Callable[[int], bool] | None = None
    copies: int = COPIES

    def at_most(self, wanted_bytes: int) -> int:
        """This bound, or a quarter of the memory if that is less."""
        return min(wanted_bytes, self.total_bytes // 4)

    def has_room(self, held_bytes: int) -> bool:
        """Whether there is memory for what is made from requests of this size, which are held already."""
        return self.has_free is None or self.has_free(self.copies * held_bytes)

    def can_keep(self, size_bytes: int) -> bool:
        """Whether so many bytes may be kept for later requests, which takes them from others. Half must stay free."""
        return self.has_free is None or self.has_free(size_bytes + self.total_bytes // 2)


UNBOUNDED = MemoryBounds()


class Account:
    """The bytes of one kind that are held in this process, and the bound of the server."""

    __slots__ = ("_memory", "_publish", "_unasked_bytes", "held_bytes", "kind", "limit_bytes")

    def __init__(
        self,
        kind: ByteKind,
        limit_bytes: int,
        publish: Callable[[int], int] | None = None,
        memory: MemoryBounds = UNBOUNDED,
    ) -> None:
        """`publish` tells the server's other processes what is held here, and returns the sum of all. The bound is at
        most a quarter of the memory."""
        self.kind = kind
        self.limit_bytes = memory.at_most(limit_bytes)
        self.held_bytes = 0
        self._publish = publish
        self._memory = None if memory.has_free is None else memory
        # Bytes that were taken since the memory was last found to be enough.
        self._unasked_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Count bytes. Returns whether the server is within its bound; the bytes are counted in either case."""
        self.held_bytes += size_bytes
        total = self.total_bytes
        if self._memory is None or total > self.limit_bytes:
            return total <= self.limit_bytes
        self._unasked_bytes += size_bytes
        if self._unasked_bytes < ASK_BYTES:
            return True
        if not self._memory.has_room(total):
            return False
        self._unasked_bytes = 0
        return True

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
