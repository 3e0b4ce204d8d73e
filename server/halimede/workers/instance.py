"""Runs batches on an instance of a backend: gather, run, scatter. The same on a thread and in a process of its own.

Whatever a model raises, SystemExit included, is an answer to its batch.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol, cast

from halimede.backends.api import (
    CancelFlag,
    Instance,
    RefusedRequestsError,
    RequestInstance,
    RunContext,
    TensorInstance,
)
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import ISOLATION, PROCESS
from halimede.core.schedule.batching import OutputTypes, check_reply, gather, scatter, wanted_outputs
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, ParameterValue, Tensor
from halimede.core.types.error import of_request
from halimede.workers.worker import BatchTimes, Outputs

log = logging.getLogger(__name__)

TEXT_LIMIT = 1024
"""Characters of a model's own error text that an answer may carry: it travels in a gRPC trailer."""


class RunItem(CancelFlag, Protocol):
    """One request of a batch, and its own cancel flag. `rows` is its batch size."""

    request: InferenceRequest
    rows: int


@dataclass(slots=True)
class Ran:
    """A batch's end. `replies` are in the order of its items; `failed` is set when the execution itself failed."""

    replies: list[Outputs | InferenceError | None]
    times: BatchTimes
    failed: bool = False


class InstanceRunner:
    """One instance, and what is known of its model. Not thread-safe: one batch at a time."""

    def __init__(self, name: str, config: ModelConfig, instance: Instance, max_strings: int | None = None) -> None:
        """Of a BYTES input an instance that is given arrays takes at most `max_strings` elements."""
        self.name = name
        self._max_strings = max_strings
        self._text_inputs = [each.name for each in config.input if each.data_type is DataType.BYTES]
        self._model = config.name
        self._datatypes = {output.name: output.data_type for output in config.output}
        self._batching = config.max_batch_size > 0
        self.run = (
            partial(self._execute_requests, cast(RequestInstance, instance))
            if hasattr(instance, "execute")
            else partial(self._run_tensors, instance)
        )
        """Run a batch: list of RunItem -> Ran. Raises nothing."""

    def _run_tensors(self, instance: TensorInstance, items: list[RunItem]) -> Ran:
        start = time.monotonic_ns()
        input_end = output_start = 0
        try:
            if self._max_strings is not None and self._text_inputs:
                self._refuse_many_strings(items, self._max_strings)
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
        return Ran(replies, BatchTimes(start, input_end, output_start, time.monotonic_ns()))

    def _refuse_many_strings(self, items: list[RunItem], most: int) -> None:
        errors = {
            position: InferenceError(
                ErrorCode.INVALID_ARG,
                of_request(
                    item.request.id,
                    f"input '{tensor.name}' has {prod(tensor.shape)} string elements, and model '{self._model}' takes "
                    f"at most {most} while it runs in a thread of the server. Its parameter '{ISOLATION}' with the "
                    f"value '{PROCESS}' lifts the limit.",
                ),
            )
            for position, item in enumerate(items)
            for tensor in item.request.inputs
            if tensor.name in self._text_inputs and prod(tensor.shape) > most
        }
        if errors:
            raise RefusedRequestsError(errors)

    def _run_others(
        self,
        instance: TensorInstance,
        items: list[RunItem],
        refused: RefusedRequestsError,
        start: int,
        input_end: int,
    ) -> Ran:
        """The batch without the requests that its instance refused; each refusal takes at least one off."""
        errors = refused.errors
        others = [item for position, item in enumerate(items) if position not in errors]
        if not others:
            # The requests are at fault, which is nothing for the log.
            end = time.monotonic_ns()
            times = BatchTimes(start, input_end or end, end, end)
            return Ran([errors[position] for position in range(len(items))], times, failed=True)
        if len(others) == len(items):
            return self._failed(items, [None] * len(items), refused, start, input_end, 0)
        done = self._run_tensors(instance, others)
        answered = iter(done.replies)
        replies: list[Outputs | InferenceError | None] = [
            errors[position] if position in errors else next(answered) for position in range(len(items))
        ]
        return Ran(replies, done.times, failed=done.failed)

    def _execute_requests(self, instance: RequestInstance, items: list[RunItem]) -> Ran:
        start = time.monotonic_ns()
        names = tuple(self._datatypes)
        requests = [BatchRequest(item, self._datatypes, names, self._batching) for item in items]
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
        return Ran(replies, BatchTimes(start, input_end, output_start, time.monotonic_ns()))

    def _failed(
        self,
        items: list[RunItem],
        answers: Sequence[Outputs | InferenceError | None],
        error: BaseException,
        start: int,
        input_end: int,
        output_start: int,
    ) -> Ran:
        """The batch's end when its execution raised: what was answered before stands, the rest gets the error."""
        failure = self._as_error(error, items)
        end = time.monotonic_ns()
        times = BatchTimes(start, input_end or end, output_start or end, end)
        replies: list[Outputs | InferenceError | None] = [failure if each is None else each for each in answers]
        return Ran(replies, times, failed=True)

    def _as_error(self, error: BaseException, items: list[RunItem]) -> InferenceError:
        if isinstance(error, InferenceError):
            # The traceback holds the frames and with them the batch's tensors.
            return error.with_traceback(None)
        # Of a batch, one request stands for all.
        about = {"model": self._model, "request_id": items[0].request.id}
        log.error("instance '%s' failed", self.name, exc_info=error, extra=about)
        return InferenceError(
            ErrorCode.INTERNAL,
            f"Failed to process the request(s) for model instance '{self.name}', message: {describe(error)}",
        )


class BatchRequest:
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

    def __init__(self, item: RunItem, datatypes: OutputTypes, names: tuple[str, ...], batching: bool) -> None:
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


def describe(error: BaseException) -> str:
    """A model's exception as an answer carries it: no traceback, and not too long."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a model's exception class may fail to print
        text = type(error).__name__
    text = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
    # Names of files that are no UTF-8 become halves of surrogate pairs, which no answer can carry.
    return text.encode("utf-8", "replace").decode()
