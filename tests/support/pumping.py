"""A pump with callers that record their answers, and fake worker processes that the test drives."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelTransactionPolicy,
)
from halimede.core.config.process_options import MAX_CONCURRENCY
from halimede.core.observe.stats import ModelStats
from halimede.core.schedule.make import make_scheduler
from halimede.core.schedule.scheduler import Scheduler
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.pump import Pump
from halimede.runtime.requests import RequestTable, VersionRequests
from halimede.workers.worker import (
    BatchDone,
    BatchItem,
    BatchTimes,
    Outputs,
    Parameters,
    ResponseSent,
    WorkerDown,
    WorkerEvent,
    WorkerUp,
)

DEAD = InferenceError(ErrorCode.INTERNAL, "Stub process 'm' is not healthy.")
OUTPUT = ModelOutput(name="OUT", data_type=DataType.FP32, dims=(1,))

MS = 1_000_000


def outputs() -> Outputs:
    return [Tensor("OUT", DataType.FP32, (1, 1), b"\0" * 4)]


def times(start_ms: int = 0, input_end_ms: int = 0, output_start_ms: int = 0, end_ms: int = 0) -> BatchTimes:
    return BatchTimes(start_ms * MS, input_end_ms * MS, output_start_ms * MS, end_ms * MS)


@dataclass(slots=True)
class PlayedProcess:
    """A fake worker process that the test drives. It keeps the batches by slot, and the open requests."""

    ordinal: int
    pump: Pump
    concurrency: int = 1
    is_up: bool = True
    batches: dict[int, list[BatchItem]] = field(default_factory=dict)
    next: dict[int, list[BatchItem]] = field(default_factory=dict)
    """Batches that begin after the running ones."""
    open: list[int] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    asked_to_cancel: list[int] = field(default_factory=list)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    stopped: bool = False
    says_ready: bool = True
    is_slow: bool = False
    times_out: bool = False

    @property
    def name(self) -> str:
        return f"m_{self.ordinal}"

    def execute(self, items: list[BatchItem], slot: int = 0) -> None:
        assert self.is_up, "a batch for a process that is down"
        assert slot < self.concurrency
        if slot in self.batches:
            assert slot not in self.next, "two batches wait for one slot"
            self.next[slot] = items
        else:
            self._begin(slot, items)

    def _begin(self, slot: int, items: list[BatchItem]) -> None:
        self.batches[slot] = items
        self.executed += [item.key for item in items]

    def take_back(self, slot: int) -> bool:
        return self.next.pop(slot, None) is not None

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def ask_cancel(self, key: int) -> None:
        self.asked_to_cancel.append(key)

    def forget(self, sequence_slot: int) -> None:
        """No effect: there are no states."""

    def acknowledge(self, key: int, responses: int) -> None:
        self.acknowledged.append((key, responses))

    async def is_ready(self) -> bool:
        if self.is_slow:
            await asyncio.sleep(3600)
        if self.times_out:
            raise InferenceError(ErrorCode.UNAVAILABLE, "no answer")
        return self.says_ready

    async def stop(self) -> None:
        self.stopped = True

    def send(
        self,
        key: int,
        reply: Outputs | InferenceError | None,
        *,
        final: bool = False,
        when: BatchTimes | None = None,
        parameters: Parameters | None = None,
    ) -> None:
        """Send one answer before the end of the batch."""
        if final and key in self.open:
            self.open.remove(key)
        self.pump.on_event(ResponseSent(self, key, reply, final, when or times(), parameters or {}))

    def finish(
        self,
        slot: int = 0,
        reply: Outputs | InferenceError | None = None,
        *,
        parameters: dict[int, Parameters] | None = None,
        when: BatchTimes | None = None,
    ) -> None:
        """End a slot's batch with one reply for all its requests; None leaves them open."""
        items = self.batches.pop(slot)
        if slot in self.next:
            # The process begins it before the server learns of the end.
            self._begin(slot, self.next.pop(slot))
        if reply is None:
            self.open += [item.key for item in items]
        failed = isinstance(reply, InferenceError)
        replies = [reply] * len(items) if reply is None or failed else [outputs() for _ in items]
        self.pump.on_event(BatchDone(self, items, replies, when or times(), failed, slot, parameters or {}))

    def die(self, reason: str = "signal 9", *, parked: bool = False, has_read: bool = True) -> list[WorkerEvent]:
        """Go down. The returned events fail what it held; the test must deliver them.

        They do not fail batches that it had not read, and those that it had not begun.
        """
        failures: list[WorkerEvent] = []
        unread = {item.key for items in self.next.values() for item in items}
        self.next = {}
        if has_read:
            failures = [
                BatchDone(self, items, [DEAD] * len(items), times(), True, slot) for slot, items in self.batches.items()
            ]
        else:
            unread |= {item.key for items in self.batches.values() for item in items}
            self.executed = [key for key in self.executed if key not in unread]
        failures += [ResponseSent(self, key, DEAD, True, times()) for key in self.open]
        self.batches, self.open, self.is_up = {}, [], False
        self.pump.on_event(WorkerDown(self, reason, parked, unread))
        return failures

    def restart(self) -> None:
        self.is_up = True
        self.pump.on_event(WorkerUp(self))


class Bench:
    """A pump, its fake processes, and the answers to callers: (key, answer, final)."""

    def __init__(
        self,
        workers: int = 1,
        *,
        concurrency: int = 1,
        decoupled: bool = True,
        output: ModelOutput = OUTPUT,
        scheduler: Scheduler | None = None,
        **batching: Any,
    ) -> None:
        config = ModelConfig(
            name="m",
            max_batch_size=4,
            input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(1,)),),
            output=(output,),
            dynamic_batching=ModelDynamicBatching(**batching),
            model_transaction_policy=ModelTransactionPolicy(decoupled=decoupled),
            parameters={MAX_CONCURRENCY: ModelParameter(str(concurrency))},
        )
        self.table = RequestTable()
        self.stats = ModelStats("m", "1", decoupled=decoupled)
        in_order = bool(batching.get("preserve_ordering"))
        self.pump = Pump(
            lambda take_back: scheduler or make_scheduler(config, take_back),
            partial(VersionRequests, self.table, self.stats, preserve_ordering=in_order),
            RequestChecker(config),
            asyncio.get_running_loop(),
        )
        self.requests = self.pump.requests
        self.workers = [PlayedProcess(ordinal, self.pump, concurrency) for ordinal in range(workers)]
        for worker in self.workers:
            self.pump.add_worker(worker)
        self.responses: list[tuple[int, InferenceResponse]] = []

    def submit(self, *keys: int, **asked: Any) -> None:
        """Submit requests with these fields of `InferenceRequest`."""
        for key in keys:
            request = InferenceRequest("m", id=str(key), **asked)
            self.requests.submit(key, request, Checked(1, 4, ()), self._note(key), monotonic_ns())

    @property
    def executing(self) -> int:
        return self.requests.count - self.pump.queued

    async def turn(self) -> None:
        """Let the loop's turn end; at its end the pump sends what arrived in it."""
        await asyncio.sleep(0)

    def _note(self, key: int) -> Callable[[InferenceResponse], None]:
        def on_response(response: InferenceResponse) -> None:
            assert response.id == str(key)
            self.responses.append((key, response))

        return on_response

    @property
    def answers(self) -> list[tuple[int, ErrorCode | str, bool]]:
        """The answers to all callers, in order: an error's code, `ok`, or `end` for an empty final answer."""
        return [
            (key, "end" if each.is_empty else each.error.code if each.error is not None else "ok", each.final)
            for key, each in self.responses
        ]
