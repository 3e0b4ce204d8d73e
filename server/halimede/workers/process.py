"""A worker that runs its instance in a process of its own, and sees to it that there is one.

The process may die, hang, be stopped or say nonsense: that costs the batch that it holds, which is failed at once, and
the process is started again (`core.supervise` decides when). Nothing polls: the channel and the zygote tell of a death.
A process that merely stands still is waited for; only `EXECUTION_TIMEOUT_MS` ends one for being slow.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from halimede.backends.hosting import Answer, WorkerSpec
from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.supervise import Event, Finish, Park, Start, Supervision, WaitUntil, describe_exit
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.watching import WATCH_NS, is_worth_watching
from halimede.workers import frames
from halimede.workers.abandon import Abandon
from halimede.workers.child.channel import WINDOW_RESPONSES
from halimede.workers.connection import Batch, Connection
from halimede.workers.inferences import OnResponse
from halimede.workers.instance import describe
from halimede.workers.launcher import Launcher, WorkerProcess
from halimede.workers.output import OutputReader
from halimede.workers.worker import (
    NO_PARAMETERS,
    BatchDone,
    BatchItem,
    BatchTimes,
    OnEvent,
    Outputs,
    Parameters,
    ResponseSent,
    WorkerDown,
    WorkerUp,
)

log = logging.getLogger(__name__)

ENTRY = "halimede.workers.child.main:main"

READY_SECS = 5.0
"""How long a model may take to say whether it is ready."""

LAST_WORD_SECS = 0.03
"""How long an error waits for the zygote to say how its worker ended, when the channel has ended before."""


class Services(Protocol):
    """What models in worker processes ask of the server. `owner` is one load of a model (`m#7`)."""

    async def call(self, owner: str, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `backends.hosting.Host.call`. InferenceError."""

    def update_metrics(self, owner: str, updates: Sequence[tuple[int, str, float]]) -> None:
        """Metric, operation, value. What is wrong with one is the log's."""

    def infer(
        self,
        owner: str,
        ordinal: int,
        slot: int | None,
        requests: Collection[int],
        request: InferenceRequest,
        on_response: OnResponse,
    ) -> int:
        """Start an inference for the code of an instance; returns its ticket, see `runtime.server.Server.infer`.

        It is made from the batch that runs in `slot`; where that is None, for one or some of these open requests.
        """

    def cancel(self, ticket: int) -> None:
        """See `runtime.server.Server.cancel`."""

    def acknowledge(self, ticket: int, responses: int) -> None:
        """See `runtime.server.Server.acknowledge`."""

    def hold_up(self, owner: str, ordinal: int, slot: int | None, ticket: int) -> None:
        """Until `let_go` this inference holds up the batch in `slot`, or all of the instance where that is None."""

    def let_go(self, ticket: int) -> None:
        """It does not any more."""


@dataclass(frozen=True, slots=True)
class Program:
    """How the processes of one model version are run.

    `python` is an interpreter of the model's own, "" for the server's. `environment` is set over the server's.
    """

    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    max_concurrency: int = 1
    execution_timeout_ms: int = 0


class ProcessWorker:
    """One instance. Made by `start`; all methods are called on the loop."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: ModelConfig,
        checker: ReplyChecker,
        program: Program,
        launcher: Launcher,
        services: Services,
        owner: str,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ordinal = spec.ordinal
        self.name = spec.instance
        self.concurrency = program.max_concurrency
        self._spec = spec
        self._program = program
        self._launcher = launcher
        self._services = services
        self._on_event = on_event
        self._loop = loop
        self._inputs = [each.name for each in config.input]
        self._outputs = [each.name for each in config.output]
        self._checker = checker
        # How many rows an answer of a decoupled model has is the model's to say.
        self._has_rows = config.max_batch_size > 0 and not spec.decoupled
        self._owner = owner
        self._about = {"model": spec.model, "version": str(spec.version)}
        self._supervision = Supervision()
        self._items: dict[int, BatchItem] = {}
        """Requests that the process has, by key: of its batches, and those that wait for their final answer."""
        self._untaken: dict[int, int] = {}
        """Answers of a request that its client has not taken yet, by key."""
        self._opened: dict[int, _Opened] = {}
        """Requests whose batches are over without having answered them, by key."""
        self._dispatched: dict[int, int] = {}
        """When each batch was sent, by number; monotonic nanoseconds."""
        self._processors = len(os.sched_getaffinity(0))
        self._last_took_ns = WATCH_NS
        """How long the last batch took there and back."""
        self._watches_until: int | None = None
        self._is_watching = False
        self._told_ns = 0
        self._asks_soon = False
        """Whether the model made its last call soon after the answer to the one before, sent at `_told_ns`."""
        self._limits: dict[int, asyncio.TimerHandle] = {}
        self._kept: list[Batch] = []
        """Batches that the last process had not even read: the next one gets them first."""
        self._life: _Life | None = None
        self._answers_is_ready = False
        self._last_ready = True
        self._asked: asyncio.Future[bool] | None = None
        """What the process was asked of its readiness and has not said: one question for all who want to know."""
        self._is_up = False
        self._ending: set[asyncio.Task[None]] = set()
        """Former processes that have not ended yet."""
        self._supervising: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ProcessWorker {self.name} {self._supervision.state.value} requests={len(self._items)}>"

    @classmethod
    async def start(
        cls,
        spec: WorkerSpec,
        config: ModelConfig,
        checker: ReplyChecker,
        program: Program,
        launcher: Launcher,
        services: Services,
        owner: str,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
    ) -> "ProcessWorker":
        """Start the process and the instance in it; InferenceError when either fails. Cancelled, it kills the process.

        A first start that fails is the load's to report; from then on deaths are this worker's matter.
        """
        worker = cls(spec, config, checker, program, launcher, services, owner, on_event, loop)
        await worker._come_up()
        worker._supervision.on(Event.STARTED, time.monotonic_ns())
        worker._is_up = True
        worker._supervising = loop.create_task(worker._supervise())
        return worker

    @property
    def pid(self) -> int | None:
        """Of the process that there is."""
        return self._life.process.pid if self._life is not None else None

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        life = self._life
        if life is None:
            raise RuntimeError(f"instance '{self.name}' has no process")
        for item in items:
            self._items[item.key] = item
        # Before it is sent: the worker may begin at once, and what is copied for it is its input.
        now = time.monotonic_ns()
        number = life.connection.execute(items, slot)
        self._dispatched[number] = now
        if self._watches_until is None and is_worth_watching(self._processors, self._last_took_ns, len(items)):
            self._look(now)
        if self._program.execution_timeout_ms:
            self._limit(number, life)

    def cancel(self, key: int) -> None:
        if self._life is not None and key in self._items:
            self._life.connection.cancel(key)
            self._cancel_calls_for(key, self._life.connection)

    def _cancel_calls_for(self, key: int, connection: Connection) -> None:
        """What is asked for from a batch of which nobody waits for any request any more is cancelled with it."""
        opened = self._opened.get(key)
        number = _batch_of(key, connection) if opened is None else opened.batch
        keys = [each for each, other in self._opened.items() if other.batch == number]
        keys += [item.key for batch in connection.batches if batch.number == number for item in batch.items]
        if all(key not in self._items or self._items[key].cancelled for key in keys):
            connection.cancel_calls_of(number)

    def acknowledge(self, key: int, responses: int) -> None:
        if self._life is not None and key in self._items:
            self._untaken[key] = self._untaken.get(key, 0) - responses
            self._life.connection.acknowledge(key, responses)

    async def is_ready(self) -> bool:
        life = self._life
        if life is None or not self._is_up:
            return False
        if not self._answers_is_ready:
            return True
        if life.connection.batches:
            # It answers between batches. One that works is as ready as it said it was.
            return self._last_ready
        if self._asked is None:
            self._asked = self._loop.create_future()
            life.connection.ask_ready()
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), READY_SECS)
        except TimeoutError:
            return False

    async def stop(self) -> None:
        # The batches are over: the pump stops its workers when nothing is in flight.
        if self._supervising is not None:
            self._supervising.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervising
        if self._ending:
            await asyncio.wait(self._ending)
        finishing = self._supervision.on(Event.STOP, time.monotonic_ns())
        life = self._life
        if life is None:
            return
        self._is_up = False
        self._life = None
        try:
            if isinstance(finishing, Finish):
                grace = max(0, finishing.kill_at_ns - time.monotonic_ns()) / 1e9
                async with asyncio.timeout(grace):
                    await life.finish()
        except TimeoutError:
            log.error("instance '%s' did not finalize in %.1f s: killed", self.name, grace, extra=self._about)
        finally:
            await life.end()

    async def _come_up(self) -> None:
        """A process with the instance in it. InferenceError."""
        process = await _spawn(self._spec, self._program, self._launcher)
        life = _Life(process, self._spec, self._inputs, self._outputs, self, self._loop)
        try:
            said = await life.start({"work": "serve"})
        except BaseException:
            await life.end()
            raise
        if not isinstance(said, dict):
            await life.end()
            raise InferenceError(ErrorCode.INTERNAL, f"the process of instance '{self.name}' said nonsense")
        self._answers_is_ready = said.get("answers_is_ready") is True
        self._last_ready = True
        self._life = life
        log.info("instance '%s' runs in process %d", self.name, process.pid or 0, extra=self._about)

    async def _supervise(self) -> None:
        """Wait for the process to die, clean up, start another: until `stop`."""
        while True:
            if self._life is not None:
                why = await self._life.over()
                action = self._supervision.on(Event.DIED, time.monotonic_ns(), why)
                self._bury(why, isinstance(action, Park))
            while isinstance(action, WaitUntil):
                await asyncio.sleep(max(0, action.at_ns - time.monotonic_ns()) / 1e9)
                action = self._supervision.on(Event.TIMER, time.monotonic_ns())
            if isinstance(action, Park):
                log.error("instance '%s' is not started again: %s", self.name, action.reason, extra=self._about)
                return
            if not isinstance(action, Start):
                return
            try:
                await self._come_up()
            except Exception as error:  # noqa: BLE001  a system without threads too: nobody else would try again
                why = error.message if isinstance(error, InferenceError) else describe(error)
                action = self._supervision.on(Event.DIED, time.monotonic_ns(), why)
                log.error("instance '%s' did not start again: %s", self.name, why, extra=self._about)
                if isinstance(action, Park):
                    self._on_event(WorkerDown(self, action.reason, parked=True))
                    text = f"model '{self._spec.model}' is not ready: {action.reason}"
                    self._fail(self._take_kept(), InferenceError(ErrorCode.UNAVAILABLE, text))
                continue
            self._supervision.on(Event.STARTED, time.monotonic_ns())
            self._is_up = True
            for batch in self._take_kept():
                self.execute(batch.items, batch.slot)
                for item in batch.items:
                    if item.cancelled:
                        self.cancel(item.key)
            self._on_event(WorkerUp(self))

    def _bury(self, why: str, parked: bool) -> None:
        """Fail what the process had."""
        life = self._life
        if life is None:
            return
        self._life = None
        self._is_up = False
        log.error("instance '%s': its process is gone: %s", self.name, why, extra=self._about)
        life.connection.close()
        batches = {batch.number: batch for batch in life.connection.batches}
        if not parked and not life.killed_for:
            self._kept = [batches.pop(batch.number) for batch in life.connection.unread()]
        # First, so that nothing is given to it any more.
        self._on_event(WorkerDown(self, self._supervision.reason, parked))
        cause = life.killed_for or f"Stub process '{self.name}' is not healthy. It ended by {why}."
        text = f"Failed to process the request(s) for model instance '{self.name}', message: {cause}"
        failure = InferenceError(ErrorCode.INTERNAL, text)
        self._fail(batches.values(), failure)
        kept = {item.key for batch in self._kept for item in batch.items}
        for key in [key for key in self._items if key not in kept]:
            del self._items[key]
            opened = self._opened.get(key)
            times = _times(0 if opened is None else opened.dispatched_ns, 0, time.monotonic_ns())
            self._on_event(ResponseSent(self, key, failure, True, times))
        # Not batch by batch: the connection forgets one whose end made no sense. The next one counts from 1 again.
        self._dispatched.clear()
        self._untaken.clear()
        self._opened.clear()
        for number in list(self._limits):
            self._settle_limits(number)
        self._answer_asked(is_ready=False)
        # Beside the next start: a process may take its time to die.
        ending = self._loop.create_task(life.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _fail(self, batches: Iterable[Batch], error: InferenceError) -> None:
        for batch in batches:
            times = _times(self._dispatched.pop(batch.number, 0), 0, time.monotonic_ns())
            replies: list[Outputs | InferenceError | None] = [error for _ in batch.items]
            for item in batch.items:
                self._items.pop(item.key, None)
            self._on_event(BatchDone(self, batch.items, replies, times, failed=True, slot=batch.slot))

    def _take_kept(self) -> list[Batch]:
        kept, self._kept = self._kept, []
        return kept

    def _out_of_time(self, life: "_Life") -> None:
        """The batch's time is over. There is no way to stop it but to end its process."""
        milliseconds = self._program.execution_timeout_ms
        life.killed_for = f"the execution timed out after {milliseconds} ms."
        log.error("instance '%s': an execution timed out after %d ms", self.name, milliseconds, extra=self._about)
        life.give_up()

    def _limit(self, number: int, life: "_Life") -> None:
        seconds = self._program.execution_timeout_ms / 1000
        self._limits[number] = self._loop.call_later(seconds, self._out_of_time, life)

    def _limit_anew(self, slot: int) -> None:
        """A batch that was kept for the process is over: what was given to its slot meanwhile begins now."""
        life = self._life
        if life is None:
            return
        for batch in life.connection.batches:
            if batch.slot == slot and batch.number in self._limits:
                self._settle_limits(batch.number)
                self._limit(batch.number, life)

    def _settle_limits(self, number: int) -> None:
        timer = self._limits.pop(number, None)
        if timer is not None:
            timer.cancel()

    def on_done(self, batch: Batch, done: frames.Done) -> None:
        """See `connection.Owner`."""
        dispatched = self._dispatched.pop(batch.number, 0)
        if self._limits:
            self._settle_limits(batch.number)
            self._limit_anew(batch.slot)
        items, untaken = self._items, self._untaken
        replies: list[Outputs | InferenceError | None] = []
        parameters: dict[int, Parameters] = {}
        for item, reply in zip(batch.items, done.replies, strict=True):
            key = item.key
            if reply is None:
                replies.append(None)
                if key in items:
                    self._opened[key] = _Opened(batch.number, dispatched)
                continue
            items.pop(key, None)
            if untaken:
                untaken.pop(key, None)
            if isinstance(reply, InferenceError):
                replies.append(reply)
                continue
            if reply.parameters:
                parameters[len(replies)] = reply.parameters
            replies.append(self._checked(item, reply))
        _, begun, ended = done.times
        times = _times(dispatched, begun, ended)
        self._last_took_ns = times.end - times.start
        self._on_event(BatchDone(self, batch.items, replies, times, done.failed, batch.slot, parameters))

    def _look(self, now: int) -> None:
        """Watch for what the process has to say."""
        self._watches_until = now + WATCH_NS
        if not self._is_watching:
            self._is_watching = True
            self._loop.call_soon(self._watch)

    def _watch(self) -> None:
        """Have the loop look for the answer in turn after turn, others before it, instead of sleeping."""
        until = self._watches_until
        if until is not None and self._dispatched and time.monotonic_ns() < until:
            os.sched_yield()
            self._loop.call_soon(self._watch)
        else:
            self._watches_until = None
            self._is_watching = False

    def on_response(self, response: frames.Response) -> None:
        """See `connection.Owner`."""
        item = self._items.get(response.key)
        if item is None:
            return  # its client is gone, or it had its last answer
        times = _times(self._dispatched_ns(response.key), *response.times)
        if response.final:
            del self._items[response.key]
            self._untaken.pop(response.key, None)
            self._opened.pop(response.key, None)
        else:
            untaken = self._untaken[response.key] = self._untaken.get(response.key, 0) + 1
            if untaken > WINDOW_RESPONSES:
                raise frames.FrameError(f"{untaken} answers of one request while its client has taken none of them")
        reply = response.reply
        parameters = reply.parameters if isinstance(reply, Answer) else NO_PARAMETERS
        checked = self._checked(item, reply) if isinstance(reply, Answer) else reply
        self._on_event(ResponseSent(self, response.key, checked, response.final, times, parameters))

    def _dispatched_ns(self, key: int) -> int:
        """When the batch of a request was sent to the process."""
        opened = self._opened.get(key)
        if opened is not None:
            return opened.dispatched_ns
        life = self._life
        return 0 if life is None else self._dispatched.get(_batch_of(key, life.connection), 0)

    def on_ready(self, is_ready: bool) -> None:
        """See `connection.Owner`."""
        self._last_ready = is_ready
        self._answer_asked(is_ready=is_ready)

    def _answer_asked(self, *, is_ready: bool) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.set_result(is_ready)

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """See `connection.Owner`."""
        self._services.update_metrics(self._owner, updates)

    async def on_call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """See `connection.Owner`."""
        return await self._services.call(self._owner, method, arguments)

    def on_infer(self, infer: frames.Infer, slot: int | None, on_response: OnResponse) -> int:
        """See `inferences.Asker`."""
        request = infer.request
        requests: Collection[int] = ()
        self._asks_soon = is_worth_watching(self._processors, time.monotonic_ns() - self._told_ns, 1)
        self._watches_until = None
        if slot is None:
            # For which of its open requests code asks that runs beside the batches, it alone knows.
            requests = [key for key, each in self._opened.items() if each.batch == infer.batch] or self._items.keys()
        try:
            return self._services.infer(self._owner, self.ordinal, slot, requests, request, on_response)
        except Exception as error:
            log.error("instance '%s': a call failed", self.name, exc_info=error, extra=self._about)
            failure = InferenceError(ErrorCode.INTERNAL, f"the server failed at a call of model '{request.model_name}'")
            on_response(InferenceResponse(request.model_name, "", request.id, error=failure))
            return 0

    def on_told(self) -> None:
        """See `inferences.Asker`."""
        self._told_ns = time.monotonic_ns()
        if self._asks_soon:
            self._look(self._told_ns)

    def on_cancel_call(self, ticket: int) -> None:
        """See `inferences.Asker`."""
        self._services.cancel(ticket)

    def on_taken(self, ticket: int, responses: int) -> None:
        """See `inferences.Asker`."""
        self._services.acknowledge(ticket, responses)

    def on_held_up(self, ticket: int, slot: int | None) -> None:
        """See `inferences.Asker`."""
        self._services.hold_up(self._owner, self.ordinal, slot, ticket)

    def on_let_go(self, ticket: int) -> None:
        """See `inferences.Asker`."""
        self._services.let_go(ticket)

    def _checked(self, item: BatchItem, reply: Answer) -> Outputs | InferenceError:
        checker = self._checker
        try:
            return checker.check(reply.outputs, item.request.outputs, item.rows if self._has_rows else None)
        except InferenceError as error:
            return error.with_traceback(None)
        finally:
            if checker.warnings:
                self._warn(checker.warnings)

    def _warn(self, warnings: list[str]) -> None:
        for text in warnings:
            log.warning("model '%s': %s", self._spec.model, text, extra=self._about)
        warnings.clear()


class _Opened(NamedTuple):
    """A request whose batch is over without having answered it."""

    batch: int
    dispatched_ns: int


def _batch_of(key: int, connection: Connection) -> int:
    """The number of the batch that runs with this request, 0 when none does."""
    return next((batch.number for batch in connection.batches if any(item.key == key for item in batch.items)), 0)


class _Life:
    """One process of a worker, from its start to its end, and the connection to it."""

    def __init__(
        self,
        process: WorkerProcess,
        spec: WorkerSpec,
        inputs: Sequence[str],
        outputs: Sequence[str],
        owner: Any,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.process = process
        self.killed_for = ""
        """Why we ended it, "" when it ended by itself."""
        self._spec = spec
        self._inputs = inputs
        self._outputs = outputs
        self._lost: asyncio.Future[str] = loop.create_future()
        self.connection = Connection(process.channel, spec, inputs, outputs, owner, self._on_lost, loop)
        about = {"model": spec.model, "version": str(spec.version)}
        self._output = OutputReader(process.output, spec.model, about, loop)
        self._exit = loop.create_task(process.wait())

    def _on_lost(self, reason: str) -> None:
        """The channel tells nothing any more: whatever the process still does, nobody hears of it."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result(reason)

    async def start(self, work: Mapping[str, Any]) -> Any:
        """What the process says once it has done what START asks for. InferenceError when it fails, or dies."""
        order = {**work, "spec": asdict(self._spec), "inputs": self._inputs, "outputs": self._outputs}
        starting = asyncio.ensure_future(self.connection.start(order))
        try:
            await asyncio.wait((starting, self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                return starting.result()
            why = await self.over()
            text = f"Stub process '{self._spec.instance}' is not healthy: it ended by {why} while it started"
            raise InferenceError(ErrorCode.INTERNAL, text)
        finally:
            starting.cancel()

    async def over(self) -> str:
        """Wait until the process is of no use any more, and say why."""
        await asyncio.wait((self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._exit.done():
            # Its channel is closed before the kernel has told how it ended.
            await asyncio.wait((self._exit,), timeout=LAST_WORD_SECS)
        elif not self._lost.done():
            # What it said before its end may not be read yet.
            await asyncio.wait((self._lost,), timeout=LAST_WORD_SECS)
        if self._lost.done() and self._lost.result().startswith(("it sent garbage", "it left more")):
            return self._lost.result()
        if self._exit.done():
            return describe_exit(self._exit.result())
        return self._lost.result() if self._lost.done() else "an unknown cause"

    async def finish(self) -> None:
        """Have the model finalize and the process end."""
        finishing = asyncio.ensure_future(self.connection.stop())
        await asyncio.wait((finishing, self._exit), return_when=asyncio.FIRST_COMPLETED)
        finishing.cancel()
        await asyncio.shield(self._exit)

    def give_up(self) -> None:
        """Kill it: a batch took too long, and there is no other way to stop that."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result("the server, which had no more time for it")

    async def end(self) -> None:
        """Kill what is left of it, and free what we hold of it. Called once, at last."""
        self.connection.close()
        self.process.kill(signal.SIGKILL)
        # They refer to one another: the worker's shared memory would stay until the garbage collector comes by.
        del self.connection
        await self._exit
        self._output.close()
        self.process.close()


def _times(dispatched: int, begun: int, ended: int) -> BatchTimes:
    """The worker's clock is ours, but what it says is its own: times are made to follow one another."""
    now = time.monotonic_ns()
    if 0 < dispatched <= begun <= ended <= now:
        return BatchTimes(dispatched, begun, ended, now)
    start = dispatched or now
    input_end = min(max(begun, start), now)
    output_start = min(max(ended, input_end), now)
    return BatchTimes(start, input_end, output_start, now)


def complete_config(spec: WorkerSpec, program: Program, launcher: Launcher, abandon: Abandon) -> Any:
    """What the model makes of its configuration, as JSON, in a process that ends with it. Blocks. InferenceError."""
    return asyncio.run(_complete_config(spec, program, launcher, abandon))


async def _complete_config(spec: WorkerSpec, program: Program, launcher: Launcher, abandon: Abandon) -> Any:
    loop = asyncio.get_running_loop()
    task = loop.create_task(_complete(spec, program, launcher, loop))
    with abandon.stopping(partial(_cancel_from_afar, loop, task)):
        try:
            return await task
        except asyncio.CancelledError:
            raise InferenceError(ErrorCode.UNAVAILABLE, "the model was unloaded while it was loading") from None


async def _complete(spec: WorkerSpec, program: Program, launcher: Launcher, loop: asyncio.AbstractEventLoop) -> Any:
    process = await _spawn(spec, program, launcher)
    life = _Life(process, spec, (), (), _NoOwner(), loop)
    try:
        return await life.start({"work": "complete_config"})
    finally:
        await life.end()


def _cancel_from_afar(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with suppress(RuntimeError):  # it has ended, and its loop with it
        loop.call_soon_threadsafe(task.cancel)


class _NoOwner:
    """Of a process that only completes a configuration."""

    def on_done(self, batch: Batch, done: frames.Done) -> None:
        """There are no batches."""

    def on_response(self, response: frames.Response) -> None:
        """There are no requests."""

    def on_ready(self, is_ready: bool) -> None:
        """Nobody asks."""

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """None could be declared."""

    async def on_call(self, method: str, arguments: Mapping[str, Any]) -> Any:  # noqa: ARG002
        raise InferenceError(ErrorCode.UNSUPPORTED, f"'{method}' cannot be called from auto_complete_config")

    def on_infer(self, infer: frames.Infer, slot: int | None, on_response: OnResponse) -> int:  # noqa: ARG002
        request = infer.request
        error = InferenceError(ErrorCode.UNSUPPORTED, "models cannot be called from auto_complete_config")
        on_response(InferenceResponse(request.model_name, "", request.id, error=error))
        return 0

    def on_told(self) -> None:
        """There are no calls."""

    def on_cancel_call(self, ticket: int) -> None:
        """There are no calls."""

    def on_taken(self, ticket: int, responses: int) -> None:
        """There are no calls."""

    def on_held_up(self, ticket: int, slot: int | None) -> None:
        """There are no calls."""

    def on_let_go(self, ticket: int) -> None:
        """There are no calls."""


async def _spawn(spec: WorkerSpec, program: Program, launcher: Launcher) -> WorkerProcess:
    """A process of the program. InferenceError."""
    environment = dict(program.environment)
    if spec.device_uuid:
        environment["CUDA_VISIBLE_DEVICES"] = spec.device_uuid
    work = asyncio.to_thread(launcher.spawn, spec.instance, entry=ENTRY, python=program.python, environment=environment)
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_discard)
        raise


def _discard(spawned: "asyncio.Task[WorkerProcess]") -> None:
    """End a process that came up after nobody waited for it any more."""
    if not spawned.cancelled() and spawned.exception() is None:
        spawned.result().kill(signal.SIGKILL)
        spawned.result().close()
