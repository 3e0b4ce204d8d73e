"""A worker that runs its instance on a thread of the server, without copies and with the lowest latency.

For runtimes that release the GIL and do not crash. The event loop passes a batch to the thread through a queue and gets
the results through `call_soon_threadsafe`; gather, run and scatter happen on the thread. Only `stop` ends the thread:
any exception of a model, including SystemExit, becomes an error of its batch. The thread is a daemon, so that a model
that hangs does not keep the process from exiting.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Self

from halimede.backends.api import BackendModel, Instance
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import Placement
from halimede.core.types.error import describe, internal
from halimede.workers.instance import InstanceRunner
from halimede.workers.states import HeldStates
from halimede.workers.worker import BatchDone, BatchItem, OnEvent

log = logging.getLogger(__name__)

MAX_STRINGS = 1 << 20
"""Maximum elements of a BYTES input. Arrays hold one object per element, and making and freeing these blocks the event
loop for at least 0.1 us per element."""


class ThreadWorker:
    """One model instance on its own thread. `execute` and `stop` are called on the loop."""

    def __init__(
        self,
        placement: Placement,
        model: BackendModel,
        config: ModelConfig,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
        state_files: Mapping[str, bytes] | None = None,
        *,
        states: HeldStates,
    ) -> None:
        """`state_files` as in InstanceRunner."""
        self.ordinal = placement.ordinal
        self.name = placement.name
        self.concurrency = 1
        self._config = config
        self._state_files = state_files
        self._states = states
        self._runner: InstanceRunner | None = None
        """Set on the thread, once the instance exists."""
        self._on_event = on_event
        self._loop = loop
        self._inbox: SimpleQueue[bool] = SimpleQueue()
        """True for each batch, False to end the thread."""
        self._batches: deque[list[BatchItem]] = deque()
        """Batches that have not begun. Both sides take them away, which is atomic; so there may be fewer than the inbox
        says."""
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(placement, model), name=f"instance-{placement.name}", daemon=True
        )

    def __repr__(self) -> str:
        return f"<ThreadWorker {self.name} {'stopped' if self._ended.done() else 'running'}>"

    async def start(self) -> Self:
        """Create the instance on its thread; raises what `create_instance` raises. Called once, first.

        If cancelled, returns at once: the thread then closes the instance after its creation, and ends.
        """
        if self._config.is_decoupled:
            raise RuntimeError(f"instance '{self.name}': decoupled models do not run on the server's threads")
        self._thread.start()
        try:
            await self._started
        except asyncio.CancelledError:
            self._inbox.put(False)
            raise
        return self

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:  # noqa: ARG002  # there is one slot
        self._batches.append(items)
        self._inbox.put(True)

    def take_back(self, slot: int) -> bool:  # noqa: ARG002
        try:
            self._batches.pop()
        except IndexError:
            return False
        return True

    def cancel(self, key: int) -> None:
        """No effect: the instance reads the flags of its items."""

    def ask_cancel(self, key: int) -> None:
        """No effect: models on threads are not decoupled."""

    def forget(self, sequence_slot: int) -> None:
        if self._runner is not None:
            self._runner.forget(sequence_slot)

    def acknowledge(self, key: int, responses: int) -> None:
        """No effect: models on threads answer each request once."""

    async def is_ready(self) -> bool:
        return True

    async def stop(self) -> None:
        self._inbox.put(False)
        await self._ended
        # The thread ends right after it has reported its end.
        self._thread.join()

    def _main(self, placement: Placement, model: BackendModel) -> None:
        try:
            instance = model.create_instance(placement)
        except BaseException as error:  # noqa: BLE001  # `start` raises it, also a SystemExit of the model
            self._post(_settle, self._started, _raisable(error))
            return
        self._post(_settle, self._started, None)
        self._serve(instance)
        try:
            instance.close()
        except BaseException:
            log.exception("instance '%s': close failed", self.name, extra={"model": self._config.name})
        self._post(_settle, self._ended, None)

    def _serve(self, instance: Instance) -> None:
        runner = InstanceRunner(self.name, self._config, instance, MAX_STRINGS, self._state_files, self._states)
        self._runner = runner
        while self._inbox.get():
            try:
                items = self._batches.popleft()
            except IndexError:
                continue  # it was taken back
            ran = runner.run(items)
            self._post(self._on_event, BatchDone(self, items, ran.replies, ran.times, ran.failed))
            # An idle worker must not keep the last batch's tensors alive.
            del items, ran
        runner.close()

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop has closed


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return  # the waiting task was cancelled
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _raisable(error: BaseException) -> Exception:
    """The exception of `create_instance`, in a form that futures accept and that does not end the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return internal(describe(error))
