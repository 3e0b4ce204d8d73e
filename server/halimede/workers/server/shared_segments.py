"""What one worker reads in place of other workers' segments: the server's end.

A worker is handed a segment as it is first sent bytes that lie in it; these still go as a copy, and so do all until it
has said that it can look at the segment. From then on it is told where they lie, and a view of them is held here until
it has said that it does not need them any more: so the lender cannot use that memory for something else meanwhile.

Lent are only bytes that no model can write to. Of those that a worker answered these are all in its own arena, which
its model never sees; and those in blocks of its requests once it has let go of them. A worker that cannot look at a
segment, or does not want to because its model writes to what it reads, is lent nothing any more.
"""

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress

from halimede.core.shm.arena import ALIGNMENT
from halimede.core.types import Buffer
from halimede.workers.frames.kinds import FIRST_BORROWED, FrameError
from halimede.workers.segments import Block, Lease, Segment, address

LENT_BYTES = 1 << 20
"""Smaller tensors are copied: below half of that it is cheaper than the borrower's look at what it has written to."""

MAX_SEGMENTS = 64
"""Borrowed by one worker at a time."""

_LAST_NUMBER = 0xFFFF


class Lending:
    """What one worker borrows. All methods are called on the event loop's thread."""

    def __init__(
        self, hand: Callable[[int, int], None], forget: Callable[[int], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        """`hand` gives the worker a segment: its number, a descriptor that is taken over. `forget` tells it the number
        of one that is there no more."""
        self._hand = hand
        self._forget = forget
        self._loop = loop
        self._next = FIRST_BORROWED
        self._numbers: dict[weakref.ref[Segment], int] = {}
        self._unanswered: set[int] = set()
        self._usable: set[int] = set()
        self._lent: dict[Block, memoryview] = {}
        self._is_over = False
        """The worker does not want anything more."""

    def __repr__(self) -> str:
        return f"<Lending {len(self._numbers)} segments, {len(self._lent)} blocks>"

    def can_lend(self, data: Buffer) -> bool:
        """Whether `lend` would."""
        found = _lease_of(data)
        return found is not None and self._block(found, len(data), address(data)) is not None

    def lend(self, data: Buffer) -> Block | None:
        """Where the worker finds these bytes, until it has given the block back; None when they are to be copied."""
        lease = _lease_of(data)
        if lease is None or self._is_over:
            return None
        if weakref.ref(lease.segment) not in self._numbers:
            self._try_hand(lease.segment)
            return None
        block = self._block(lease, len(data), address(data))
        if block is not None:
            self._lent[block] = memoryview(data)
            lease.segment.loans.lent_bytes += len(data)
        return block

    def _block(self, lease: Lease, size: int, start: int) -> Block | None:
        segment = lease.segment
        number = self._numbers.get(weakref.ref(segment))
        loans, offset = segment.loans, start - segment.start
        if (
            number not in self._usable
            or offset != lease.block[1]
            or offset % ALIGNMENT
            or lease.block in loans.writable
            or loans.lent_bytes + size > loans.limit_bytes
        ):
            return None
        block = number, offset
        # Lent twice, it would become the borrower's own once for both.
        return block if block not in self._lent else None

    def _try_hand(self, segment: Segment) -> None:
        if len(self._numbers) >= MAX_SEGMENTS or self._next > _LAST_NUMBER or segment.descriptor < 0:
            return
        try:
            descriptor = segment.lent_descriptor()
        except OSError:
            return
        number = self._next
        self._next += 1
        self._numbers[weakref.ref(segment, self._on_gone)] = number
        self._unanswered.add(number)
        self._hand(number, descriptor)

    def on_mapped(self, number: int, is_mapped: bool) -> None:
        """The worker says whether it can look at a segment. FrameError."""
        if not FIRST_BORROWED <= number < self._next or (is_mapped and number not in self._unanswered):
            raise FrameError(f"a word on segment {number}, which was not asked for")
        self._unanswered.discard(number)
        if not is_mapped:
            self._is_over = True
            self._usable.clear()
            self._forget_all()
        elif number in self._numbers.values() and not self._is_over:
            self._usable.add(number)

    def view(self, number: int, offset: int, size_bytes: int) -> memoryview:
        """Borrowed bytes that the worker answers with. ValueError when they are not lent to it."""
        for (segment, start), data in self._lent.items():
            if segment == number and start <= offset and offset + size_bytes <= start + len(data):
                return data[offset - start : offset - start + size_bytes]
        raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {number}, which it was not given")

    def take_back(self, block: Block) -> None:
        """The worker does not need it any more."""
        data = self._lent.pop(block, None)
        if data is not None and (lease := _lease_of(data)) is not None:
            lease.segment.loans.lent_bytes -= len(data)
        if self._is_over:
            self._forget_all()

    def _forget_all(self) -> None:
        """Once nothing is lent."""
        if not self._lent:
            while self._numbers:
                self._forget(self._numbers.popitem()[1])

    def close(self) -> None:
        """The worker is gone."""
        # Its connection is gone at once, with its memory, when nothing here holds on to it.
        self._hand = self._forget = _nowhere
        self._numbers.clear()
        self._usable.clear()
        for block in list(self._lent):
            self.take_back(block)

    def _on_gone(self, segment: "weakref.ref[Segment]") -> None:
        """Called by the collector, on any thread."""
        number = self._numbers.pop(segment, None)
        if number is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._tell, number)

    def _tell(self, number: int) -> None:
        self._usable.discard(number)
        self._forget(number)


def _nowhere(*_: int) -> None:
    """There is nobody to tell."""


def _lease_of(data: Buffer) -> Lease | None:
    """Of bytes in shared memory."""
    return data.obj if isinstance(data, memoryview) and isinstance(data.obj, Lease) else None
