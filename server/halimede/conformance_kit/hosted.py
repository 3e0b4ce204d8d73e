"""Runs requests on an instance in a worker process, as the server does for models in processes of their own."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from halimede.conformance_kit.subject import Reply, Subject, Wrong
from halimede.core.config.process_options import strict_outputs
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import InferenceError, InferenceRequest
from halimede.runtime.prepare import isolated_version
from halimede.serving_core import make_core
from halimede.settings import Settings
from halimede.workers.states import HeldStates
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.worker import BatchDone, BatchItem, ResponseSent, WorkerDown, WorkerEvent

Answers = list[Reply]
"""All answers to one request; more than one only from a decoupled model."""


class _Collector:
    """The answers to the requests of one batch, and whether all of them have had their last one."""

    def __init__(self, items: list[BatchItem]) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = loop.create_future()
        self.answers: dict[int, Answers] = {item.key: [] for item in items}
        self._open = set(self.answers)

    def take(self, event: WorkerEvent) -> None:
        match event:
            case BatchDone(items=items, replies=replies):
                for item, reply in zip(items, replies, strict=True):
                    if reply is not None:
                        self._add(item.key, reply, final=True)
            case ResponseSent(key=key, reply=reply, final=final):
                self._add(key, reply, final=final)
            case WorkerDown(reason=reason) if not self.done.done():
                self.done.set_exception(
                    Wrong(f"the worker process ended: {reason}", "see the log of the process above")
                )

    def _add(self, key: int, reply: Reply, *, final: bool) -> None:
        if key not in self._open:
            return
        # An answer without content only ends the request.
        if reply is not None and not (final and reply == []):
            self.answers[key].append(_copied(reply))
        if final:
            self._open.remove(key)
        if not self._open and not self.done.done():
            self.done.set_result(None)


async def hosted_answers(subject: Subject, batches: Sequence[Sequence[InferenceRequest]]) -> list[list[Answers]]:
    """The answers to each request of each batch, one batch after the other. Wrong if a request gets no last one."""
    options = subject.options
    isolated = isolated_version(subject.config, subject.backend, subject.source, 1, options)
    collector: _Collector | None = None

    def on_event(event: WorkerEvent) -> None:
        if collector is not None:
            collector.take(event)

    try:
        worker = await ProcessWorker(
            isolated.spec(subject.placement()),
            subject.config,
            ReplyChecker(subject.config, is_strict=strict_outputs(subject.config)),
            isolated.program,
            options.launcher,
            # Of a core without models, which needs no end: models that the backend's code calls are unknown.
            make_core(Settings()).server.lifecycle.services,
            "check#1",
            on_event,
            asyncio.get_running_loop(),
            HeldStates(),
        ).start()
    except InferenceError as error:
        text = f"the instance does not start in a worker process: {error.message}"
        raise Wrong(text, "import all that is needed inside the backend's methods") from None
    found: list[list[Answers]] = []
    key = 0
    try:
        for requests in batches:
            items = []
            for sequence_slot, request in enumerate(requests):
                key += 1
                rows = request.inputs[0].shape[0] if subject.maker.batches else 1
                items.append(BatchItem(key, request, rows, cancelled=False, sequence_slot=sequence_slot))
            collector = _Collector(items)
            worker.execute(items)
            try:
                async with asyncio.timeout(subject.longest_wait_secs):
                    await collector.done
            except TimeoutError:
                text = f"a request has no last answer after {subject.longest_wait_secs:g} s"
                raise Wrong(text, "end each request with a final response, or with `fail`") from None
            found.append([collector.answers[item.key] for item in items])
    finally:
        with suppress(TimeoutError):
            await worker.stop()
    return found


def _copied(reply: Reply) -> Reply:
    """The reply in memory of this process, because the worker's memory ends with the worker."""
    if not isinstance(reply, list):
        return reply
    return [replace(tensor, data=bytes(tensor.data)) for tensor in reply]
