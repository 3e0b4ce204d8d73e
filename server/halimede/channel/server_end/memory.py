"""The shared memory of one worker: the server's end.

There are two arenas, and one process allocates in each: the server in `inbound`, for requests; the worker in
`outbound`, for answers. The server makes the segments of both. A tensor that does not fit is sent in the frame.

A block of `inbound`, or a shared block of another worker, may have several holders: the batch that it was placed for, a
model that keeps it beyond its batch (the block is then retained), answers that lie in it. It is freed when the last
holder drops it.
"""

import asyncio
import os
from collections.abc import Sequence

from halimede.channel.frames import (
    FIRST_SHARED,
    INBOUND,
    INLINE_BYTES,
    MAPPED,
    MAX_BLOCKS,
    OUTBOUND,
    SEGMENT,
    SHARED,
    UNMAP,
    ChannelFrame,
    FrameError,
    encode_frame,
    unpack,
)
from halimede.channel.json_frames import decode_blocks
from halimede.channel.segments import Block, OwnArena, SegmentMap, has_memory, make_segment
from halimede.channel.server_end.channel import Channel
from halimede.channel.server_end.shared_segments import MIN_SHARED_BYTES, SharedSegments
from halimede.channel.server_end.tasks import Tasks
from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.shm.arena import Arena
from halimede.core.types import Buffer, Tensor, unavailable

ARENA_BYTES = 256 << 20
"""Maximum bytes of request tensors of one worker in shared memory. Further tensors are sent in frames."""

MAX_UNSENT_BYTES = 1 << 30
"""Maximum bytes that wait for a process to read; above it, its inferences are answered with errors."""

COPIED_ON_LOOP_BYTES = 8 << 20
"""More bytes than this are copied on a thread, and larger segments are made on a thread: 64 MiB take 20 ms."""


class Memory:
    """Both arenas of one worker, and the blocks of other workers that it reads. All methods are called on the loop."""

    def __init__(
        self,
        channel: Channel,
        tasks: Tasks,
        loop: asyncio.AbstractEventLoop,
        arena_bytes: int = ARENA_BYTES,
        bounds: MemoryBounds = UNBOUNDED,
    ) -> None:
        # A sixteenth of the memory for each arena, because segments are kept for later requests.
        arena_bytes = bounds.at_most(4 * arena_bytes) // 4
        self._bounds = bounds
        self.max_unsent_bytes = bounds.at_most(MAX_UNSENT_BYTES)
        self._channel = channel
        self._tasks = tasks
        # The other half stays free for the next tensors, however long other workers keep shared blocks.
        self.inbound = OwnArena(arena_bytes, arena_bytes // 2)
        # The channel gives back to the worker what is released here.
        self._outbound = SegmentMap(channel.released, arena_bytes // 2)
        # Counts only the size: the worker allocates.
        self._outbound_size = Arena(arena_bytes)
        self._shared = SharedSegments(self._send_shared, self._send_unmap, loop)
        self._holders: dict[Block, int] = {}
        """The number of holders of each block of `inbound` and each shared block."""
        self._retained: set[Block] = set()
        """Blocks that the worker holds until it reports them as unused."""
        self._segments = 0
        self._is_growing = False
        # For the frame that is being encoded: its blocks, and the data to copy into them.
        self._stored: list[Block] = []
        self._copies: list[tuple[Block, Buffer]] = []
        channel.handle(ChannelFrame.UNUSED, self._on_unused)
        channel.handle(ChannelFrame.MAPPED, self._on_mapped)

    def close(self) -> None:
        """Free shared blocks: the worker has ended."""
        self._shared.close()

    def store(self, data: Buffer) -> Block | None:
        """A block for a tensor of the frame that is being encoded; None to send the tensor in the frame."""
        self._free_released()
        arena = self.inbound.blocks
        size = len(data)
        if size >= MIN_SHARED_BYTES and (shared := self._shared.share(data)) is not None:
            self._holders[shared] = 1
            self._stored.append(shared)
            return shared
        block = arena.allocate(size)
        if block is None:
            growth = arena.growth(size)
            if not growth or growth > COPIED_ON_LOOP_BYTES or not self._bounds.can_keep(growth):
                return None
            if (descriptor := make_segment(growth)) is None:
                return None
            block = arena.allocate(size) if self._add_segment(INBOUND, descriptor) else None
            if block is None:
                return None
        self._holders[block] = 1
        self.inbound.map.sharing.writable.add(block)
        self._stored.append(block)
        self._copies.append((block, data))
        return block

    def take_stored(self) -> Sequence[Block]:
        """The blocks of the frame that was encoded."""
        if not self._stored:
            return ()
        stored, self._stored = self._stored, []
        return stored

    def take_copies(self) -> list[tuple[Block, Buffer]]:
        """The data to copy into the blocks."""
        copies, self._copies = self._copies, []
        return copies

    def copy(self, copies: list[tuple[Block, Buffer]]) -> None:
        """Copy, on any thread, and clear `copies`."""
        for block, data in copies:
            self.inbound.map.write(block, data)
        # The list lives until the next batch is encoded.
        copies.clear()

    def bytes_to_copy(self, tensors: Sequence[Tensor]) -> int:
        """The size of the tensors that are neither sent in the frame nor shared."""
        large = 0
        for tensor in tensors:
            size = len(tensor.data)
            if size > INLINE_BYTES and not (size >= MIN_SHARED_BYTES and self._shared.can_share(tensor.data)):
                large += size
        return large

    async def make_room(self, size_bytes: int) -> None:
        """Add a segment for a large frame; the segment is made on a thread. UNAVAILABLE without memory for the frame,
        wherever its tensors are."""
        if self.inbound.blocks.free_bytes >= size_bytes:
            return
        if not has_memory(size_bytes):
            raise unavailable(f"the server has too little free memory to pass {size_bytes} bytes to another process")
        size = self.inbound.blocks.growth(size_bytes)
        if size and self._bounds.can_keep(size):
            descriptor = await _make_segment(size)
            if descriptor is not None:
                self._add_segment(INBOUND, descriptor)

    def retain(self, blocks: Sequence[Block]) -> None:
        """Let the worker hold these blocks until it reports them as unused."""
        self._retained.update(blocks)

    def take_back(self, blocks: Sequence[Block], retained: Sequence[Block] = ()) -> None:
        """The frame that used these blocks is done; the model still holds the `retained` ones. FrameError."""
        kept = set(retained)
        if not kept <= set(blocks):
            raise FrameError("a batch's end retains blocks that are not its own")
        self._retained |= kept
        for block in blocks:
            if block not in kept:
                self._let_go(block)
        self._free_released()

    def locate(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of an answer: in the worker's arena, or in a block that it may read. ValueError."""
        if segment in self._outbound:
            if len(self._outbound.released) > MAX_BLOCKS:
                raise ValueError(f"more than {MAX_BLOCKS} blocks that it was not given back yet")
            return self._outbound.lease((segment, offset), offset, size_bytes)
        if segment >= FIRST_SHARED:
            return self._shared.view(segment, offset, size_bytes)
        start = self.inbound.blocks.holding(segment, offset, size_bytes)
        if start is None:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {segment}, which it was not given")
        block = segment, start
        self._holders[block] = self._holders.get(block, 0) + 1
        return self.inbound.map.lease(block, offset, size_bytes)

    def grow_outbound(self, wanted_bytes: int) -> None:
        """Enlarge the worker's arena, up to its limit: answers did not fit into it."""
        size = 0 if self._is_growing else self._outbound_size.growth(wanted_bytes)
        if size and self._bounds.can_keep(size):
            self._is_growing = True
            self._tasks.run(self._add_outbound(size))

    async def _add_outbound(self, size_bytes: int) -> None:
        descriptor = await _make_segment(size_bytes)
        self._is_growing = False
        if descriptor is not None and self._add_segment(OUTBOUND, descriptor):
            self._outbound_size.add(self._segments, size_bytes)

    def _add_segment(self, arena: int, descriptor: int) -> bool:
        """Map a segment and send it to the worker; False if this process cannot map it."""
        number = self._segments + 1
        try:
            worker_end = os.dup(descriptor)
        except OSError:
            os.close(descriptor)
            return False
        try:
            if arena == INBOUND:
                self.inbound.add(number, descriptor)
            else:
                self._outbound.map(number, descriptor)
        except OSError:
            os.close(worker_end)
            return False
        self._segments = number
        self._channel.send(encode_frame(ChannelFrame.SEGMENT, SEGMENT.pack(number, arena)), (worker_end,))
        return True

    def _send_shared(self, number: int, descriptor: int) -> None:
        """See `shared_segments.SharedSegments`."""
        self._channel.send(encode_frame(ChannelFrame.SEGMENT, SEGMENT.pack(number, SHARED)), (descriptor,))

    def _send_unmap(self, number: int) -> None:
        """See `shared_segments.SharedSegments`."""
        self._channel.send(encode_frame(ChannelFrame.UNMAP, UNMAP.pack(number)))

    def _on_mapped(self, body: memoryview) -> None:
        number, is_mapped = unpack(MAPPED, body, ChannelFrame.MAPPED)
        self._shared.on_mapped(number, bool(is_mapped))

    def _on_unused(self, body: memoryview) -> None:
        for block in decode_blocks(body):
            if block not in self._retained:
                raise FrameError("it gave back a block that it did not hold")
            self._retained.discard(block)
            self._let_go(block)

    def _let_go(self, block: Block) -> None:
        """The worker no longer holds the block: its batch has ended, or its model has dropped it."""
        self.inbound.map.sharing.writable.discard(block)
        self._drop(block)

    def _drop(self, block: Block) -> None:
        """Remove one holder of a block, and free the block after the last one."""
        left = self._holders.get(block, 0) - 1
        if left > 0:
            self._holders[block] = left
        elif self._holders.pop(block, None) is None:
            return
        elif block[0] < FIRST_SHARED:
            self.inbound.blocks.free(*block)
        else:
            self._shared.take_back(block)

    def _free_released(self) -> None:
        released = self.inbound.map.released
        while released:
            self._drop(released.popleft())


async def _make_segment(size_bytes: int) -> int | None:
    """`segments.make_segment` on a thread, which continues if the task is cancelled."""
    making = asyncio.ensure_future(asyncio.to_thread(make_segment, size_bytes))
    try:
        return await asyncio.shield(making)
    except RuntimeError:
        return None  # the system has no thread left
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(making: "asyncio.Future[int | None]") -> None:
    if not making.cancelled() and (descriptor := making.result()) is not None:
        os.close(descriptor)
