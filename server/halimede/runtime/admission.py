"""Admission: finds the version that a request is for, checks the request, and submits it.

See `runtime.requests` for the stages that follow.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from halimede.core.config.check_request import Checked
from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse, shortage_of
from halimede.core.types.caller import MAX_DEPTH, Caller
from halimede.core.types.error import clip, internal, invalid
from halimede.facade.server import OnResponse
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.model import ModelVersion
from halimede.runtime.model_calls import ModelCalls
from halimede.runtime.requests import CANCELLED, RequestTable
from halimede.runtime.threads import run_in_thread

log = logging.getLogger(__name__)

CHECKING_THREADS = 2

TOO_DEEP = f"model '%s' is not called: calls within one another are at most {MAX_DEPTH} deep"
DECOUPLED_EXEC = (
    "Model %s is using the decoupled. The current BLS request call doesn't support models using the decoupled"
    " transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled"
    " models.'"
)


class FindVersion(Protocol):
    """Finds the version that a request is for. InferenceError when it does not serve."""

    def __call__(self, name: str, version: str, *, is_inside: bool) -> ModelVersion: ...


class Admission:
    """See `facade.server.Server` for `infer`, `cancel` and `acknowledge`."""

    def __init__(self, find: FindVersion, table: RequestTable) -> None:
        self._find = find
        self._table = table
        self._calls = ModelCalls(table)
        self._next_ticket = 1
        self._checking: dict[int, Callable[[InferenceError], None]] = {}
        """How to answer each request that is checked on a thread, or waits for one."""
        self._checks: set[asyncio.Task[None]] = set()
        self._checking_slots = asyncio.Semaphore(CHECKING_THREADS)

    def __repr__(self) -> str:
        return f"<Admission in_flight={len(self._table.by_ticket)} checking={len(self._checking)}>"

    def close(self) -> None:
        self._calls.close()

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None) -> int:
        received_ns = monotonic_ns()
        ticket = self._next_ticket
        self._next_ticket = ticket + 1
        if caller is not None and caller.depth > MAX_DEPTH:
            error = invalid(TOO_DEEP % clip(request.model_name))
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            return ticket
        form = request.form
        try:
            model = self._find(form.model_name, form.model_version, is_inside=caller is not None)
            if form.wants_one and model.stats.decoupled:
                raise internal(DECOUPLED_EXEC % model.name)
            checked = model.checker.check(request)
        except InferenceError as error:
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            return ticket
        if checked.needs_framing:
            self._check_on_thread(ticket, model, request, checked, on_response, received_ns, caller)
        else:
            self._submit(ticket, model, request, checked, on_response, received_ns, caller)
        return ticket

    def cancel(self, ticket: int, *, reads_on: bool = False) -> None:
        flight = self._table.by_ticket.get(ticket)
        if flight is not None:
            flight.requests.executor.cancel(ticket, reads_on=reads_on)
        elif (answer := self._checking.pop(ticket, None)) is not None:
            # A check on a thread cannot be stopped: the request's bytes and its thread count until the check ends.
            answer(CANCELLED)

    def acknowledge(self, ticket: int, responses: int) -> None:
        flight = self._table.by_ticket.get(ticket)
        if flight is not None:
            flight.requests.executor.acknowledge(ticket, responses)

    def _submit(
        self,
        ticket: int,
        model: ModelVersion,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None,
    ) -> None:
        model.requests.submit(ticket, request, checked, on_response, received_ns, caller)
        if caller is not None and caller.waiter is not None:
            self._calls.made(ticket, caller, received_ns, model.requests.executor)

    def _check_on_thread(
        self,
        ticket: int,
        model: ModelVersion,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None,
    ) -> None:
        """Check the elements of a large BYTES tensor on a thread: a second of work must not block the event loop."""
        requests = model.requests

        def answer(error: InferenceError) -> None:
            on_response(InferenceResponse(request.model_name, "", request.id, error=error))

        async def check() -> None:
            async with self._checking_slots:
                if ticket in self._checking:
                    await run_in_thread(f"frame-{model.name}", lambda: model.checker.check_framing(request))

        # A callback, because a task that is cancelled before its first step never runs.
        def checked_or_failed(task: asyncio.Task[None]) -> None:
            self._checks.discard(task)
            requests.release(checked.size_bytes)
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if self._checking.pop(ticket, None) is None:
                return  # it was cancelled, and answered then
            if error is None:
                self._submit(ticket, model, request, checked, on_response, received_ns, caller)
            elif isinstance(error, InferenceError):
                answer(error)
            elif isinstance(error, asyncio.CancelledError):
                answer(CANCELLED)
            else:
                # The server has no thread or no memory left: only this request fails.
                text = f"request for model '{model.name}' could not be checked"
                about = {"model": model.name}
                log.error("model '%s': a request could not be checked", model.name, exc_info=error, extra=about)
                answer(shortage_of(error) or internal(text))

        try:
            requests.hold(checked.size_bytes)
        except InferenceError as error:
            answer(error)
            return
        self._checking[ticket] = answer
        task = asyncio.get_running_loop().create_task(check())
        self._checks.add(task)
        task.add_done_callback(checked_or_failed)
