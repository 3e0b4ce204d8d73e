"""What a worker process does: start the model's runner, execute batches, answer, stop.

Everything happens on the main thread, which is where models expect it: signals, asyncio and CUDA are at home there.
Standard library and numpy only, for any CPython from 3.10 on.
"""

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from halimede.backends.hosting import Answer, HostedRequest, Reply, Runner, WorkerSpec
from halimede.core.types import Buffer, ErrorCode, InferenceError, InferenceRequest
from halimede.core.watching import is_worth_watching
from halimede.workers import frames
from halimede.workers.child.blas import set_blas_threads
from halimede.workers.child.borrowed import Borrowed
from halimede.workers.child.calls import Calls, InferenceCall, batch_of_task
from halimede.workers.child.channel import Channel, OpenRequest, ServerGoneError
from halimede.workers.frames import BORROWED, FIRST_BORROWED, INBOUND, Kind
from halimede.workers.segments import Block, OwnArena, SegmentMap

ARENA_BYTES = 256 << 20
"""Answers that lie in shared memory at a time. What is over it travels in frames."""

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")

LINES_PER_SECOND = 500
"""Lines that are sent to the log, which takes fewer: a model that logs more must not slow the server down."""


def main(descriptor: int) -> int:
    """Serve the channel until the server ends it; the process's exit code."""
    _outlive_stops()
    memory = Memory()
    channel = Channel(descriptor, memory.add_segment, memory.release, memory.forget)
    # Processes that the model forks must not speak for it, nor keep the channel open when it has died.
    os.register_at_fork(after_in_child=channel.disconnect)
    try:
        return _work(channel, memory)
    except ServerGoneError:
        return 0


def _outlive_stops() -> None:
    """What asks the server to stop may ask all its processes: the server drains, and ends this one when it has.

    A handler and not SIG_IGN, which programs that the model starts would keep. Processes that it forks end as ever, and
    from their first moment: a handler of Python's runs between two instructions, so a signal that comes just before
    the process waits (for a queue's semaphore, say) would leave it waiting, and with it the one who ends it.
    """
    stops = (signal.SIGTERM, signal.SIGINT)
    masks: dict[int, set[int]] = {}

    def on_signal(_number: int, _frame: object) -> None:
        """Nothing."""

    def before() -> None:
        masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, stops)

    def in_child() -> None:
        for number in stops:
            if signal.getsignal(number) is on_signal:
                signal.signal(number, signal.SIG_DFL)
        after()

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop(threading.get_ident()))

    for number in stops:
        signal.signal(number, on_signal)
    os.register_at_fork(before=before, after_in_child=in_child, after_in_parent=after)


def _work(channel: Channel, memory: "Memory") -> int:
    kind, body = channel.receive()
    if kind is not Kind.START:
        raise RuntimeError(f"the first frame is {kind.name}, not START")
    start = json.loads(bytes(body))
    spec = WorkerSpec(**start["spec"])
    host = WorkerHost(channel, memory, spec, start["outputs"])
    set_blas_threads(spec.threads)
    module, _, function = spec.runner.partition(":")
    try:
        if start["work"] == "complete_config":
            completed = import_module(module).complete_config(spec, host)
            channel.send(frames.json_frame(Kind.STARTED, completed))
            return 0
        runner: Runner = getattr(import_module(module), function)(spec, host)
    except InferenceError as error:
        channel.send(frames.json_frame(Kind.FAILED, frames.error_json(error)))
        return 1
    # What the start has made lives as long as the process: the collector need not look at it again and again.
    gc.freeze()
    said = {"is_async": runner.is_async, "answers_is_ready": runner.answers_is_ready}
    channel.send(frames.json_frame(Kind.STARTED, said))
    serving = Serving(channel, memory, host, runner, spec, start["inputs"], start["outputs"])
    if runner.is_async:
        asyncio.run(serving.run_on_loop())
    else:
        serving.run()
    return 0


class Memory:
    """Both arenas as the worker sees them, what it borrows, and which of all these blocks the model still looks at."""

    def __init__(self) -> None:
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

    def add_segment(self, number: int, arena: int, descriptor: int) -> bool:
        """Whether it can be used, which only one that is borrowed need not be."""
        if arena == BORROWED:
            return self.borrowed.try_map(number, descriptor)
        if arena == INBOUND:
            self.inbound.map(number, descriptor)
        else:
            with self._lock:
                self.outbound.add(number, descriptor)
        return True

    def forget(self, number: int) -> None:
        self.borrowed.forget(number)

    def release(self, blocks: Sequence[Block]) -> None:
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


class WorkerHost:
    """The `Host` of the model's code."""

    def __init__(self, channel: Channel, memory: Memory, spec: WorkerSpec, outputs: Sequence[str]) -> None:
        self._channel = channel
        self._memory = memory
        self._model = spec.model
        self._verbose = spec.log_verbose > 0
        self._positions = {name: position for position, name in enumerate(outputs)}
        self._lines_since = 0.0
        self._lines = 0
        self.calls = Calls(channel, memory.place, memory.look_at_own, memory.take_wanted)
        self.unsent_metrics: list[bytes] = []
        """Updates that are to be sent before anything else."""
        self._metrics_lock = threading.Lock()
        self.ending = ""
        """Why the process is to end after its batch, "" when it is not."""
        memory.borrowed.on_written = self._refuse

    def _refuse(self, segment: int) -> None:
        self._channel.send_later(frames.frame(Kind.MAPPED, frames.MAPPED.pack(segment, False)))

    def is_cancelled(self, request: HostedRequest) -> bool:
        return self._channel.is_cancelled(request.key)

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        channel, key = self._channel, request.key
        opened = channel.open.get(key)
        if opened is None:
            return
        if not final and not channel.wait_for_room(key):
            return
        times = opened.begun_ns, time.monotonic_ns()
        response = frames.encode_response(key, reply, final, times, self._positions, self._memory.place)
        if final:
            channel.open.pop(key, None)
        else:
            # Before it is sent: it may be taken before this thread runs again.
            channel.count(key, sum(map(len, (t.data for t in reply.outputs))) if isinstance(reply, Answer) else 0)
        channel.send([*self.updates(), response])
        self.give_back()

    def log(self, level: str, message: str, place: str = "") -> None:
        if level == "VERBOSE" and not self._verbose:
            return
        now = time.monotonic()
        if now - self._lines_since > 1:
            left_out = self._lines - LINES_PER_SECOND
            self._lines_since, self._lines = now, 0
            if left_out > 0:
                text = f"{left_out} lines of its log were left out: at most {LINES_PER_SECOND} are taken in a second"
                self._send_line("WARNING", text)
        self._lines += 1
        if self._lines > LINES_PER_SECOND:
            return
        self._send_line(level, message, place)

    def _send_line(self, level: str, message: str, place: str = "") -> None:
        if place:
            message = f"{place}{frames.PLACE_END}{message}"
        text = message.encode("utf-8", "replace")[: frames.MAX_LINE_BYTES]
        self._channel.send(frames.frame(Kind.LOG, bytes((frames.LOG_LEVELS.index(level),)) + text))

    def end(self, why: str) -> None:
        self.ending = why

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        self.flush()
        return self._channel.call(method, arguments)

    def infer(self, request: InferenceRequest) -> InferenceCall:
        call = self.calls.infer(request)
        # Afterwards: the server works meanwhile.
        if self._memory.inbound.released:
            self.give_back()
        return call

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        packed = frames.METRIC.pack(metric, frames.METRIC_OPERATIONS.index(operation), value)
        # At the end of a batch on the main thread they are sent with its answers.
        if self.calls.executing and threading.current_thread() is threading.main_thread():
            with self._metrics_lock:
                self.unsent_metrics.append(packed)
            if len(self.unsent_metrics) >= frames.MAX_UPDATES:
                self.flush()
        else:
            self._channel.send(frames.frame(Kind.METRICS, packed))

    def updates(self) -> list[Buffer]:
        """What is to be sent before anything else: changes of metrics."""
        if not self.unsent_metrics:
            return []
        with self._metrics_lock:
            packed, self.unsent_metrics = self.unsent_metrics, []
        return [frames.frame(Kind.METRICS, b"".join(packed))]

    def give_back(self) -> None:
        """Tell the server which of its blocks are free again."""
        if self._memory.inbound.released:
            with self._memory.telling:
                if unused := self._memory.unused():
                    self._channel.send(frames.encode_blocks(Kind.UNUSED, unused))

    def flush(self) -> None:
        """Send what waits for an answer to go with."""
        for update in self.updates():
            self._channel.send(update)
        self.give_back()


class Serving:
    """Batches in, answers out."""

    def __init__(
        self,
        channel: Channel,
        memory: Memory,
        host: WorkerHost,
        runner: Runner,
        spec: WorkerSpec,
        inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:
        self._channel = channel
        self._memory = memory
        self._host = host
        self._runner = runner
        self._model = spec.model
        self._decoupled = spec.decoupled
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self._positions = {name: position for position, name in enumerate(outputs)}
        self._blocks: list[Block] = []
        """Of the batch that is being decoded, or answered."""
        self._unused: list[Block] = []
        self._last_size = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped: asyncio.Event = asyncio.Event()

    def run(self) -> None:
        """Execute one batch after the other until STOP."""
        self._host.calls.serve(runs_loop=False, is_decoupled=self._decoupled)
        channel = self._channel
        processors = len(os.sched_getaffinity(0))
        answered_ns = 0
        while True:
            if self._memory.inbound.released:
                self._host.flush()
            kind, body = channel.receive()
            if kind is Kind.EXECUTE:
                gap_ns = time.monotonic_ns() - answered_ns
                self._execute(body)
                answered_ns = time.monotonic_ns()
                channel.expects_more = is_worth_watching(processors, gap_ns, self._last_size)
            elif kind is Kind.ASK_READY:
                self._say_ready(asyncio.run(self._runner.is_ready()))
            elif kind is Kind.STOP:
                self._close()
                return
            # The last batch must not stay alive while there is nothing to do.
            del body

    async def run_on_loop(self) -> None:
        """The same for a runner whose batches are coroutines."""
        self._host.calls.serve(runs_loop=True, is_decoupled=self._decoupled)
        loop = asyncio.get_running_loop()
        self._channel.read_on_loop(loop, self._on_work)
        self._on_work()
        await self._stopped.wait()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._close()

    def _on_work(self) -> None:
        while (work := self._channel.received()) is not None:
            kind, body = work
            if kind is Kind.STOP:
                self._stopped.set()
                return
            job = self._execute_async(body) if kind is Kind.EXECUTE else self._ask_ready()
            task = asyncio.get_running_loop().create_task(job)
            self._tasks.add(task)
            task.add_done_callback(self._done_with)

    def _done_with(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(task.exception(), ServerGoneError):
            self._stopped.set()

    async def _ask_ready(self) -> None:
        self._say_ready(await self._runner.is_ready())

    def _say_ready(self, is_ready: bool) -> None:
        self._channel.send(frames.frame(Kind.READY, bytes((is_ready,))))

    def _close(self) -> None:
        self._runner.close()
        self._host.flush()
        self._channel.send(frames.frame(Kind.STOPPED))

    def _decode(self, body: memoryview, blocks: list[Block]) -> tuple[frames.Execute, int]:
        """A batch, and when its execution begins."""
        self._blocks = blocks
        execute = frames.decode_execute(body, self._inputs, self._outputs, self._model, self._locate)
        begun = time.monotonic_ns()
        channel = self._channel
        opened = channel.open
        for item in execute.items:
            opened[item.key] = OpenRequest(begun)
        early = channel.cancelled_early
        if early:
            for item in execute.items:
                if item.key in early:
                    opened[item.key].cancelled = True
        return execute, begun

    def _locate(self, segment: int, offset: int, size_bytes: int) -> memoryview:
        self._blocks.append((segment, offset))
        return self._memory.look_at(segment, offset, size_bytes)

    def _execute(self, body: memoryview) -> None:
        received = time.monotonic_ns()
        blocks: list[Block] = []
        execute, begun = self._decode(body, blocks)
        host = self._host
        self._last_size = len(execute.items)
        batch_of_task.set(execute.batch)
        calls = host.calls
        calls.executing = execute.batch
        failed = False
        try:
            replies = self._runner.execute(execute.items)
        except InferenceError as error:
            replies, failed = [error.with_traceback(None) for _ in execute.items], True
        ended = time.monotonic_ns()
        calls.executing = 0
        self._answer(execute, replies, failed, (received, begun, ended), blocks)
        if host.ending:
            self._end_if_asked()

    def _end_if_asked(self) -> None:
        if self._host.ending:
            raise SystemExit(self._host.ending)

    async def _execute_async(self, body: memoryview) -> None:
        received = time.monotonic_ns()
        blocks: list[Block] = []
        execute, begun = self._decode(body, blocks)
        batch_of_task.set(execute.batch)
        items = list(execute.items)
        channel = self._channel
        if channel.cancelled_early and all(channel.open[item.key].cancelled for item in items):
            # Nobody is left to run it for: a call of this process's own, say, that its loop waited for.
            unwanted: list[Reply] = [CANCELLED for _ in items]
            self._answer(execute, unwanted, True, (received, begun, begun), blocks)
            return
        if self._decoupled:
            # The instance is free for more while this goes on: its answers come one by one.
            nothing: list[Reply] = [None for _ in execute.items]
            self._answer(execute, nothing, False, (received, begun, begun), blocks)
        failed = False
        replies: list[Reply]
        try:
            replies = await self._runner.execute_async(items)
        except InferenceError as error:
            replies, failed = [error.with_traceback(None) for _ in items], True
        if self._decoupled:
            for item, reply in zip(items, replies, strict=True):
                if reply is not None:
                    self._host.respond(item, reply, True)
        else:
            items.clear()
            self._answer(execute, replies, failed, (received, begun, time.monotonic_ns()), blocks)
        self._end_if_asked()

    def _answer(
        self,
        execute: frames.Execute,
        replies: list[Reply],
        failed: bool,
        times: tuple[int, int, int],
        blocks: list[Block],
    ) -> None:
        memory, channel = self._memory, self._channel
        opened = channel.open
        for item, reply in zip(execute.items, replies, strict=True):
            if reply is not None:
                opened.pop(item.key, None)
        # What the requests and the replies look at is looked at by the model alone from here on.
        del item, reply
        execute.items.clear()
        self._blocks = blocks
        with memory.telling:
            done = frames.encode_done(
                execute.batch, replies, failed, times, self._positions, memory.place, self._remains
            )
            if not self._host.unsent_metrics and not self._unused:
                channel.send(done)
                return
            updates = [*self._host.updates(), done]
            if self._unused:
                # Afterwards, because an answer may lie in one of them.
                updates.append(frames.encode_blocks(Kind.UNUSED, self._unused))
                self._unused = []
            channel.send(updates)

    def _remains(self) -> tuple[int, Sequence[Block]]:
        """What is left of the batch that is being answered."""
        memory = self._memory
        if memory.inbound.released:
            self._unused = memory.unused()
        return memory.take_wanted(), memory.retain(self._blocks) if self._blocks else ()
