"""The server's end of the channel to one worker process, for as long as that process lives.

Sends batches, with their tensors in shared memory where they are large, and turns what the worker sends into calls of
its owner. What a worker sends is not trusted: a frame that makes no sense, bytes that it may not name, an answer to
what was not asked, or more of anything than an honest worker sends, and the worker is given up: `on_lost` is called,
once, and its owner ends the process. All methods are called on the event loop's thread.
"""

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halimede.backends.hosting import WorkerSpec
from halimede.core.shm.arena import Arena
from halimede.core.types import Buffer, ErrorCode, InferenceError, InferenceResponse, Tensor
from halimede.workers import frames
from halimede.workers.frames import BORROWED, FIRST_BORROWED, HEADER, INBOUND, MAX_CALLS, OUTBOUND, FrameError, Kind
from halimede.workers.inferences import Asker, Inferences
from halimede.workers.lending import LENT_BYTES, Lending
from halimede.workers.output import say
from halimede.workers.segments import Block, OwnArena, SegmentMap, make_segment
from halimede.workers.worker import BatchItem

log = logging.getLogger(__name__)

ARENA_BYTES = 256 << 20
"""Tensors of requests that one worker may hold in shared memory at a time. What is over it travels in frames."""

COPIED_ON_LOOP_BYTES = 8 << 20
"""Batches of more bytes than this are copied, and segments above it made, on a thread: 64 MiB take 20 ms."""

MAX_UNASKED_BYTES = 1 << 20
"""Of a larger answer the beginning is looked at before the rest of it is taken."""

MAX_UNSENT_FRAMES = 16 << 10
"""Frames that wait for a worker to read. One that executes for long may leave some thousands."""

MAX_UNSENT_BYTES = 1 << 30
"""Of all that waits for a worker to read; with more, its inferences are answered with errors."""

MAX_FRAMES_PER_TURN = 256
"""Frames of one worker that are handled before the loop gets its turn."""

METRICS_BYTES_PER_FRAME = 64
"""So much of updates of metrics is as much work as a frame."""

MAX_LINES_PER_SECOND = 2_000
"""Lines of log a second above which a worker is given up: ours hold themselves to a quarter of that."""

_RECEIVE_BYTES = 256 << 10
_KINDS = {kind.value: kind for kind in Kind}
_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)


class _Received(threading.local):
    """What is being received: one buffer for all connections of a loop, which is one thread's, because nothing stays
    in it between two turns of the loop. Loads have loops of their own."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_RECEIVE_BYTES))


_received = _Received()


class Owner(Asker, Protocol):
    """Whose worker it is: hears what it sends."""

    def on_done(self, batch: "Batch", done: frames.Done) -> None:
        """A batch is over."""

    def on_response(self, response: frames.Response) -> None:
        """An answer ahead of a batch's end or after it."""

    def on_ready(self, is_ready: bool) -> None:
        """What the model says of its readiness."""

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """Metrics of the model's own have changed."""

    async def on_call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """The model asks for something; JSON both ways. InferenceError."""


@dataclass(slots=True)
class Batch:
    """A batch that a worker has, and the blocks that its tensors lie in."""

    number: int
    slot: int
    items: list[BatchItem]
    blocks: Sequence[Block] = ()
    is_sent: bool = False


class Connection:
    """Frames to and from one process."""

    def __init__(
        self,
        channel: socket.socket,
        spec: WorkerSpec,
        inputs: Sequence[str],
        outputs: Sequence[str],
        owner: Owner,
        on_lost: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        self._socket = channel
        self._socket.setblocking(False)
        self._descriptor = channel.fileno()
        self._buffer = _received.buffer
        self._spec = spec
        self._inputs = {name: position for position, name in enumerate(inputs)}
        self._outputs = tuple(outputs)
        self._output_positions = {name: position for position, name in enumerate(outputs)}
        self._owner = owner
        self._on_lost = on_lost
        self._loop = loop
        # The other half stays for what is answered next, however long others need what they are lent.
        self._inbound = OwnArena(arena_bytes, arena_bytes // 2)
        self._holders: dict[Block, int] = {}
        """How many hold a block of ours, or one that is lent: its batch, the model beyond that, answers in it."""
        self._retained: set[Block] = set()
        self._outbound = SegmentMap(arena_bytes // 2)
        self._lending = Lending(self._hand, self._forget, loop)
        # Only how much there is of it: the worker allocates.
        self._outbound_size = Arena(arena_bytes)
        self._is_growing = False
        self._segments = 0
        # Of the frame that is being encoded: its blocks, and what is to be copied into them.
        self._placed: list[Block] = []
        self._copies: list[tuple[Block, Buffer]] = []
        self._batches: dict[int, Batch] = {}
        self._next_batch = 1
        self._last_sent: Batch | None = None
        """The batch that was sent last, None when something else was sent since."""
        self._left_unread = False
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._partial = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent_bytes = 0
        self._calls = 0
        self._inferences = Inferences(owner, self._send_answer)
        self._answers: deque[tuple[int, InferenceResponse]] = deque()
        """To inferences, from a large one that is being copied on: they are sent in order."""
        self._is_stopped = False
        self._lines_since = 0.0
        self._lines = 0
        self._started: asyncio.Future[Any] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._descriptor, self._readable)

    def __repr__(self) -> str:
        sent = f"{len(self._batches)} batches, {len(self._unsent)} frames unsent"
        return f"<Connection {self._spec.instance} {sent}, {self._inbound.blocks!r}>"

    @property
    def batches(self) -> Sequence[Batch]:
        """What the worker has."""
        return tuple(self._batches.values())

    def unread(self) -> Sequence[Batch]:
        """Batches that the worker has certainly not begun: when it ended, it had not read all of them.

        Of what was sent only the last frame is known to be one. Asked when the worker is lost.
        """
        last = self._last_sent if self._left_unread else None
        return [batch for batch in self._batches.values() if batch is last or not batch.is_sent]

    def close(self) -> None:
        """Let go of the channel. Answers that lie in shared memory stay good."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._left_unread = self._left_unread or bool(self._unsent)
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._socket.close()
        for task in self._tasks:
            task.cancel()
        for future in (self._started, self._ended):
            future.cancel()
        self._drop_unsent()
        self._answers.clear()
        self._inferences.close()
        self._lending.close()

    async def start(self, start: Mapping[str, Any]) -> Any:
        """Send START and wait for what the worker says to it. InferenceError; cancelled when the worker is lost."""
        self._send(frames.json_frame(Kind.START, start))
        return await self._started

    async def stop(self) -> None:
        """Have the model finalize; cancelled when the worker is lost."""
        self._send(frames.frame(Kind.STOP))
        await self._ended

    def execute(self, items: list[BatchItem], slot: int) -> int:
        """Send a batch and return its number. Its tensors are copied, when this returns or soon."""
        number = self._next_batch
        self._next_batch = number + 1 & 0xFFFFFFFF
        batch = self._batches[number] = Batch(number, slot, items)
        size = 0
        for item in items:
            for tensor in item.request.inputs:
                size += len(tensor.data)
        if size > COPIED_ON_LOOP_BYTES:
            size = sum(self._bytes_to_copy(item.request.inputs) for item in items)
        if size <= COPIED_ON_LOOP_BYTES:
            try:
                frame = self._encode(batch)
            except Exception as error:  # noqa: BLE001  whatever it is, the batch must end
                self._refuse(batch, error)
                return number
            if batch.blocks:
                self._copy(self._take_copies())
            self._send_batch(batch, frame)
        else:
            self._run(self._execute_large(batch, size))
        return number

    def cancel(self, key: int) -> None:
        self._send(frames.frame(Kind.CANCEL, frames.KEY.pack(key)))

    def acknowledge(self, key: int, responses: int) -> None:
        self._send(frames.frame(Kind.CREDIT, frames.CREDIT.pack(key, responses)))

    def ask_ready(self) -> None:
        """`Owner.on_ready` gets the answer, once no batch is running."""
        self._send(frames.frame(Kind.ASK_READY))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _make_room(self, size_bytes: int) -> None:
        """Make memory for many bytes beside the loop."""
        size = self._inbound.blocks.growth(size_bytes) if self._inbound.blocks.free_bytes < size_bytes else 0
        if size:
            descriptor = await _make_segment(size)
            if descriptor is not None:
                self._add_segment(INBOUND, descriptor)

    async def _execute_large(self, batch: Batch, size_bytes: int) -> None:
        """Many bytes are copied beside the loop."""
        await self._make_room(size_bytes)
        copies: list[tuple[Block, Buffer]] = []
        try:
            frame = self._encode(batch)
            if copies := self._take_copies():
                await asyncio.to_thread(self._copy, copies)
        except Exception as error:  # noqa: BLE001  whatever it is, the batch must end
            # A pool of threads that cannot grow raises, and may copy all the same: the blocks are free from now on.
            copies.clear()
            self._refuse(batch, error)
            return
        self._send_batch(batch, frame)

    def _refuse(self, batch: Batch, error: Exception) -> None:
        """End a batch that cannot be sent."""
        log.error("model '%s': a batch could not be sent to its process", self._spec.model, exc_info=error)
        del self._batches[batch.number]
        self._take_back(batch.blocks, set())
        failure = InferenceError(ErrorCode.INTERNAL, f"the batch could not be sent to the model's process: {error}")
        done = frames.Done(batch.number, [failure for _ in batch.items], True, (0, 0, 0), 0, [])
        self._loop.call_soon(self._owner.on_done, batch, done)

    def _send_answer(self, number: int, response: InferenceResponse) -> None:
        """See `inferences.Send`."""
        size = 0
        for tensor in response.outputs:
            size += len(tensor.data)
        if self._answers or (
            size > COPIED_ON_LOOP_BYTES and self._bytes_to_copy(response.outputs) > COPIED_ON_LOOP_BYTES
        ):
            self._answers.append((number, response))
            if len(self._answers) == 1:
                self._run(self._send_answers())
            return
        frame, blocks = self._encode_answer(number, response)
        if blocks:
            self._copy(self._take_copies())
            # The worker's, until it says that they are unused.
            self._retained.update(blocks)
        self._send(frame)

    async def _send_answers(self) -> None:
        """From a large one on, whose many bytes are copied beside the loop."""
        while self._answers:
            number, response = self._answers[0]
            size_bytes = self._bytes_to_copy(response.outputs)
            if size_bytes > COPIED_ON_LOOP_BYTES:
                await self._make_room(size_bytes)
            frame, blocks = self._encode_answer(number, response)
            try:
                if copies := self._take_copies():
                    await asyncio.to_thread(self._copy, copies)
            except Exception as error:  # noqa: BLE001  whatever it is, the inference must be answered
                self._take_back(blocks, set())
                frame, blocks = self._encode_answer(number, _unsent(response, error))
            self._answers.popleft()
            self._retained.update(blocks)
            self._send(frame)

    def _encode_answer(self, number: int, response: InferenceResponse) -> tuple[Buffer, Sequence[Block]]:
        """The frame and its blocks; of an error where the answer cannot be sent."""
        if self._unsent_bytes > MAX_UNSENT_BYTES and response.error is None:
            text = f"more than {MAX_UNSENT_BYTES} bytes wait for the model's process to read them"
            response = _unsent(response, InferenceError(ErrorCode.UNAVAILABLE, text))
        try:
            frame = frames.encode_call_answer(number, response, self._place)
        except Exception as error:
            log.error("model '%s': an answer could not be sent to its process", self._spec.model, exc_info=error)
            self._take_back(self._take_placed(), set())
            self._take_copies()
            frame = frames.encode_call_answer(number, _unsent(response, error), self._place)
        return frame, self._take_placed() if self._placed else ()

    def _copy(self, copies: list[tuple[Block, Buffer]]) -> None:
        for block, data in copies:
            self._inbound.map.write(block, data)
        # The list lives until the next batch is encoded.
        copies.clear()

    def _encode(self, batch: Batch) -> Buffer:
        try:
            frame = frames.encode_execute(batch.number, batch.items, self._inputs, self._output_positions, self._place)
        except BaseException:
            batch.blocks = self._take_placed()
            self._take_copies()
            raise
        if self._placed:
            batch.blocks = self._take_placed()
        return frame

    def _take_placed(self) -> Sequence[Block]:
        """The blocks of the frame that was encoded."""
        placed, self._placed = self._placed, []
        return placed

    def _take_copies(self) -> list[tuple[Block, Buffer]]:
        """What is to be copied into them."""
        copies, self._copies = self._copies, []
        return copies

    def _bytes_to_copy(self, tensors: Sequence[Tensor]) -> int:
        """Of those that neither travel in the frame nor are read where they are."""
        large = 0
        for tensor in tensors:
            size = len(tensor.data)
            if size > frames.INLINE_BYTES and not (size >= LENT_BYTES and self._lending.can_lend(tensor.data)):
                large += size
        return large

    def _place(self, data: Buffer) -> Block | None:
        """A block for a tensor of the batch that is being encoded."""
        self._free_released()
        arena = self._inbound.blocks
        size = len(data)
        if size >= LENT_BYTES and (lent := self._lending.lend(data)) is not None:
            self._holders[lent] = 1
            self._placed.append(lent)
            return lent
        block = arena.allocate(size)
        if block is None:
            growth = arena.growth(size)
            if not growth or growth > COPIED_ON_LOOP_BYTES or (descriptor := make_segment(growth)) is None:
                return None
            block = arena.allocate(size) if self._add_segment(INBOUND, descriptor) else None
            if block is None:
                return None
        self._holders[block] = 1
        self._inbound.map.loans.writable.add(block)
        self._placed.append(block)
        self._copies.append((block, data))
        return block

    def _add_segment(self, arena: int, descriptor: int) -> bool:
        """Map a segment and hand it to the worker; False when this process has no room for it."""
        number = self._segments + 1
        try:
            theirs = os.dup(descriptor)
        except OSError:
            os.close(descriptor)
            return False
        try:
            if arena == INBOUND:
                self._inbound.add(number, descriptor)
            else:
                self._outbound.map(number, descriptor)
        except OSError:
            os.close(theirs)
            return False
        self._segments = number
        self._send(frames.frame(Kind.SEGMENT, frames.SEGMENT.pack(number, arena)), (theirs,))
        return True

    def _hand(self, number: int, descriptor: int) -> None:
        """See `lending.Lending`."""
        self._send(frames.frame(Kind.SEGMENT, frames.SEGMENT.pack(number, BORROWED)), (descriptor,))

    def _forget(self, number: int) -> None:
        """See `lending.Lending`."""
        self._send(frames.frame(Kind.FORGET, frames.FORGET.pack(number)))

    def _let_go(self, block: Block) -> None:
        """The worker's batch or its model holds a block no more."""
        self._inbound.map.loans.writable.discard(block)
        self._drop(block)

    def _drop(self, block: Block) -> None:
        """One holder less."""
        left = self._holders.get(block, 0) - 1
        if left > 0:
            self._holders[block] = left
        elif self._holders.pop(block, None) is None:
            return
        elif block[0] < FIRST_BORROWED:
            self._inbound.blocks.free(*block)
        else:
            self._lending.take_back(block)

    def _free_released(self) -> None:
        released = self._inbound.map.released
        while released:
            self._drop(released.popleft())

    def _send_batch(self, batch: Batch, frame: Buffer) -> None:
        if self._is_stopped or self._left_unread:
            return
        self._send(frame)
        if not self._left_unread:
            batch.is_sent = True
            self._last_sent = batch

    def _send(self, frame: Buffer, descriptors: tuple[int, ...] = ()) -> None:
        """Write a frame, or as much of it as goes; the rest goes when the worker reads."""
        self._last_sent = None
        if self._outbound.released and not self._unsent:
            self._send_released()
        if self._is_stopped:
            _close(descriptors)
            return
        if not self._unsent and not descriptors:
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                sent = 0
            except (BrokenPipeError, ConnectionResetError):
                self._left_unread = True
                return  # it has closed its end: reading tells
            except OSError as error:
                self._lose(f"its channel failed: {error.strerror}")
                return
            if sent == len(frame):
                return
            frame = memoryview(frame)[sent:]
        if len(self._unsent) >= MAX_UNSENT_FRAMES:
            _close(descriptors)
            self._lose(f"it left more than {MAX_UNSENT_FRAMES} frames unread")
            return
        self._unsent.append((memoryview(frame), descriptors))
        self._unsent_bytes += len(frame)
        if len(self._unsent) == 1:
            self._loop.add_writer(self._descriptor, self._write)
            if descriptors:
                self._write()

    def _send_released(self) -> None:
        blocks = []
        while self._outbound.released:
            blocks.append(self._outbound.released.popleft())
        self._send(frames.encode_blocks(Kind.RELEASE, blocks))

    def _write(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                data, descriptors = unsent[0]
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], list(descriptors))
                    _close(descriptors)
                else:
                    sent = self._socket.send(data)
                self._unsent_bytes -= sent
                if sent == len(data):
                    unsent.popleft()
                else:
                    unsent[0] = data[sent:], ()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            # It has closed its end. What it said before can still be read; that it ends is heard of by reading.
            self._left_unread = True
            self._drop_unsent()
        except OSError as error:
            self._lose(f"its channel failed: {error.strerror}")
            return
        self._loop.remove_writer(self._descriptor)

    def _drop_unsent(self) -> None:
        self._unsent_bytes = 0
        while self._unsent:
            _close(self._unsent.popleft()[1])

    def _readable(self) -> None:
        buffer = self._buffer
        try:
            got = self._socket.recv_into(buffer)
        except BlockingIOError:
            return
        except ConnectionResetError:
            # So the kernel says that a socket was closed with something unread in it.
            self._left_unread = True
            self._lose("it closed its channel")
            return
        except OSError as error:
            self._lose(f"its channel failed: {error.strerror}")
            return
        if not got:
            self._lose("it closed its channel")
            return
        if self._partial:
            self._partial += buffer[:got]
            self._take(memoryview(self._partial), self._partial)
            return
        length, number = HEADER.unpack_from(buffer) if got >= HEADER.size else (0, 0)
        if HEADER.size + length != got:
            self._take(buffer[:got], None)
            return
        # Nearly always one frame, and whole.
        body = memoryview(bytes(buffer[HEADER.size : got]))
        try:
            # Neither of these is too long where it has fitted into the buffer.
            if number == frames.DONE:
                self._on_done(body)
            elif number == frames.INFER:
                self._on_infer(body)
            else:
                self._handle(self._check_header(length, number), body)
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")

    def _take(self, data: memoryview, held: bytearray | None) -> None:
        """Handle the whole frames of `data`, and keep the rest. `held` is what `data` is a view of, if it is ours."""
        at = handled = 0
        end = len(data)
        try:
            while end - at >= HEADER.size and handled < MAX_FRAMES_PER_TURN:
                length, number = HEADER.unpack_from(data, at)
                kind = self._check_header(length, number)
                stop = at + HEADER.size + length
                if stop > end:
                    if length > MAX_UNASKED_BYTES:
                        self._check_begun(kind, data[at + HEADER.size :])
                    break
                # A copy, of which the answers are views; a large frame is alone in its buffer, and is not copied.
                body = data[at + HEADER.size : stop]
                # Updates of metrics come by the thousand in one frame: they count for what they cost.
                at, handled = stop, handled + (1 if kind is not Kind.METRICS else 1 + length // METRICS_BYTES_PER_FRAME)
                self._handle(kind, body if held is not None and stop == end else memoryview(bytes(body)))
                if self._is_stopped:
                    return
        except FrameError as error:
            self._lose(f"it sent garbage: {error}")
            return
        if held is None or at:
            self._partial = bytearray(data[at:])
        if handled >= MAX_FRAMES_PER_TURN and self._partial:
            # The rest after the others' turn, without reading more meanwhile.
            self._loop.remove_reader(self._descriptor)
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_stopped:
            return
        self._loop.add_reader(self._descriptor, self._readable)
        self._take(memoryview(self._partial), self._partial)

    def _check_header(self, length: int, number: int) -> Kind:
        kind = _KINDS.get(number)
        if kind is None:
            raise FrameError(f"a frame of kind {number}")
        limit = frames.LIMITS.get(kind)
        if limit is None:
            raise FrameError(f"a {kind.name} frame, which only the server sends")
        if length > limit:
            raise FrameError(f"a {kind.name} frame of {length} bytes")
        return kind

    def _check_begun(self, kind: Kind, body: memoryview) -> None:
        """Of an answer's frame, the part that has come. FrameError."""
        if kind is Kind.DONE and len(body) >= HEADER.size * 2:
            self._batch_of(*frames.batch_of(body))

    def _batch_of(self, number: int, count: int) -> Batch:
        """The batch that a DONE frame ends with so many replies. FrameError."""
        batch = self._batches.get(number)
        if batch is None or not batch.is_sent or count != len(batch.items):
            raise FrameError(f"an end of batch {number} with {count} answers, which it was not asked for")
        return batch

    def _handle(self, kind: Kind, body: memoryview) -> None:
        match kind:
            case Kind.DONE:
                self._on_done(body)
            case Kind.INFER:
                self._on_infer(body)
            case Kind.RESPONSE:
                response = frames.decode_response(body, self._outputs, self._locate)
                self._owner.on_response(response)
            case Kind.TAKEN if len(body) == frames.TAKEN.size:
                self._inferences.take(*frames.TAKEN.unpack(body))
            case Kind.CANCEL_CALL if len(body) == frames.CALL.size:
                self._inferences.cancel(*frames.CALL.unpack(body))
            case Kind.HELD_UP if len(body) == frames.HELD_UP.size:
                self._on_held_up(*frames.HELD_UP.unpack(body))
            case Kind.UNUSED:
                self._on_unused(frames.decode_blocks(body))
            case Kind.MAPPED if len(body) == frames.MAPPED.size:
                number, is_mapped = frames.MAPPED.unpack(body)
                self._lending.on_mapped(number, bool(is_mapped))
            case Kind.LOG:
                self._on_log(bytes(body))
            case Kind.METRICS:
                self._on_metrics(body)
            case Kind.CALL:
                self._on_call(body)
            case Kind.READY if len(body) == 1:
                self._owner.on_ready(bool(body[0]))
            case Kind.STARTED if not self._started.done():
                self._started.set_result(frames.decode_json(body))
            case Kind.FAILED if not self._started.done():
                self._started.set_exception(frames.error_from_json(frames.decode_json(body)))
            case Kind.STOPPED if not self._ended.done():
                self._ended.set_result(None)
            case _:
                raise FrameError(f"a {kind.name} frame that was not asked for")

    def _on_done(self, body: memoryview) -> None:
        batch = self._batch_of(*frames.batch_of(body))
        done = frames.decode_done(body, self._outputs, self._locate)
        del self._batches[done.batch]
        if batch is self._last_sent:
            self._last_sent = None  # which would hold on to its tensors
        if batch.blocks or done.retained:
            self._take_back(batch.blocks, set(done.retained))
        if done.wanted_bytes:
            self._give_memory(done.wanted_bytes)
        self._owner.on_done(batch, done)

    def _take_back(self, blocks: Sequence[Block], retained: set[Block]) -> None:
        """A batch's blocks are free, but for those that the model holds on to."""
        if not retained <= set(blocks):
            raise FrameError("a batch's end retains blocks that are not its own")
        self._retained |= retained
        for block in blocks:
            if block not in retained:
                self._let_go(block)
        self._free_released()

    def _give_memory(self, wanted_bytes: int) -> None:
        """The worker's answers found no room in shared memory: it gets more, up to the bound, for the next ones."""
        size = 0 if self._is_growing else self._outbound_size.growth(wanted_bytes)
        if size:
            self._is_growing = True
            self._run(self._add_outbound(size))

    async def _add_outbound(self, size_bytes: int) -> None:
        descriptor = await _make_segment(size_bytes)
        self._is_growing = False
        if descriptor is not None and self._add_segment(OUTBOUND, descriptor):
            self._outbound_size.add(self._segments, size_bytes)

    def _locate(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        """Bytes of an answer: in the worker's arena, or in a block that it may look at."""
        if segment in self._outbound.sizes():
            if len(self._outbound.released) > frames.MAX_BLOCKS:
                raise ValueError(f"more than {frames.MAX_BLOCKS} blocks that it was not given back yet")
            return self._outbound.lease((segment, offset), offset, size_bytes)
        if segment >= FIRST_BORROWED:
            return self._lending.view(segment, offset, size_bytes)
        start = self._inbound.blocks.holding(segment, offset, size_bytes)
        if start is None:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of segment {segment}, which it was not given")
        block = segment, start
        self._holders[block] = self._holders.get(block, 0) + 1
        return self._inbound.map.lease(block, offset, size_bytes)

    def _on_infer(self, body: memoryview) -> None:
        infer = frames.decode_infer(body, self._locate)
        if infer.wanted_bytes:
            self._give_memory(infer.wanted_bytes)
        batch = self._batches.get(infer.batch)
        if batch is None and not infer.batch and len(self._batches) == 1 and not self._spec.decoupled:
            # A thread of the model's asks, for which the batch most likely waits: it has to answer when it ends.
            (batch,) = self._batches.values()
            infer.batch = batch.number
        self._inferences.begin(infer, None if batch is None else batch.slot)

    def _on_held_up(self, number: int, batch: int) -> None:
        if not batch:
            self._inferences.hold_up(number, None)
        elif batch in self._batches:
            self._inferences.hold_up(number, self._batches[batch].slot)

    def cancel_calls_of(self, batch: int) -> None:
        """Cancel the inferences that were asked for from this batch."""
        self._inferences.cancel_of(batch)

    def _on_unused(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block not in self._retained:
                raise FrameError("it gave back a block that it did not hold")
            self._retained.discard(block)
            self._let_go(block)

    def _on_log(self, body: bytes) -> None:
        if not body or body[0] >= len(_LEVELS):
            raise FrameError("a line of log without a level")
        now = self._loop.time()
        if now - self._lines_since > 1:
            self._lines_since, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_SECOND:
            raise FrameError(f"more than {MAX_LINES_PER_SECOND} lines of log in a second")
        place, found, text = str(body[1:], "utf-8", "replace").partition(frames.PLACE_END)
        if not found:
            place, text = self._spec.instance, place
        about = {"model": self._spec.model, "version": str(self._spec.version)}
        say(_LEVELS[body[0]], place, text, about)

    def _on_metrics(self, body: memoryview) -> None:
        if len(body) % frames.METRIC.size:
            raise FrameError(f"{len(body)} bytes are no metrics")
        updates = []
        for metric, operation, value in frames.METRIC.iter_unpack(body):
            if operation >= len(frames.METRIC_OPERATIONS):
                raise FrameError(f"metric operation {operation}")
            updates.append((metric, frames.METRIC_OPERATIONS[operation], value))
        self._owner.on_metrics(updates)

    def _on_call(self, body: memoryview) -> None:
        if len(body) < frames.CALL.size:
            raise FrameError("a call without a number")
        (number,) = frames.CALL.unpack_from(body)
        match frames.decode_json(body[frames.CALL.size :]):
            case [str(method), dict(arguments)]:
                if self._calls >= MAX_CALLS:
                    raise FrameError(f"more than {MAX_CALLS} calls at a time")
                self._calls += 1
                self._run(self._answer_call(number, method, arguments))
            case _:
                raise FrameError("a call that is none")

    async def _answer_call(self, number: int, method: str, arguments: Mapping[str, Any]) -> None:
        try:
            went_well, value = True, await self._owner.on_call(method, arguments)
        except InferenceError as error:
            went_well, value = False, frames.error_json(error)
        except Exception as error:
            log.error("model '%s': call '%s' failed", self._spec.model, method[:100], exc_info=error)
            went_well, value = False, frames.error_json(InferenceError(ErrorCode.INTERNAL, "the server failed at it"))
        finally:
            self._calls -= 1
        body = frames.RESULT.pack(number, went_well) + frames.json_body(value)
        self._send(frames.frame(Kind.RESULT, body))

    def _lose(self, reason: str) -> None:
        if not self._is_stopped:
            self.close()
            self._on_lost(reason)


def _unsent(response: InferenceResponse, error: Exception) -> InferenceResponse:
    """What is sent instead of an answer that cannot be."""
    if not isinstance(error, InferenceError):
        error = InferenceError(ErrorCode.INTERNAL, f"the answer could not be sent to the model's process: {error}")
    return InferenceResponse(response.model_name, response.model_version, error=error, final=response.final)


async def _make_segment(size_bytes: int) -> int | None:
    """See `segments.make_segment`; on a thread, which goes on when nobody waits any more."""
    making = asyncio.ensure_future(asyncio.to_thread(make_segment, size_bytes))
    try:
        return await asyncio.shield(making)
    except RuntimeError:
        return None  # the system has no thread left either
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(making: "asyncio.Future[int | None]") -> None:
    if not making.cancelled() and (descriptor := making.result()) is not None:
        os.close(descriptor)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
