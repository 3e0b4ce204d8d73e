"""Hosts a model of sequences: a `Runner` around the model's runner, and the `Host` that the model's runner gets.

The runner gives each request its row, and null rows if the model needs them, and drops the replies of these. Both keep
the states that responses carry.

Standard library and numpy only, for any CPython from 3.10 on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from halimede.backends.hosting import (
    RESCHEDULED,
    Answer,
    BatchReply,
    Call,
    Host,
    HostedRequest,
    Reply,
    Rescheduled,
    Runner,
)
from halimede.backends.service_calls import ResultT_co, ServiceCall
from halimede.core.sequences.plan import SequencePlan
from halimede.core.sequences.rows import Row, Sequences, StateBytes, initial_states
from halimede.core.types import InferenceError, InferenceRequest


class SequenceHost:
    """The `Host` of a model of sequences, whose requests are rows."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def is_cancelled(self, request: HostedRequest) -> bool:
        return self._host.is_cancelled(request)

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        """Also keeps the states of the response. An invalid state ends the request with an error."""
        if isinstance(request, Row):
            reply = _for_client(request, reply)
            final = final or isinstance(reply, InferenceError)
        self._host.respond(request, reply, final)

    def log(self, level: str, message: str, origin: str = "") -> None:
        self._host.log(level, message, origin)

    def end(self, why: str) -> None:
        self._host.end(why)

    def call(self, call: ServiceCall[ResultT_co]) -> ResultT_co:
        return self._host.call(call)

    def infer(self, request: InferenceRequest) -> Call:
        return self._host.infer(request)

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        self._host.update_metric(metric, operation, value)

    @property
    def states(self) -> StateBytes:
        return self._host.states


class SequenceRunner:
    """A `Runner` around the runner of a model of sequences."""

    ends_late = True

    def __init__(
        self, runner: Runner, plan: SequencePlan, model: str, files: Mapping[str, bytes], states: StateBytes
    ) -> None:
        """`files` are the contents of the files with initial states, by the input names of the states."""
        self.is_async = runner.is_async
        self.answers_is_ready = runner.answers_is_ready
        self._runner = runner
        self._sequences = Sequences(plan, model, initial_states(plan, files), states, copies=True)

    def execute(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        errors, rows = self._begin(requests)
        return self._end(requests, errors, rows, self._runner.execute(rows) if rows else [])

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        errors, rows = self._begin(requests)
        return self._end(requests, errors, rows, await self._runner.execute_async(rows) if rows else [])

    def forget(self, sequence_slot: int) -> None:
        self._sequences.forget(sequence_slot)

    async def is_ready(self) -> bool:
        return await self._runner.is_ready()

    def close(self) -> None:
        self._runner.close()

    def _begin(self, requests: Sequence[HostedRequest]) -> tuple[dict[int, InferenceError], list[Row]]:
        errors = self._sequences.check(requests)
        usable = [request for at, request in enumerate(requests) if at not in errors]
        return errors, self._sequences.begin(usable) if usable else []

    def _end(
        self,
        requests: Sequence[HostedRequest],
        errors: Mapping[int, InferenceError],
        rows: Sequence[Row],
        replies: Sequence[BatchReply],
    ) -> list[BatchReply]:
        """The replies of the requests, without those of null rows."""
        ended: list[BatchReply] = []
        for row, reply in zip(rows, replies, strict=True):
            if row.item is None:
                continue
            ended.append(reply if isinstance(reply, Rescheduled) else _for_client(row, reply))
            row.end(is_last=reply is not RESCHEDULED)
        others = iter(ended)
        return [errors[at] if at in errors else next(others) for at in range(len(requests))]


def _for_client(row: Row, reply: Reply) -> Reply:
    """The reply without states that the client does not get."""
    if isinstance(reply, Answer):
        try:
            return replace(reply, outputs=row.take(reply.outputs))
        except InferenceError as error:
            reply = error.with_traceback(None)
    if isinstance(reply, InferenceError):
        row.fail()
    return reply
