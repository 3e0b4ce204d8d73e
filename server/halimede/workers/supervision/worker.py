"""A worker that runs its instance in a process of its own, and restarts the process when it ends.

The process may die, hang, be stopped or send invalid frames. Then its batch fails at once, and the process is started
again (`core.restarts` decides when). The channel and the zygote report a death. The worker waits for a process that is
slow; only `EXECUTION_TIMEOUT_MS` ends it. A process that is stopped for long is killed (`processes.hangs`).
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from typing import Self

from halimede.backends.hosting import WorkerSpec
from halimede.core.config.model_config import ModelConfig
from halimede.core.restarts import Finish, Park, Start, StartFaultError, Supervision, SupervisorEvent, WaitUntil
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.spin import SpinPolicy
from halimede.core.types import InferenceError
from halimede.core.types.error import describe, internal
from halimede.processes.launcher import Launcher
from halimede.workers.callers import Callers
from halimede.workers.connection.worker_connection import Owners
from halimede.workers.states import HeldStates
from halimede.workers.supervision.calls import WorkerCalls
from halimede.workers.supervision.life import Life, describe_end, spawn, start_first
from halimede.workers.supervision.limits import TimeLimits
from halimede.workers.supervision.program import Program
from halimede.workers.supervision.readiness import READY_SECS, Readiness
from halimede.workers.supervision.requests import Requests, Sent
from halimede.workers.supervision.services import Services
from halimede.workers.supervision.spinner import Spinner
from halimede.workers.worker import BatchItem, OnEvent, WorkerDown, WorkerUp

log = logging.getLogger(__name__)


class ProcessWorker:
    """One instance. All methods are called on the loop."""

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
        states: HeldStates,
    ) -> None:
        self.ordinal = spec.ordinal
        self.name = spec.instance
        self.concurrency = program.max_concurrency
        self._spec = spec
        self._program = program
        self._launcher = launcher
        self._on_event = on_event
        self._loop = loop
        self._config = config
        self._about = {"model": spec.model, "version": str(spec.version)}
        self._supervision = Supervision(program.first_retry_ns)
        self._sent: Sent = {}
        self._spinner = Spinner(SpinPolicy(program.spins, len(os.sched_getaffinity(0))), self._sent, loop)
        self._limits = TimeLimits(program.execution_timeout_ms, self._on_timeout, loop)
        self._readiness = Readiness(loop, READY_SECS)
        # A decoupled model may choose the number of rows of each answer.
        has_rows = config.max_batch_size > 0 and not spec.decoupled
        batching = config.sequence_batching
        reschedules = batching is not None and batching.iterative_sequence
        self._requests = Requests(
            self, spec, checker, has_rows, reschedules, self._sent, self._spinner, self._limits, on_event
        )
        callers = Callers(spec.model, str(spec.version), spec.ordinal, program.bls_timeout_ms)
        calls = WorkerCalls(spec, services, owner, callers, self._requests, self._spinner, self._readiness)
        self._owners = Owners(self._requests, calls, calls, states)
        self._life: Life | None = None
        """The process; None until it has started the model."""
        self._ending: set[asyncio.Task[None]] = set()
        """Former processes that have not ended yet."""
        self._supervising: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ProcessWorker {self.name} {self._supervision.state.value} requests={len(self._requests)}>"

    async def start(self) -> Self:
        """Start the process and the instance in it; InferenceError if either fails. If cancelled, kills the process.

        Called once, first. The load reports a failure of this start; the worker itself handles later deaths.
        """
        await start_first(self._spec, self._start_process)
        self._supervision.on(SupervisorEvent.STARTED, time.monotonic_ns())
        self._supervising = self._loop.create_task(self._supervise())
        return self

    @property
    def pid(self) -> int | None:
        """The pid of the current process, None without one."""
        return self._life.process.pid if self._life is not None else None

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        life = self._life
        if life is None:
            raise RuntimeError(f"instance '{self.name}' has no process")
        self._requests.add(items)
        # Taken before the batch is sent: the process may begin at once, and copying counts as input time.
        now = time.monotonic_ns()
        for _, other, _ in self._sent.values():
            if other == slot:
                number = life.connection.batches.execute(items, slot, is_next=True)
                self._sent[number] = 0, slot, items
                return
        number = life.connection.batches.execute(items, slot)
        self._sent[number] = now, slot, items
        self._spinner.on_execute(len(items), now)
        if self._limits:
            self._limits.begin(number)

    def take_back(self, slot: int) -> bool:
        batch = self._life.connection.batches.take_back(slot) if self._life is not None else None
        if batch is None:
            return False
        self._requests.take_back(batch)
        return True

    def cancel(self, key: int) -> None:
        if self._life is not None and key in self._requests:
            connection = self._life.connection
            connection.batches.cancel(key)
            # Calls that the batch has made are cancelled with it.
            if (batch := self._requests.cancelled_batch(key)) is not None:
                connection.calls.cancel_of(batch)

    def ask_cancel(self, key: int) -> None:
        if self._life is not None and key in self._requests:
            self._life.connection.batches.ask_cancel(key)

    def forget(self, sequence_slot: int) -> None:
        if self._life is not None:
            self._life.connection.states.forget(sequence_slot)

    def acknowledge(self, key: int, responses: int) -> None:
        if self._life is not None and key in self._requests:
            self._requests.acknowledge(key, responses)
            self._life.connection.batches.acknowledge(key, responses)

    async def is_ready(self) -> bool:
        return self._life is not None and await self._readiness.ask(self._life.connection)

    async def stop(self) -> None:
        # No batch is running: the pump stops its workers when nothing is in flight.
        if self._supervising is not None:
            self._supervising.cancel()
            with suppress(asyncio.CancelledError):
                await self._supervising
        if self._ending:
            await asyncio.wait(self._ending)
        finishing = self._supervision.on(SupervisorEvent.STOP, time.monotonic_ns())
        life = self._life
        if life is None:
            return
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

    async def _start_process(self) -> None:
        """Start a process with the instance in it. InferenceError."""
        process = await spawn(self._spec, self._program, self._launcher)
        outputs = [each.name for each in self._config.output]
        life = Life(process, self._spec, outputs, self._owners, self._loop, self._launcher.memory)
        try:
            started = await life.start({"work": "serve", "spins": self._program.spins})
        except BaseException:
            await life.end()
            raise
        if not isinstance(started, dict):
            await life.end()
            raise internal(f"the process of instance '{self.name}' sent an invalid answer to its start")
        self._readiness.begin(answers=started.get("answers_is_ready") is True)
        self._life = life
        log.info("instance '%s' runs in process %d", self.name, process.pid or 0, extra=self._about)

    async def _supervise(self) -> None:
        """Wait for the process to die, clean up, start another: until `stop`."""
        while True:
            if self._life is not None:
                why = await self._life.wait_end()
                why = self._life.killed_for.removesuffix(".") or why
                action = self._supervision.on(SupervisorEvent.DIED, time.monotonic_ns(), why)
                self._on_death(why, isinstance(action, Park))
            while isinstance(action, WaitUntil | Park):
                until_ns = action.until_ns if isinstance(action, Park) else action.at_ns
                left_secs = max(0, until_ns - time.monotonic_ns()) / 1e9
                if isinstance(action, Park):
                    text = "instance '%s' is parked, the next start in %.0f s: %s"
                    log.error(text, self.name, left_secs, action.reason, extra=self._about)
                await asyncio.sleep(left_secs)
                action = self._supervision.on(SupervisorEvent.TIMER, time.monotonic_ns())
            if not isinstance(action, Start):
                return
            try:
                await self._start_process()
            except Exception as error:  # noqa: BLE001  only this task would try again
                why = error.message if isinstance(error, InferenceError) else describe(error)
                is_fault = isinstance(error, StartFaultError | OSError | MemoryError)
                event = SupervisorEvent.FAULTED if is_fault else SupervisorEvent.DIED
                action = self._supervision.on(event, time.monotonic_ns(), why)
                log.error("instance '%s' did not start again: %s", self.name, why, extra=self._about)
                if is_fault or isinstance(action, Park):
                    reason, is_unstartable = self._supervision.reason, self._supervision.is_unstartable
                    down = WorkerDown(self, reason, isinstance(action, Park), is_unstartable=is_unstartable)
                    self._on_event(down)
                continue
            self._supervision.on(SupervisorEvent.STARTED, time.monotonic_ns())
            self._on_event(WorkerUp(self))

    def _on_death(self, why: str, parked: bool) -> None:
        """Fail the requests that the process had."""
        life = self._life
        if life is None:
            return
        self._life = None
        log.error("instance '%s': its process is gone: %s", self.name, why, extra=self._about)
        life.connection.close()
        batches = {batch.number: batch for batch in life.connection.batches.running}
        unread: set[int] = set()
        if not parked and not life.killed_for:
            for batch in life.connection.batches.unread():
                del batches[batch.number]
                unread.update(item.key for item in batch.items)
        self._requests.forget(unread)
        # Sent first, so that the pump sends no further batches.
        self._on_event(WorkerDown(self, self._supervision.reason, parked, unread))
        cause = life.killed_for or f"Stub process '{self.name}' is not healthy. I{describe_end(why)[1:]}."
        text = f"Failed to process the request(s) for model instance '{self.name}', message: {cause}"
        self._requests.fail(list(batches.values()), internal(text))
        self._readiness.on_gone()
        # Concurrently with the next start, because a process may take long to die.
        ending = self._loop.create_task(life.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _on_timeout(self) -> None:
        """A batch took too long. Only the end of its process stops it."""
        life = self._life
        if life is None:
            return
        milliseconds = self._program.execution_timeout_ms
        life.killed_for = f"the execution timed out after {milliseconds} ms."
        log.error("instance '%s': an execution timed out after %d ms", self.name, milliseconds, extra=self._about)
        life.kill_for_timeout()
