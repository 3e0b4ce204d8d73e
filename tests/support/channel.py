"""Connections to workers: fakes that the test drives frame by frame, and workers that run the real code."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.hosting import Answer, Host, HostedRequest, Reply, Runner, WorkerSpec
from halimede.backends.service_calls import MetricValue, ServiceCall, ServiceResult
from halimede.channel.frames import HEADER, SEGMENT, SHARED, ChannelFrame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.segments import SegmentMap
from halimede.channel.server_end.channel import STALL_SECS
from halimede.channel.server_end.memory import ARENA_BYTES
from halimede.core.spin import SpinPolicy
from halimede.core.types import Buffer, DataType, InferenceRequest, InferenceResponse, Tensor
from halimede.inference_frames.calls import Infer
from halimede.workers.claim import DESCRIPTORS, Claim
from halimede.workers.connection.batches import SentBatch
from halimede.workers.connection.worker_connection import Owners, WorkerConnection
from halimede.workers.frames.answers import Done, Response, encode_done, encode_response
from halimede.workers.frames.batches import ExecuteFrame, decode_execute
from halimede.workers.frames.kinds import WORKER_FRAMES, WorkerFrame
from halimede.workers.host.batches import BatchRunner
from halimede.workers.host.worker_host import WorkerHost
from halimede.workers.states import HeldStates
from halimede.workers.worker import BatchItem
from support.processes import open_files

LIMIT_S = 30.0
INPUTS = ("in", "b")
OUTPUTS = ("out", "text")
SPIN = SpinPolicy(is_on=True, processors=2)
SPEC = WorkerSpec(
    model="m", version=1, instance="m_0_0", ordinal=0, kind="CPU", device_id=0, device_uuid="", backend="python",
    runner="", config_json="{}", repository="", artifact="",
)  # fmt: skip


def tensor(name: str, size: int, first: int = 0) -> Tensor:
    """A tensor whose bytes depend on `first`, so that a test sees which tensor it got."""
    filling = np.arange(first, first + -(-size // 4), dtype=np.uint32).tobytes()[:size]
    return Tensor(name, DataType.UINT8, (size,), filling)


def item(key: int, *sizes: int, **fields: Any) -> BatchItem:
    inputs = [tensor(name, size, key) for name, size in zip(INPUTS, sizes, strict=False)]
    return BatchItem(key, InferenceRequest("m", inputs=inputs, **fields), 1, cancelled=False)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:halimede (")


def pages() -> int:
    """The mapped pages of `workers.claim`."""
    return Path("/proc/self/maps").read_text().count("memfd:halimede batches (")


@dataclass
class RecordingOwner:
    """An `Owner` that records all events. `kept` has the finished batches, with a copy of their outputs."""

    done: list[tuple[SentBatch, Done]] = field(default_factory=list)
    responses: list[Response] = field(default_factory=list)
    ready: list[bool] = field(default_factory=list)
    metrics: list[tuple[int, str, float]] = field(default_factory=list)
    calls: list[ServiceCall[ServiceResult]] = field(default_factory=list)
    hold_calls: asyncio.Event | None = None
    on_end: Callable[[SentBatch, Done], None] | None = None
    asked: "list[Asked]" = field(default_factory=list)
    on_ask: "Callable[[Asked], None] | None" = None
    uncalled: list[int] = field(default_factory=list)
    taken: list[tuple[int, int]] = field(default_factory=list)

    def on_done(self, batch: SentBatch, done: Done) -> None:
        if self.on_end is not None:
            self.on_end(batch, done)
        self.done.append((batch, done))

    def on_response(self, response: Response) -> None:
        self.responses.append(response)

    def on_ready(self, is_ready: bool) -> None:
        self.ready.append(is_ready)

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        self.metrics += updates

    async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        """Answer: the value of a metric is its number."""
        self.calls.append(call)
        if self.hold_calls is not None:
            await self.hold_calls.wait()
        return float(call.metric) if isinstance(call, MetricValue) else None

    def on_infer(
        self,
        infer: Infer,
        items: Sequence[BatchItem] | None,
        on_response: Callable[[InferenceResponse], None],
    ) -> int:
        ticket = len(self.asked) + 1001
        asked = Asked(ticket, infer.batch, items, infer.request, on_response)
        self.asked.append(asked)
        if self.on_ask is not None:
            self.on_ask(asked)
        return ticket

    def on_answered(self) -> None:
        """This owner does not wait for the next call."""

    def on_cancel_call(self, ticket: int) -> None:
        self.uncalled.append(ticket)

    def on_taken(self, ticket: int, responses: int) -> None:
        self.taken.append((ticket, responses))


@dataclass
class Asked:
    """An inference that the worker requested."""

    ticket: int
    batch: int
    items: Sequence[BatchItem] | None
    request: InferenceRequest
    on_response: Callable[[InferenceResponse], None]

    def answer(self, *outputs: Tensor, final: bool = True, **fields: Any) -> None:
        request = self.request
        self.on_response(InferenceResponse(request.model_name, "3", request.id, list(outputs), final=final, **fields))


class Stage:
    """A connection, its owner and the other end of its socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arena_bytes: int, stall_secs: float = STALL_SECS) -> None:
        server_end, self.worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.worker_end.setblocking(False)
        self.loop = loop
        self.heard = RecordingOwner()
        self.states = HeldStates()
        self.lost: list[str] = []
        self.connection = WorkerConnection(
            server_end,
            SPEC,
            OUTPUTS,
            Owners(self.heard, self.heard, self.heard, self.states),
            self.lost.append,
            loop,
            arena_bytes=arena_bytes,
            stall_secs=stall_secs,
        )
        self.segments = SegmentMap()
        self.shared: list[int] = []
        self.longest_turn_s = 0.0
        self._received = bytearray()
        self._ticked = time.thread_time()
        self._ticker = loop.call_soon(self._tick)

    def _tick(self) -> None:
        # Processor time: the loop's own work, independent of the load of the machine.
        now = time.thread_time()
        self.longest_turn_s = max(self.longest_turn_s, now - self._ticked)
        self._ticked = now
        self._ticker = self.loop.call_later(0.001, self._tick)

    async def send(self, data: Buffer) -> None:
        """Send this as the worker; stops when the server closes the channel."""
        with suppress(BrokenPipeError, ConnectionResetError):
            await asyncio.wait_for(self.loop.sock_sendall(self.worker_end, data), LIMIT_S)

    async def receive(self) -> tuple[IntEnum, memoryview]:
        """The server's next frame. Maps the segments that are sent before it, and records those that are shared."""
        while True:
            while len(self._received) < HEADER.size:
                await self._receive()
            length, number = HEADER.unpack_from(self._received)
            while len(self._received) < HEADER.size + length:
                await self._receive()
            body = bytes(self._received[HEADER.size : HEADER.size + length])
            del self._received[: HEADER.size + length]
            if number == ChannelFrame.START:
                for _ in range(DESCRIPTORS):
                    os.close(self._descriptors.pop(0))
            if number != ChannelFrame.SEGMENT:
                return WORKER_FRAMES[number], memoryview(body)
            segment, arena = SEGMENT.unpack(body)
            descriptor = self._descriptors.pop(0)
            if arena == SHARED:
                self.shared.append(segment)
                os.close(descriptor)
            else:
                self.segments.map(segment, descriptor)

    _descriptors: list[int]

    async def _receive(self) -> None:
        readable = self.loop.create_future()
        self.loop.add_reader(self.worker_end, lambda: readable.done() or readable.set_result(None))
        try:
            await asyncio.wait_for(readable, LIMIT_S)
        finally:
            self.loop.remove_reader(self.worker_end)
        self._descriptors = getattr(self, "_descriptors", [])
        data, descriptors, _, _ = socket.recv_fds(self.worker_end, 1 << 20, 8)
        assert data, "the server has closed the channel"
        self._received += data
        self._descriptors += descriptors

    async def receive_batch(self) -> ExecuteFrame:
        kind, body = await self.receive()
        assert kind is WorkerFrame.EXECUTE

        def locate(segment: int, offset: int, size: int) -> Buffer:
            return self.segments.lease((segment, offset), offset, size)

        return decode_execute(body, len(OUTPUTS), locate)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}; lost: {self.lost}"
            await asyncio.sleep(0.001)

    async def until_lost(self) -> str:
        await self.until(lambda: self.lost, "the loss of the worker")
        assert len(self.lost) == 1
        return self.lost[0]

    def close(self) -> None:
        self._ticker.cancel()
        self.connection.close()
        self.worker_end.close()


@asynccontextmanager
async def leaving_nothing() -> AsyncIterator[None]:
    """Check that the block leaves no descriptor and no mapping behind."""
    before = open_files(), mappings() + pages()
    yield
    # Threads may still be creating a segment that no caller waits for.
    deadline = time.monotonic() + LIMIT_S
    # A descriptor of an earlier test may be closed meanwhile, so that fewer than before are open.
    while open_files() > before[0] or mappings() + pages() > before[1]:
        now = open_files(), mappings(), pages()
        assert time.monotonic() < deadline, f"descriptors, mappings, pages: {now}, before {before}"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def stage(arena_bytes: int = ARENA_BYTES, stall_secs: float = STALL_SECS) -> AsyncIterator[Stage]:
    """Check at the end that nothing is left, and that a loss was reported only once."""
    async with leaving_nothing(), one_of_several(arena_bytes, stall_secs) as each:
        yield each


@asynccontextmanager
async def one_of_several(arena_bytes: int = ARENA_BYTES, stall_secs: float = STALL_SECS) -> AsyncIterator[Stage]:
    """One of several stages in a test; checks that it leaves nothing of its own."""
    each = Stage(asyncio.get_running_loop(), arena_bytes, stall_secs)
    try:
        yield each
        assert len(each.lost) <= 1
    finally:
        each.close()
        each.heard = RecordingOwner()
        del each.connection, each.segments


def done_frame(
    batch: int,
    replies: list[Reply],
    *,
    store: Callable[[Buffer], tuple[int, int] | None] = lambda _: None,
    wanted: int = 0,
    retained: Sequence[tuple[int, int]] = (),
) -> Buffer:
    positions = {name: at for at, name in enumerate(OUTPUTS)}
    return encode_done(batch, replies, False, (1, 2, 3), positions, store, lambda: (wanted, retained))


def response_frame(
    key: int, reply: Reply, *, final: bool = False, store: Callable[[Buffer], tuple[int, int] | None] = lambda _: None
) -> Buffer:
    positions = {name: at for at, name in enumerate(OUTPUTS)}
    return encode_response(key, reply, final, (1, 2), positions, store)


@dataclass
class Script:
    """A `Runner` with one function as the model."""

    run: Callable[[Sequence[HostedRequest]], Any]
    """Returns the replies, or an awaitable of them."""
    is_async: bool = False
    answers_is_ready: bool = False

    def execute(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        return list(self.run(requests))

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        return list(await self.run(requests))

    async def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing to finalize."""


def echo(requests: Sequence[HostedRequest]) -> list[Reply]:
    """Return each request's first input as its output, without a copy."""
    return [
        Answer([Tensor("out", each.datatype, each.shape, each.data) for each in one.request.inputs[:1]])
        for one in requests
    ]


def doubled(requests: Sequence[HostedRequest]) -> list[Reply]:
    """Return each request's first input repeated twice, in new memory of the model."""
    return [
        Answer([Tensor("out", each.datatype, (len(each.data) * 2,), bytes(each.data) * 2)])
        for one in requests
        for each in one.request.inputs[:1]
    ]


class HonestWorker(threading.Thread):
    """The worker process's code over a socket, on a thread of the test process."""

    def __init__(
        self, descriptor: int, runner: Callable[[Host], Runner], decoupled: bool = False, claim: Claim | None = None
    ) -> None:
        super().__init__(daemon=True)
        self._claim = claim or Claim()
        self._make = runner
        self._spec = replace(SPEC, decoupled=decoupled)
        self.channel = Channel(descriptor, WORKER_FRAMES)
        self.memory = Memory(self.channel)
        self.host = WorkerHost(self.channel, self.memory, self._spec, OUTPUTS)
        self.failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            runner = self._make(self.host)
            serving = BatchRunner(self.channel, self.memory, self.host, runner, self._spec, OUTPUTS, SPIN, self._claim)
            if runner.is_async:
                asyncio.run(serving.run_on_loop())
            else:
                serving.run()
        except ServerGoneError:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            self.channel.disconnect()
            self._claim.close()
