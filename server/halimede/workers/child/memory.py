"""The shared memory of this process: both arenas, what it borrows, and what the model still looks at.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import threading
from collections.abc import Sequence
from functools import partial

from halimede.core.types import Buffer
from halimede.workers.child.channel import Channel
from halimede.workers.child.shared_segments import Borrowed
from halimede.workers.frames.control import decode_blocks
from halimede.workers.frames.kinds import BORROWED, FIRST_BORROWED, FORGET, INBOUND, MAPPED, SEGMENT, Kind, encode_frame
from halimede.workers.segments import Block, OwnArena, SegmentMap

ARENA_BYTES = 256 << 20
"""Answers that lie in shared memory at a time. What is over it travels in frames."""


class Memory:
    """Both arenas as the worker sees them, what it borrows, and which of all these blocks the model still looks at."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.inbound = SegmentMap()
        self.borrowed = Borrowed(self.inbound.released)
        self.outbound = OwnArena(ARENA_BYTES)
        self.wanted_bytes = 0
        """What found no room since it was last told: the server gives more."""
        self.telling = threading.RLock()
        """Held until the server was sent what `unused` and `retain` returned: a block that it hears of as unused is
        one that it heard of as retained before, and none of the answers that it hears of later."""
        self._retained: dict[Block, bool] = {}
        """Blocks of the server's, and borrowed ones, that are being looked at; True once the server knows that one
        outlasts its batch."""
        self._lock = threading.Lock()
        self.borrowed.on_written = partial(self._say_mapped, False)
        channel.handle(Kind.SEGMENT, self._on_segment)
        channel.handle(Kind.FORGET, self._on_forget)
        channel.handle(Kind.RELEASE, self._on_release)

    def _on_segment(self, body: memoryview) -> None:
        number, arena = SEGMENT.unpack(body)
        descriptor = self._channel.take_descriptor()
        if arena == BORROWED:
            is_mapped = descriptor is not None and self.borrowed.try_map(number, descriptor)
            self._say_mapped(is_mapped, number)
        elif descriptor is None:
            raise RuntimeError("the descriptor of a segment is missing: this process has too many open files")
        elif arena == INBOUND:
            self.inbound.map(number, descriptor)
        else:
            with self._lock:
                self.outbound.add(number, descriptor)

    def _say_mapped(self, is_mapped: bool, number: int) -> None:
        self._channel.send_later(encode_frame(Kind.MAPPED, MAPPED.pack(number, is_mapped)))

    def _on_forget(self, body: memoryview) -> None:
        self.borrowed.forget(*FORGET.unpack(body))

    def _on_release(self, body: memoryview) -> None:
        blocks = decode_blocks(body)
        with self._lock:
            for segment, offset in blocks:
                self.outbound.blocks.free(segment, offset)

    def look_at(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of one of the server's blocks, which counts as looked at until the last view of it is gone."""
        block = segment, offset
        self._retained[block] = False
        return (self.inbound if segment < FIRST_BORROWED else self.borrowed).lease(block, offset, size_bytes)

    def look_at_own(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of an answer to a call, in one of the server's blocks that is this process's until it is unused."""
        block = segment, offset
        self._retained[block] = True
        return (self.inbound if segment < FIRST_BORROWED else self.borrowed).lease(block, offset, size_bytes)

    def unused(self) -> list[Block]:
        """Blocks that the server was told are retained, and are not any more. With `telling`."""
        released, unused = self.inbound.released, []
        while released:
            block = released.popleft()
            if self._retained.pop(block, False):
                unused.append(block)
        return unused

    def retain(self, blocks: Sequence[Block]) -> list[Block]:
        """Those of a batch's blocks that outlast it. `unused` was asked just before, with `telling`."""
        retained = [block for block in blocks if block in self._retained]
        for block in retained:
            self._retained[block] = True
        return retained

    def place(self, data: Buffer) -> Block | None:
        """Where the server finds an output's bytes: where they are when it knows that memory, else copied."""
        where = self.inbound.find(data) or self.borrowed.find_unwritten(data)
        if where is not None:
            return where
        with self._lock:
            block = self.outbound.blocks.allocate(len(data))
            if block is None:
                self.wanted_bytes += len(data)
                return None
        self.outbound.map.write(block, data)
        return block

    def take_wanted(self) -> int:
        """What found no room, to be told now."""
        if not self.wanted_bytes:
            return 0
        with self._lock:
            wanted, self.wanted_bytes = self.wanted_bytes, 0
        return wanted
