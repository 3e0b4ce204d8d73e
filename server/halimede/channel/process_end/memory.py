"""The shared memory of this process: both arenas, segments of other workers, and the blocks that the model still uses.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import threading
from collections.abc import Sequence
from functools import partial

from halimede.channel.frames import FIRST_SHARED, INBOUND, MAPPED, SEGMENT, SHARED, UNMAP, ChannelFrame, encode_frame
from halimede.channel.json_frames import decode_blocks
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.shared_segments import SharedSegments
from halimede.channel.segments import Block, OwnArena, SegmentMap
from halimede.core.types import Buffer

ARENA_BYTES = 256 << 20
"""Maximum bytes of answers in shared memory. Further answers are sent in frames."""


class Memory:
    """Both arenas, segments of other workers, and which of their blocks the model still uses."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.inbound = SegmentMap()
        self.shared = SharedSegments(self.inbound.released, partial(self._send_mapped, False))
        self.outbound = OwnArena(ARENA_BYTES)
        self.wanted_bytes = 0
        """Bytes that did not fit and are not reported yet. The server enlarges the arena."""
        self.reporting = threading.RLock()
        """Held until the result of `unused` and `retain` is sent. So a block is reported as unused only after it is
        reported as retained, and after every answer that lies in the block."""
        self._retained: dict[Block, bool] = {}
        """Blocks of the server and of other workers that are in use here; True once the block is reported as retained
        beyond its batch."""
        self._lock = threading.Lock()
        channel.handle(ChannelFrame.SEGMENT, self._on_segment)
        channel.handle(ChannelFrame.UNMAP, self._on_unmap)
        channel.handle(ChannelFrame.RELEASE, self._on_release)

    def _on_segment(self, body: memoryview) -> None:
        number, arena = SEGMENT.unpack(body)
        descriptor = self._channel.take_descriptor()
        if arena == SHARED:
            is_mapped = descriptor is not None and self.shared.try_map(number, descriptor)
            self._send_mapped(is_mapped, number)
        elif descriptor is None:
            raise RuntimeError("the descriptor of a segment is missing: this process has too many open files")
        elif arena == INBOUND:
            self.inbound.map(number, descriptor)
        else:
            with self._lock:
                self.outbound.add(number, descriptor)

    def _send_mapped(self, is_mapped: bool, number: int) -> None:
        self._channel.send_later(encode_frame(ChannelFrame.MAPPED, MAPPED.pack(number, is_mapped)))

    def _on_unmap(self, body: memoryview) -> None:
        self.shared.unmap(*UNMAP.unpack(body))

    def _on_release(self, body: memoryview) -> None:
        blocks = decode_blocks(body)
        with self._lock:
            for segment, offset in blocks:
                self.outbound.blocks.free(segment, offset)

    def view(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of one of the server's blocks, which is in use until the last view of it is freed."""
        block = segment, offset
        self._retained[block] = False
        return (self.inbound if segment < FIRST_SHARED else self.shared).lease(block, offset, size_bytes)

    def view_retained(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of an answer to a call, in one of the server's blocks that counts as retained from the beginning."""
        block = segment, offset
        self._retained[block] = True
        return (self.inbound if segment < FIRST_SHARED else self.shared).lease(block, offset, size_bytes)

    @property
    def has_retained(self) -> bool:
        """Whether blocks of the server are in use here."""
        return bool(self._retained)

    def unused(self) -> list[Block]:
        """Blocks that were reported as retained and are no longer in use. The caller holds `reporting`."""
        released, unused = self.inbound.released, []
        while released:
            block = released.popleft()
            if self._retained.pop(block, False):
                unused.append(block)
        return unused

    def retain(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks of a batch that are still in use. The caller holds `reporting` and has just called `unused`."""
        retained = [block for block in blocks if block in self._retained]
        for block in retained:
            self._retained[block] = True
        return retained

    def store(self, data: Buffer) -> Block | None:
        """The block with an output's bytes: their own place if they lie in shared memory, else a copy."""
        where = self.inbound.find(data) or self.shared.find_unwritten(data)
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
        """The bytes that did not fit since the last call."""
        if not self.wanted_bytes:
            return 0
        with self._lock:
            wanted, self.wanted_bytes = self.wanted_bytes, 0
        return wanted
