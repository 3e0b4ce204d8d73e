"""The server's end of the channel to one worker process, for the lifetime of that process.

Connects the other modules of this package, and handles what they do not: start and stop of the process, its readiness,
log and metrics. All methods are called on the event loop's thread.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from halimede.backends.hosting import WorkerSpec
from halimede.channel.frames import ChannelFrame, FrameError, encode_frame, unexpected
from halimede.channel.json_frames import json_frame
from halimede.channel.server_end.channel import STALL_SECS, Channel
from halimede.channel.server_end.memory import ARENA_BYTES, Memory
from halimede.channel.server_end.starting import StartAnswer
from halimede.channel.server_end.tasks import Tasks
from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.processes.output import log_line
from halimede.workers.claim import Claim
from halimede.workers.connection.batches import BatchOwner, SentBatches
from halimede.workers.connection.calls import CallOwner, Calls
from halimede.workers.connection.services import ServiceCalls, ServiceOwner
from halimede.workers.connection.states import States
from halimede.workers.frames.kinds import METRIC, METRIC_OPERATIONS, ORIGIN_END, WORKER_FRAMES, WorkerFrame
from halimede.workers.states import HeldStates

MAX_LINES_PER_SECOND = 2_000
"""A worker that sends more log lines in a second is ended. `host.worker_host` limits itself to a quarter of that."""

METRICS_BYTES_PER_FRAME = 64
"""Bytes of metric updates that take as much work as one frame: a METRICS frame may have thousands."""

_LEVELS = (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG)


class ModelOwner(ServiceOwner, Protocol):
    """Gets reports of the model, and performs its service calls."""

    def on_ready(self, is_ready: bool) -> None:
        """The model has reported whether it is ready."""

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """The model has updated its own metrics."""


class Owners(NamedTuple):
    """The receivers of a worker's messages, and the account of the states that workers keep."""

    batches: BatchOwner
    calls: CallOwner
    model: ModelOwner
    states: HeldStates


class WorkerConnection:
    """The connection to one process. `channel`, `memory`, `batches`, `calls` and `states` are used from outside."""

    def __init__(
        self,
        channel: socket.socket,
        spec: WorkerSpec,
        outputs: Sequence[str],
        owners: Owners,
        on_lost: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
        arena_bytes: int = ARENA_BYTES,
        memory: MemoryBounds = UNBOUNDED,
        stall_secs: float = STALL_SECS,
    ) -> None:
        """OSError if the system has no descriptor left."""
        # First, because nothing is to be undone when it fails.
        self._claim = Claim()
        self._spec = spec
        self._owner = owners.model
        self._on_lost = on_lost
        self._loop = loop
        self._tasks = Tasks(loop)
        self.channel = Channel(channel, WORKER_FRAMES, self._on_channel_lost, loop, stall_secs)
        self.memory = Memory(self.channel, self._tasks, loop, arena_bytes, memory)
        self.batches = SentBatches(
            self.channel, self.memory, self._tasks, spec.model, outputs, self._claim, owners.batches, loop
        )
        self.calls = Calls(
            self.channel, self.memory, self.batches, self._tasks, spec.model, spec.decoupled, owners.calls
        )
        self.states = States(self.channel, owners.states)
        self.services = ServiceCalls(self.channel, self._tasks, spec.model, owners.model, self.states)
        self._started = StartAnswer(self.channel, loop)
        self._ended: asyncio.Future[None] = loop.create_future()
        self._is_closed = False
        self._lines_since = 0.0
        self._lines = 0
        handle = self.channel.handle
        handle(WorkerFrame.STOPPED, self._on_stopped)
        handle(WorkerFrame.READY, self._on_ready)
        handle(WorkerFrame.LOG, self._on_log)
        handle(WorkerFrame.METRICS, self._on_metrics, bytes_per_frame=METRICS_BYTES_PER_FRAME)

    def __repr__(self) -> str:
        sent = f"{len(self.batches)} batches, {self.channel!r}"
        return f"<Connection {self._spec.instance} {sent}, {self.memory.inbound.blocks!r}>"

    def close(self) -> None:
        """Close the channel. Answers in shared memory stay valid."""
        if self._is_closed:
            return
        self._is_closed = True
        self.channel.close()
        self._tasks.cancel()
        self._started.cancel()
        self._ended.cancel()
        self.batches.close()
        self.calls.close()
        self.memory.close()
        self.states.close()

    def _on_channel_lost(self, reason: str) -> None:
        self.close()
        self._on_lost(reason)

    async def start(self, start: Mapping[str, Any]) -> Any:
        """Send START and wait for the worker's answer. InferenceError; cancelled if the worker is lost."""
        self.channel.send(json_frame(ChannelFrame.START, start), self._claim.share())
        return await self._started.wait()

    async def stop(self) -> None:
        """Let the model finalize, and wait for that; cancelled if the worker is lost."""
        self.channel.send(encode_frame(ChannelFrame.STOP))
        await self._ended

    def ask_ready(self) -> None:
        """`ModelOwner.on_ready` gets the answer, once no batch is running."""
        self.channel.send(encode_frame(WorkerFrame.ASK_READY))

    def _on_stopped(self, _: memoryview) -> None:
        if self._ended.done():
            raise unexpected(WorkerFrame.STOPPED)
        self._ended.set_result(None)

    def _on_ready(self, body: memoryview) -> None:
        if len(body) != 1:
            raise unexpected(WorkerFrame.READY)
        self._owner.on_ready(bool(body[0]))

    def _on_log(self, body: memoryview) -> None:
        if not body or body[0] >= len(_LEVELS):
            raise FrameError("a log line without a valid level")
        now = self._loop.time()
        if now - self._lines_since > 1:
            self._lines_since, self._lines = now, 0
        self._lines += 1
        if self._lines > MAX_LINES_PER_SECOND:
            raise FrameError(f"more than {MAX_LINES_PER_SECOND} log lines in a second")
        origin, found, text = str(body[1:], "utf-8", "replace").partition(ORIGIN_END)
        if not found:
            origin, text = self._spec.instance, origin
        about = {"model": self._spec.model, "version": str(self._spec.version)}
        log_line(_LEVELS[body[0]], origin, text, about)

    def _on_metrics(self, body: memoryview) -> None:
        if len(body) % METRIC.size:
            raise FrameError(f"metrics of {len(body)} bytes")
        updates = []
        for metric, operation, value in METRIC.iter_unpack(body):
            if operation >= len(METRIC_OPERATIONS):
                raise FrameError(f"metric operation {operation}")
            updates.append((metric, METRIC_OPERATIONS[operation], value))
        self._owner.on_metrics(updates)
