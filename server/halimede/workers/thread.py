"""A worker that runs its instance on a thread of the server: no copy, least latency.

For runtimes that release the GIL and do not crash. The event loop hands a batch over through a queue and gets it back
through `call_soon_threadsafe`; everything between (gather, run, scatter) happens on the thread. The thread ends with
`stop` alone: whatever a model raises, SystemExit included, is an answer. It is a daemon, so that a model that hangs
cannot keep the process from exiting.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import cast

from halimede.backends.api import (
    BackendModel,
    CancelFlag,
    Instance,
    RefusedRequestsError,
    RequestInstance,
    RunContext,
    TensorInstance,
)
from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.batching import OutputTypes, check_reply, gather, scatter, wanted_outputs
from halimede.core.types import ErrorCode, InferenceError, ParameterValue, Placement, Tensor
from halimede.workers.worker import BatchDone, BatchItem, BatchTimes, OnEvent, Outputs

log = logging.getLogger(__name__)

TEXT_LIMIT = 1024
"""Characters of a model's own error text that an answer may carry: it travels in a gRPC trailer."""


class ThreadWorker:
    """One model instance on a thread of its own. Made by `start`; `execute` and `stop` are called on the loop."""

    def __init__(
        self,
        placement: Placement,
        model: BackendModel,
        config: ModelConfig,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ordinal = placement.ordinal
        self.name = placement.name
        self.concurrency = 1
        self._model = config.name
        self._datatypes = {output.name: output.data_type for output in config.output}
        self._batching = config.max_batch_size > 0
        self._on_event = on_event
        self._loop = loop
        # At most one batch and the None that ends the thread: `execute` is not called while a batch is running.
        self._inbox: SimpleQueue[list[BatchItem] | None] = SimpleQueue()
        self._started: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(
            target=self._main, args=(placement, model), name=f"instance-{placement.name}", daemon=True
        )

    def __repr__(self) -> str:
        return f"<ThreadWorker {self.name} {'stopped' if self._ended.done() else 'running'}>"

    @classmethod
    async def start(
        cls,
        placement: Placement,
        model: BackendModel,
        config: ModelConfig,
        on_event: OnEvent,
        loop: asyncio.AbstractEventLoop,
    ) -> "ThreadWorker":
        """Create the instance on its thread; raises what `create_instance` raised.

        Cancelled, it returns at once: the thread closes the instance as soon as it has been created, and ends.
        """
        policy = config.model_transaction_policy
        if policy is not None and policy.decoupled:
            raise RuntimeError(f"instance '{placement.name}': decoupled models do not run on the server's threads")
        worker = cls(placement, model, config, on_event, loop)
        worker._thread.start()
        try:
            await worker._started
        except asyncio.CancelledError:
            worker._inbox.put(None)
            raise
        return worker

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:  # noqa: ARG002  # there is one slot
        self._inbox.put(items)

    def cancel(self, key: int) -> None:
        """Nothing to do: the instance reads its items' flags."""

    def acknowledge(self, key: int, responses: int) -> None:
        """Nothing waits for it: models on threads answer once."""

    async def is_ready(self) -> bool:
        return True

    async def stop(self) -> None:
        self._inbox.put(None)
        await self._ended
        # The thread has nothing left to do after it said so.
        self._thread.join()

    def _main(self, placement: Placement, model: BackendModel) -> None:
        try:
            instance = model.create_instance(placement)
        except BaseException as error:  # noqa: BLE001  # also a SystemExit of the model's code is `start`'s to raise
            self._post(_settle, self._started, _raisable(error))
            return
        self._post(_settle, self._started, None)
        self._serve(instance)
        try:
            instance.close()
        except BaseException:
            log.exception("instance '%s': close failed", self.name, extra={"model": self._model})
        self._post(_settle, self._ended, None)

    def _serve(self, instance: Instance) -> None:
        run = (
            partial(self._execute_requests, cast(RequestInstance, instance))
            if hasattr(instance, "execute")
            else partial(self._run_tensors, instance)
        )
        while True:
            items = self._inbox.get()
            if items is None:
                return
            self._post(self._on_event, run(items))
            # An idle worker must not keep the last batch's tensors alive.
            del items

    def _run_tensors(self, instance: TensorInstance, items: list[BatchItem]) -> BatchDone:
        start = time.monotonic_ns()
        input_end = output_start = 0
        try:
            inputs = gather([item.request.inputs for item in items])
            rows = [item.rows for item in items]
            wanted = [item.request.outputs for item in items]
            context = RunContext([item.request.id for item in items], rows, items)
            input_end = time.monotonic_ns()
            outputs = instance.run(inputs, wanted_outputs(self._datatypes, wanted), context)
            output_start = time.monotonic_ns()
            replies: list[Outputs | InferenceError | None] = []
            replies += scatter(outputs, self._datatypes, rows if self._batching else None, wanted)
        except RefusedRequestsError as refused:
            return self._run_others(instance, items, refused, start, input_end)
        except BaseException as error:  # noqa: BLE001  # the thread outlives whatever a model raises
            return self._failed(items, [None] * len(items), error, start, input_end, output_start)
        return BatchDone(self, items, replies, BatchTimes(start, input_end, output_start, time.monotonic_ns()))

    def _run_others(
        self,
        instance: TensorInstance,
        items: list[BatchItem],
        refused: RefusedRequestsError,
        start: int,
        input_end: int,
    ) -> BatchDone:
        """The batch without the requests that its instance refused; each refusal takes at least one off."""
        errors = refused.errors
        others = [item for position, item in enumerate(items) if position not in errors]
        if not others or len(others) == len(items):
            answers = [errors.get(position) for position in range(len(items))]
            return self._failed(items, answers, refused, start, input_end, 0)
        done = self._run_tensors(instance, others)
        answered = iter(done.replies)
        replies: list[Outputs | InferenceError | None] = [
            errors[position] if position in errors else next(answered) for position in range(len(items))
        ]
        return BatchDone(self, items, replies, done.times, failed=done.failed)

    def _execute_requests(self, instance: RequestInstance, items: list[BatchItem]) -> BatchDone:
        start = time.monotonic_ns()
        names = tuple(self._datatypes)
        requests = [ThreadRequest(item, self._datatypes, names, self._batching) for item in items]
        input_end = time.monotonic_ns()
        try:
            instance.execute(requests)
        except BaseException as error:  # noqa: BLE001  # the thread outlives whatever a model raises
            return self._failed(items, [request.take() for request in requests], error, start, input_end, 0)
        output_start = time.monotonic_ns()
        silence = InferenceError(ErrorCode.INTERNAL, f"instance '{self.name}' did not answer the request")
        replies: list[Outputs | InferenceError | None] = [
            silence if reply is None else reply for reply in (request.take() for request in requests)
        ]
        return BatchDone(self, items, replies, BatchTimes(start, input_end, output_start, time.monotonic_ns()))

    def _failed(
        self,
        items: list[BatchItem],
        answers: Sequence[Outputs | InferenceError | None],
        error: BaseException,
        start: int,
        input_end: int,
        output_start: int,
    ) -> BatchDone:
        """The batch's end when its execution raised: what was answered before stands, the rest gets the error."""
        failure = self._as_error(error, items)
        end = time.monotonic_ns()
        times = BatchTimes(start, input_end or end, output_start or end, end)
        replies: list[Outputs | InferenceError | None] = [failure if each is None else each for each in answers]
        return BatchDone(self, items, replies, times, failed=True)

    def _as_error(self, error: BaseException, items: list[BatchItem]) -> InferenceError:
        if isinstance(error, InferenceError):
            # The traceback holds the frames and with them the batch's tensors.
            return error.with_traceback(None)
        # Of a batch, one request stands for all.
        about = {"model": self._model, "request_id": items[0].request.id}
        log.error("instance '%s' failed", self.name, exc_info=error, extra=about)
        return InferenceError(
            ErrorCode.INTERNAL,
            f"Failed to process the request(s) for model instance '{self.name}', message: {_describe(error)}",
        )

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return  # the loop has closed: nobody waits for this any more


class ThreadRequest:
    """One request of a batch as its instance sees it: an ExecuteRequest that keeps its answer for the batch's end."""

    __slots__ = (
        "_cancel",
        "_datatypes",
        "_open",
        "_reply",
        "_rows",
        "_wanted",
        "batch_size",
        "id",
        "inputs",
        "outputs",
        "parameters",
    )

    def __init__(self, item: BatchItem, datatypes: OutputTypes, names: tuple[str, ...], batching: bool) -> None:
        request = item.request
        self.id = request.id
        self.inputs: Mapping[str, Tensor] = {tensor.name: tensor for tensor in request.inputs}
        self.outputs: Sequence[str] = request.outputs or names
        self.batch_size = item.rows
        self.parameters: Mapping[str, ParameterValue] = request.parameters
        self._wanted = request.outputs
        self._rows = item.rows if batching else None
        self._cancel: CancelFlag = item
        self._datatypes = datatypes
        self._reply: Outputs | InferenceError | None = None
        self._open = True

    def is_cancelled(self) -> bool:
        return self._cancel.cancelled

    def respond(
        self, outputs: Sequence[Tensor], *, final: bool = True, parameters: Mapping[str, ParameterValue] | None = None
    ) -> None:
        """Answer with `outputs`; what does not fit the configuration fails this request alone."""
        if not final:
            raise RuntimeError(f"request '{self.id}': only decoupled models may answer with final=False")
        if parameters:
            raise RuntimeError(f"request '{self.id}': response parameters are for decoupled models")
        self._check_open()
        try:
            self._reply = check_reply(outputs, self._datatypes, self._wanted, self._rows)
        except InferenceError as error:
            self._reply = error.with_traceback(None)

    def fail(self, error: InferenceError) -> None:
        """Answer this request alone with an error."""
        self._check_open()
        self._reply = error

    def take(self) -> Outputs | InferenceError | None:
        """The answer, None where there is none; the request is closed."""
        self._open = False
        return self._reply

    def _check_open(self) -> None:
        if self._reply is not None:
            raise RuntimeError(f"request '{self.id}' has been answered already")
        if not self._open:
            raise RuntimeError(f"request '{self.id}' is over: execute returned without an answer to it")


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():
        return  # whoever waited was cancelled
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _raisable(error: BaseException) -> Exception:
    """What `create_instance` raised, as a future can carry it and a task can raise it without ending the loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return InferenceError(ErrorCode.INTERNAL, _describe(error))


def _describe(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a model's exception class may fail to print
        text = type(error).__name__
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
