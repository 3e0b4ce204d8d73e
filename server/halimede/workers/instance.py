"""Runs batches on an instance of a backend: gather, run, scatter. Used by thread workers and by worker processes.

Any exception of a model, including SystemExit, becomes an error of its batch.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol, cast

from halimede.backends.api import (
    CancelFlag,
    Instance,
    RefusedRequestsError,
    RequestInstance,
    RunContext,
    TensorInstance,
)
from halimede.core.config.batch_io import ignored_batch_settings
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.process_options import ISOLATION, PROCESS
from halimede.core.config.sequence_plan import sequence_plan
from halimede.core.config.sequence_tensors import model_outputs
from halimede.core.schedule.batch_plan import BatchPlan, plan_batches
from halimede.core.schedule.batching import OutputTypes, check_reply, gather, scatter, wanted_outputs
from halimede.core.sequences.rows import Row, Sequences, StateBytes, groups_of_equal_state, initial_states
from halimede.core.types import DataType, InferenceError, InferenceRequest, ParameterValue, Tensor, shortage_of
from halimede.core.types.error import describe, internal, invalid, of_request
from halimede.workers.states import HeldStates
from halimede.workers.worker import BatchTimes, Outputs

log = logging.getLogger(__name__)


class RunItem(CancelFlag, Protocol):
    """One request of a batch, and its own cancel flag. `rows` is its batch size; `key` and `sequence_slot` as in
    BatchItem."""

    key: int
    request: InferenceRequest
    rows: int
    sequence_slot: int


@dataclass(slots=True)
class Ran:
    """The result of a batch. `replies` are in the order of its items; `failed`: the execution itself failed.

    `refused` are requests, by position, because of which nothing was executed.
    """

    replies: list[Outputs | InferenceError | None]
    times: BatchTimes
    failed: bool = False
    refused: Mapping[int, InferenceError] = field(default_factory=dict)


class InstanceRunner:
    """Runs batches on one instance. Not thread-safe: one batch at a time."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        instance: Instance,
        max_strings: int | None = None,
        state_files: Mapping[str, bytes] | None = None,
        states: StateBytes | None = None,
    ) -> None:
        """`max_strings`: the most elements of a BYTES input for an instance that takes arrays; None for no limit.
        `state_files` are the contents of the files with initial states, by the input names of the states. `states` is
        the bound of the states; None for one of this instance alone."""
        self.name = name
        self._max_strings = max_strings
        self._text_inputs = [each.name for each in config.input if each.data_type is DataType.BYTES]
        self._model = config.name
        self._datatypes = {output.name: output.data_type for output in model_outputs(config)}
        self._batching = config.max_batch_size > 0
        self._plan = plan_batches(config)
        takes_requests = hasattr(instance, "execute")
        if takes_requests:
            for note in ignored_batch_settings(config, f"backend '{config.backend}' takes the requests one by one"):
                log.warning("instance '%s': %s", name, note.message, extra={"model": config.name})
        self.run: Callable[[Any], Ran] = (
            partial(self._execute_requests, cast(RequestInstance, instance))
            if takes_requests
            else partial(self._run_tensors, cast(TensorInstance, instance))
        )
        """Run a batch: list of RunItem -> Ran. Never raises."""
        padding = self._plan if self._plan is not None and self._plan.pads and not takes_requests else None
        self._on_refused = self._run_others
        self._sequences: Sequences | None = None
        plan = sequence_plan(config)
        if plan is not None:
            initial = initial_states(plan, state_files or {})
            states = states or HeldStates()
            self._sequences = Sequences(plan, config.name, initial, states, copies=takes_requests)
            self._on_refused = self._report_refused
            self.run = _SequenceBatches(self._sequences, self.run, is_split=not takes_requests, plan=padding).run
        elif padding is not None:
            self.run = partial(_run_groups, padding, self.run)

    def forget(self, sequence_slot: int) -> None:
        """The sequence of the sequence slot has ended. Called on any thread, while no request of the sequence slot
        executes."""
        if self._sequences is not None:
            self._sequences.forget(sequence_slot)

    def close(self) -> None:
        """Drop the states of all sequences."""
        if self._sequences is not None:
            self._sequences.close()

    def _run_tensors(self, instance: TensorInstance, items: list[RunItem]) -> Ran:
        start = time.monotonic_ns()
        input_end = output_start = 0
        try:
            if self._max_strings is not None and self._text_inputs:
                self._refuse_many_strings(items, self._max_strings)
            batch = [item.request.inputs for item in items]
            rows = [item.rows for item in items]
            wanted = [item.request.outputs for item in items]
            context = RunContext([item.request.id for item in items], rows, items)
            gathered = self._plan.gather(batch, rows) if self._plan is not None else None
            if gathered is None:
                inputs = gather(batch)
            else:
                inputs, context.elements = gathered.inputs, gathered.elements
            input_end = time.monotonic_ns()
            outputs = instance.run(inputs, wanted_outputs(self._datatypes, wanted), context)
            output_start = time.monotonic_ns()
            replies: list[Outputs | InferenceError | None] = []
            if self._plan is None or gathered is None:
                replies += scatter(outputs, self._datatypes, rows if self._batching else None, wanted)
            else:
                replies += self._plan.scatter(outputs, self._datatypes, gathered, rows, wanted)
        except RefusedRequestsError as refused:
            return self._on_refused(instance, items, refused, start, input_end)
        except BaseException as error:  # noqa: BLE001  # the thread survives any exception of a model
            return self._failed(items, [None] * len(items), error, start, input_end, output_start)
        return Ran(replies, BatchTimes(start, input_end, output_start, time.monotonic_ns()))

    def _refuse_many_strings(self, items: list[RunItem], most: int) -> None:
        errors = {
            position: invalid(
                of_request(
                    item.request.id,
                    f"input '{tensor.name}' has {prod(tensor.shape)} string elements, and model '{self._model}' takes "
                    f"at most {most} while it runs in a thread of the server. Its parameter '{ISOLATION}' with the "
                    f"value '{PROCESS}' lifts the limit.",
                )
            )
            for position, item in enumerate(items)
            for tensor in item.request.inputs
            if tensor.name in self._text_inputs and prod(tensor.shape) > most
        }
        if errors:
            raise RefusedRequestsError(errors)

    def _run_others(
        self, instance: TensorInstance, items: list[RunItem], refused: RefusedRequestsError, start: int, input_end: int
    ) -> Ran:
        """Run the batch again without the refused requests. Ends, because each refusal removes at least one request."""
        errors = refused.errors
        others = [item for position, item in enumerate(items) if position not in errors]
        if not others:
            # Not logged: the requests are at fault, not the model.
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

    def _report_refused(
        self,
        instance: TensorInstance,  # noqa: ARG002  # as `_run_others`
        items: list[RunItem],
        refused: RefusedRequestsError,
        start: int,
        input_end: int,
    ) -> Ran:
        """The result if others are to keep their rows: the caller runs the batch again."""
        end = time.monotonic_ns()
        times = BatchTimes(start, input_end or end, end, end)
        # The answer to all if the instance has refused no request, but only null rows.
        text = f"instance '{self.name}' refused no request of the batch: {refused}"
        return Ran([internal(text)] * len(items), times, failed=True, refused=refused.errors)

    def _execute_requests(self, instance: RequestInstance, items: list[RunItem]) -> Ran:
        start = time.monotonic_ns()
        names = tuple(self._datatypes)
        requests = [BatchRequest(item, self._datatypes, names, self._batching) for item in items]
        input_end = time.monotonic_ns()
        try:
            instance.execute(requests)
        except BaseException as error:  # noqa: BLE001  # the thread survives any exception of a model
            return self._failed(items, [request.take() for request in requests], error, start, input_end, 0)
        output_start = time.monotonic_ns()
        unanswered = internal(f"instance '{self.name}' did not answer the request")
        replies: list[Outputs | InferenceError | None] = [
            unanswered if reply is None else reply for reply in (request.take() for request in requests)
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
        """The result after an exception: answers given before it are kept, the other requests get the error."""
        failure = self._as_error(error, items)
        if not input_end or output_start:
            # Memory that the model itself does not get is its error.
            failure = shortage_of(error) or failure
        end = time.monotonic_ns()
        times = BatchTimes(start, input_end or end, output_start or end, end)
        replies: list[Outputs | InferenceError | None] = [failure if each is None else each for each in answers]
        return Ran(replies, times, failed=True)

    def _as_error(self, error: BaseException, items: list[RunItem]) -> InferenceError:
        if isinstance(error, InferenceError):
            # The traceback would keep the frames, and with them the batch's tensors, alive.
            return error.with_traceback(None)
        # The log names only the first request of the batch.
        about = {"model": self._model, "request_id": items[0].request.id}
        log.error("instance '%s' failed", self.name, exc_info=error, extra=about)
        return internal(
            f"Failed to process the request(s) for model instance '{self.name}', message: {describe(error)}"
        )


class BatchRequest:
    """One request of a batch as its instance sees it: an ExecuteRequest that keeps its answer until the batch ends."""

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
        """Answer with `outputs`; outputs that do not match the configuration fail only this request."""
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
        """Answer only this request with an error."""
        self._check_open()
        self._reply = error

    def take(self) -> Outputs | InferenceError | None:
        """Close the request and return its answer, None if it has no answer."""
        self._open = False
        return self._reply

    def _check_open(self) -> None:
        if self._reply is not None:
            raise RuntimeError(f"request '{self.id}' has been answered already")
        if not self._open:
            raise RuntimeError(f"request '{self.id}' is over: execute returned without an answer to it")


def _run_groups(plan: BatchPlan, run: Callable[[list[RunItem]], Ran], items: list[RunItem]) -> Ran:
    """As `InstanceRunner.run`, one group of requests after the other."""
    groups = _groups_of(plan, items, range(len(items)), [item.rows for item in items])
    if len(groups) == 1:
        return run(items)
    replies: list[Outputs | InferenceError | None] = [None] * len(items)
    ran = []
    for group in groups:
        ran.append(run([items[at] for at in group]))
        for at, reply in zip(group, ran[-1].replies, strict=True):
            replies[at] = reply
    return _joined(ran, replies)


def _groups_of(
    plan: BatchPlan, items: Sequence[RunItem], positions: Sequence[int], rows: Sequence[int]
) -> list[list[int]]:
    """The positions of the requests that are executed together, of which each needs so many rows."""
    found = plan.groups([items[at].request.inputs for at in positions], rows)
    return [[positions[at] for at in group] for group in found]


def _joined(ran: Sequence[Ran], replies: list[Outputs | InferenceError | None]) -> Ran:
    """The result of a batch of which parts were executed one after the other."""
    first, last = ran[0].times, ran[-1].times
    times = BatchTimes(first.start, first.input_end, last.output_start, last.end)
    return Ran(replies, times, failed=all(each.failed for each in ran))


class _SequenceBatches:
    """Runs batches of a model of sequences: gives each request its row, and keeps its state."""

    def __init__(
        self, sequences: Sequences, run: Callable[[Sequence[Row]], Ran], *, is_split: bool, plan: BatchPlan | None
    ) -> None:
        """`is_split`: requests whose states have different shapes run one after the other, as arrays require. So do the
        groups of a `plan` that pads."""
        self._sequences = sequences
        self._plan = plan
        self._run = run
        self._is_split = is_split

    def run(self, items: Sequence[RunItem]) -> Ran:
        """As `InstanceRunner.run`."""
        replies: list[Outputs | InferenceError | None] = [None] * len(items)
        positions = [*range(len(items))]
        for at, error in self._sequences.check(items).items():
            replies[at] = error
            positions.remove(at)
        groups: Iterable[Sequence[int]] = (positions,)
        if self._is_split:
            found = groups_of_equal_state(self._sequences, [items[at] for at in positions])
            groups = [[positions[at] for at in group] for group in found]
        if self._plan is not None:
            groups = [part for group in groups for part in self._groups_of(self._plan, items, group)]
        ran = [self._run_group(items, group, replies) for group in groups if group]
        if not ran:
            now = time.monotonic_ns()
            return Ran(replies, BatchTimes(now, now, now, now), failed=True)
        return _joined(ran, replies)

    def _groups_of(self, plan: BatchPlan, items: Sequence[RunItem], positions: Sequence[int]) -> list[list[int]]:
        """As the function. Null rows are padded as well."""
        fills = self._sequences.plan.fills_rows
        rows = [items[at].sequence_slot + 1 if fills else items[at].rows for at in positions]
        return _groups_of(plan, items, positions, rows)

    def _run_group(
        self, items: Sequence[RunItem], group: Sequence[int], replies: list[Outputs | InferenceError | None]
    ) -> Ran:
        """Run some requests of the batch as one. Ends, because each refusal removes at least one request."""
        while True:
            rows = self._sequences.begin([items[at] for at in group])
            ran = self._run(rows)
            taken = iter(group)
            at_row = {position: next(taken) for position, row in enumerate(rows) if row.item is not None}
            refused = {at_row[position]: error for position, error in ran.refused.items() if position in at_row}
            if not refused:
                break
            for at, error in refused.items():
                replies[at] = error
            group = [at for at in group if at not in refused]
            if not group:
                return ran
        for position, at in at_row.items():
            replies[at] = _ended(rows[position], ran.replies[position])
        return ran


def _ended(row: Row, reply: Outputs | InferenceError | None) -> Outputs | InferenceError | None:
    """The reply for the client, after the row has got its new state."""
    if isinstance(reply, list):
        try:
            reply = row.take(reply)
        except InferenceError as error:
            reply = error.with_traceback(None)
    if isinstance(reply, InferenceError):
        row.fail()
    row.end(is_last=True)
    return reply
