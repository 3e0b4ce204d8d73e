"""Completes a model's configuration, or checks a model without loading it, in a process of its own."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from halimede.backends.hosting import WorkerSpec
from halimede.backends.service_calls import ServiceCall, ServiceResult
from halimede.core.types import InferenceResponse, unavailable, unsupported
from halimede.inference_frames.calls import Infer
from halimede.processes.launcher import Launcher
from halimede.workers.abandon import Abandon
from halimede.workers.connection.batches import SentBatch
from halimede.workers.connection.calls import OnResponse
from halimede.workers.connection.worker_connection import Owners
from halimede.workers.frames.answers import Done, Response
from halimede.workers.states import HeldStates
from halimede.workers.supervision.life import Life, spawn, start_first
from halimede.workers.supervision.program import Program
from halimede.workers.worker import BatchItem

COMPLETE = "complete_config"
CHECK = "check_model"
"""What a process is to do, in its START frame, instead of running a model."""


def complete_config(spec: WorkerSpec, program: Program, launcher: Launcher, abandon: Abandon) -> Any:
    """The configuration as completed by the model, as JSON. Blocks while a new process computes it. InferenceError."""
    return asyncio.run(_result(COMPLETE, spec, program, launcher, abandon))


def check_model(spec: WorkerSpec, program: Program, launcher: Launcher, abandon: Abandon) -> None:
    """Raise InferenceError with what the backend's `check` finds. Blocks while a new process computes it."""
    asyncio.run(_result(CHECK, spec, program, launcher, abandon))


async def _result(work: str, spec: WorkerSpec, program: Program, launcher: Launcher, abandon: Abandon) -> Any:
    loop = asyncio.get_running_loop()
    task = loop.create_task(_compute(work, spec, program, launcher, loop))
    with abandon.stopping(partial(_cancel_threadsafe, loop, task)):
        try:
            return await task
        except asyncio.CancelledError:
            raise unavailable("the model was unloaded while it was loading") from None


async def _compute(
    work: str, spec: WorkerSpec, program: Program, launcher: Launcher, loop: asyncio.AbstractEventLoop
) -> Any:
    async def compute() -> Any:
        process = await spawn(spec, program, launcher)
        life = Life(process, spec, (), NO_OWNERS, loop, launcher.memory)
        try:
            return await life.start({"work": work})
        finally:
            await life.end()

    return await start_first(spec, compute)


def _cancel_threadsafe(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]") -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(task.cancel)


class _NoOwner:
    """The owner for a process that runs no model."""

    def on_done(self, batch: SentBatch, done: Done) -> None:
        """Never called: no batch is sent."""

    def on_response(self, response: Response) -> None:
        """Never called: no request is sent."""

    def on_ready(self, is_ready: bool) -> None:
        """Never called: readiness is not requested."""

    def on_metrics(self, updates: Sequence[tuple[int, str, float]]) -> None:
        """Ignored: the model has not declared any metric."""

    async def on_call(self, call: ServiceCall[ServiceResult]) -> ServiceResult:
        raise unsupported(f"'{call.NAME}' cannot be called from auto_complete_config")

    def on_infer(
        self,
        infer: Infer,
        items: Sequence[BatchItem] | None,  # noqa: ARG002
        on_response: OnResponse,
    ) -> int:
        request = infer.request
        error = unsupported("models cannot be called from auto_complete_config")
        on_response(InferenceResponse(request.model_name, "", request.id, error=error))
        return 0

    def on_answered(self) -> None:
        """Never called: calls are refused."""

    def on_cancel_call(self, ticket: int, *, reads_on: bool = False) -> None:
        """Never called: calls are refused."""

    def on_taken(self, ticket: int, responses: int) -> None:
        """Never called: calls are refused."""


NO_OWNERS = Owners(_NoOwner(), _NoOwner(), _NoOwner(), HeldStates(0))
"""The owners for a process that runs no model."""
