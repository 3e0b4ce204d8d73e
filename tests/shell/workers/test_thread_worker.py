import asyncio
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from halimede.backends.api import ExecuteRequest, RefusedRequestsError
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelTransactionPolicy
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Placement, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.workers.states import HeldStates
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import BatchDone, BatchItem
from support.loops import in_a_loop

FP32 = DataType.FP32
PLACEMENT = Placement("double_0_1", ordinal=1, kind="CPU")
CONFIG = ModelConfig(
    name="double",
    max_batch_size=8,
    input=(ModelInput("x", FP32, dims=(2,)),),
    output=(ModelOutput("y", FP32, dims=(2,)), ModelOutput("n", DataType.INT32, dims=(1,))),
)
WAIT_SECONDS = 10


def internal(message: str) -> InferenceError:
    return InferenceError(ErrorCode.INTERNAL, message)


def floats(name: str, *rows: list[float]) -> Tensor:
    return tensor_from_array(name, FP32, np.array(rows, dtype=np.float32))


def item(key: int, *rows: list[float], outputs: tuple[str, ...] = ("y",)) -> BatchItem:
    request = InferenceRequest("double", id=f"r{key}", inputs=[floats("x", *rows)], outputs=outputs)
    return BatchItem(key, request, len(rows), cancelled=False)


@dataclass
class Model:
    """A model whose instances are made by `make`; records each event with its thread."""

    make: Callable[[], object]
    diary: list[tuple[str, str]] = field(default_factory=list)

    def create_instance(self, placement: Placement):
        self.note("create")
        return self.make()

    def note(self, what: str) -> None:
        self.diary.append((what, threading.current_thread().name))

    def close(self) -> None:
        self.note("close model")


class Tensors:
    """A TensorInstance that computes with `compute`."""

    def __init__(self, compute) -> None:
        self._compute = compute

    def run(self, inputs, outputs, context):
        return self._compute(inputs, outputs, context)

    def close(self) -> None:
        pass


class Requests:
    """A RequestInstance that answers with `answer`."""

    def __init__(self, answer: Callable[[Sequence[ExecuteRequest]], None]) -> None:
        self.execute = answer

    def close(self) -> None:
        pass


def double(inputs, outputs, context):
    return {"y": inputs["x"] * 2, "n": np.full((len(inputs["x"]), 1), sum(context.rows), np.int32)}


class Harness:
    """One worker, with its events in a queue."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[BatchDone] = asyncio.Queue()
        self.threads: list[str] = []

    def on_event(self, event: BatchDone) -> None:
        self.threads.append(threading.current_thread().name)
        self.events.put_nowait(event)

    async def start(self, model: Model, config: ModelConfig = CONFIG) -> ThreadWorker:
        return await ThreadWorker(
            PLACEMENT, model, config, self.on_event, asyncio.get_running_loop(), states=HeldStates()
        ).start()

    async def batch(self, worker: ThreadWorker, *items: BatchItem) -> BatchDone:
        worker.execute(list(items))
        return await asyncio.wait_for(self.events.get(), WAIT_SECONDS)


def play(instance: object, scenario: Callable[[Harness, ThreadWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        harness = Harness()
        worker = await harness.start(Model(lambda: instance))
        await scenario(harness, worker)
        await worker.stop()

    asyncio.run(main())


def answers(done: BatchDone) -> list[object]:
    """Per request: the outputs as lists by name, or the error."""
    return [
        reply if not isinstance(reply, list) else {tensor.name: tensor.array().tolist() for tensor in reply}
        for reply in done.replies
    ]


def test_a_batch_is_gathered_run_and_scattered_and_reported_on_the_loops_thread():
    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        items = [item(1, [1, 2]), item(2, [3, 4], [5, 6], outputs=())]
        done = await harness.batch(worker, *items)
        assert answers(done) == [{"y": [[2, 4]]}, {"y": [[6, 8], [10, 12]], "n": [[3], [3]]}]
        assert (done.worker, done.items, done.failed) == (worker, items, False)
        times = [done.times.start, done.times.input_end, done.times.output_start, done.times.end]
        assert times == sorted(times)
        assert harness.threads == ["MainThread"]

    play(Tensors(double), scenario)


def test_an_instance_lives_on_its_own_thread_from_creation_to_close():
    model = Model(lambda: instance)
    instance = Tensors(lambda *batch: model.note("run") or double(*batch))
    instance.close = lambda: model.note("close")

    async def main() -> None:
        harness = Harness()
        worker = await harness.start(model)
        await harness.batch(worker, item(1, [1, 2]))
        assert (worker.ordinal, worker.name, repr(worker)) == (1, "double_0_1", "<ThreadWorker double_0_1 running>")
        await worker.stop()
        assert "instance-double_0_1" not in [thread.name for thread in threading.enumerate()]

    asyncio.run(main())
    assert model.diary == [(what, "instance-double_0_1") for what in ("create", "run", "close")]


@in_a_loop
async def test_a_model_without_batching_sees_one_request_without_a_batch_dimension():
    config = ModelConfig(input=CONFIG.input, output=CONFIG.output[:1])
    request = InferenceRequest("sum", inputs=[Tensor("x", FP32, (2,), np.float32([1, 2]).tobytes())])
    harness = Harness()
    worker = await harness.start(Model(lambda: Tensors(lambda x, *_: {"y": x["x"].sum(keepdims=True)})), config)
    done = await harness.batch(worker, BatchItem(1, request, 1, cancelled=False))
    assert answers(done) == [{"y": [3]}]
    await worker.stop()


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("no such device"), ValueError("no such device")),
        (InferenceError(ErrorCode.UNSUPPORTED, "no GPU"), InferenceError(ErrorCode.UNSUPPORTED, "no GPU")),
        (SystemExit(3), internal("SystemExit: 3")),
        (StopIteration("end"), internal("StopIteration: end")),
    ],
)
@in_a_loop
async def test_start_raises_the_error_of_create_instance(error, seen):
    def broken() -> object:
        raise error

    with pytest.raises(type(seen)) as caught:
        await Harness().start(Model(broken))
    assert caught.value.args == seen.args


@in_a_loop
async def test_a_cancelled_start_closes_the_instance():
    creating, go, closed = threading.Event(), threading.Event(), threading.Event()

    def slow() -> object:
        creating.set()
        go.wait(WAIT_SECONDS)
        instance = Tensors(double)
        instance.close = closed.set
        return instance

    task = asyncio.create_task(Harness().start(Model(slow)))
    await asyncio.to_thread(creating.wait, WAIT_SECONDS)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(closed.wait, WAIT_SECONDS)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be printed")


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (MemoryError("too much"), "MemoryError: too much"),
        (Unprintable(), "Unprintable"),
        (ValueError("x" * 5000), "ValueError: " + "x" * 1012 + "..."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_fails_its_batch_and_the_next_batch_runs(error, seen):
    failures = [error]

    def compute(*batch):
        if failures:
            raise failures.pop()
        return double(*batch)

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]), item(2, [1, 2]))
        text = f"Failed to process the request(s) for model instance 'double_0_1', message: {seen}"
        assert (done.replies, done.failed) == ([internal(text)] * 2, True)
        assert answers(await harness.batch(worker, item(3, [1, 2]))) == [{"y": [[2, 4]]}]

    play(Tensors(compute), scenario)


def test_outputs_that_do_not_fit_into_memory_are_unavailable():
    def compute(inputs, *_):
        return {"y": np.broadcast_to(np.float32(1), (len(inputs["x"]), 1 << 50))}

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]))
        lack = InferenceError(ErrorCode.UNAVAILABLE, "the server has not enough memory for this")
        assert (done.replies, done.failed) == ([lack], True)

    play(Tensors(compute), scenario)


def test_a_models_own_error_keeps_its_code_and_text():
    error = InferenceError(ErrorCode.INVALID_ARG, "input 'x': too cold")

    def compute(*batch):
        raise error

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]))
        assert (done.replies, done.failed) == ([error], True)

    play(Tensors(compute), scenario)


def test_the_traceback_is_only_in_the_log(caplog):
    def compute(*batch):
        raise ValueError("boom")

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]))
        assert "Traceback" not in done.replies[0].message

    with caplog.at_level(logging.ERROR, "halimede"):
        play(Tensors(compute), scenario)
    (record,) = caplog.records
    assert (record.message, record.exc_info[0]) == ("instance 'double_0_1' failed", ValueError)


def test_an_invalid_output_fails_the_batch_and_is_named():
    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]))
        text = "output 'y': the model returned shape [2] for a batch of 1 rows; its first dimension must be 1"
        assert (done.replies, done.failed) == ([internal(text)], True)

    play(Tensors(lambda x, *_: {"y": x["x"][0]}), scenario)


def test_requests_are_answered_one_by_one():
    def answer(requests):
        good, bad, silent, wrong = requests
        assert (good.id, good.batch_size, good.outputs, good.is_cancelled()) == ("r1", 1, ("y",), True)
        assert silent.outputs == ("y", "n")
        good.respond([Tensor("y", FP32, (1, 2), bytes(good.inputs["x"].data))])
        bad.fail(InferenceError(ErrorCode.INVALID_ARG, "not today"))
        wrong.respond([Tensor("y", FP32, (1, 2), b"123")])

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        items = [item(1, [1, 2]), item(2, [1, 2]), item(3, [1, 2], outputs=()), item(4, [1, 2])]
        items[0].cancelled = True
        done = await harness.batch(worker, *items)
        assert answers(done) == [
            {"y": [[1, 2]]},
            InferenceError(ErrorCode.INVALID_ARG, "not today"),
            internal("instance 'double_0_1' did not answer the request"),
            internal("output 'y': the model sent 3 bytes; FP32 of shape [1,2] has 8"),
        ]
        assert done.failed is False

    play(Requests(answer), scenario)


def test_an_answer_may_have_no_outputs():
    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        assert (await harness.batch(worker, item(1, [1, 2]))).replies == [[]]

    play(Requests(lambda requests: requests[0].respond([])), scenario)


def test_answers_before_an_exception_are_kept():
    def answer(requests):
        requests[0].respond([floats("y", [7, 7])])
        raise ValueError("boom")

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]), item(2, [1, 2]))
        text = "Failed to process the request(s) for model instance 'double_0_1', message: ValueError: boom"
        assert (answers(done), done.failed) == ([{"y": [[7, 7]]}, internal(text)], True)

    play(Requests(answer), scenario)


def test_a_request_takes_one_final_answer_during_its_batch():
    kept = []
    refusals = []

    def refused(call) -> None:
        with pytest.raises(RuntimeError) as caught:
            call()
        refusals.append(str(caught.value))

    def answer(requests):
        (request,) = requests
        kept.append(request)
        if len(kept) == 1:
            refused(lambda: request.respond([], final=False))
            refused(lambda: request.respond([], parameters={"a": 1}))
            request.respond([])
            refused(lambda: request.respond([]))
            refused(lambda: request.fail(internal("late")))

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        await harness.batch(worker, item(1, [1, 2]))
        await harness.batch(worker, item(2, [1, 2]))
        refused(lambda: kept[1].respond([]))

    play(Requests(answer), scenario)
    assert refusals == [
        "request 'r1': only decoupled models may answer with final=False",
        "request 'r1': response parameters are for decoupled models",
        "request 'r1' has been answered already",
        "request 'r1' has been answered already",
        "request 'r2' is over: execute returned without an answer to it",
    ]


@in_a_loop
async def test_stop_waits_for_the_running_batch_and_survives_a_failing_close():
    running, go = threading.Event(), threading.Event()

    def compute(*batch):
        running.set()
        go.wait(WAIT_SECONDS)
        return double(*batch)

    def fail() -> None:
        raise OSError("cannot close")

    harness = Harness()
    instance = Tensors(compute)
    instance.close = fail
    worker = await harness.start(Model(lambda: instance))
    worker.execute([item(1, [1, 2])])
    await asyncio.to_thread(running.wait, WAIT_SECONDS)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    go.set()
    await asyncio.wait_for(stopping, WAIT_SECONDS)
    assert answers(harness.events.get_nowait()) == [{"y": [[2, 4]]}]
    assert repr(worker) == "<ThreadWorker double_0_1 stopped>"


class Data(bytearray):
    """Bytes that report when they are freed."""


def test_an_idle_worker_frees_its_last_batch():
    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        data = Data(np.float32([1, 2]).tobytes())
        gone = threading.Event()
        weakref.finalize(data, gone.set)
        request = InferenceRequest("double", inputs=[Tensor("x", FP32, (1, 2), data)])
        del data
        await harness.batch(worker, BatchItem(1, request, 1, cancelled=False))
        del request
        # The thread drops the batch just after it has reported it.
        assert await asyncio.to_thread(gone.wait, WAIT_SECONDS)

    play(Tensors(double), scenario)


@in_a_loop
async def test_decoupled_models_are_refused():
    config = ModelConfig(model_transaction_policy=ModelTransactionPolicy(decoupled=True))
    with pytest.raises(RuntimeError, match="'double_0_1': decoupled models do not run on the server's threads"):
        await Harness().start(Model(lambda: Tensors(double)), config)


@pytest.mark.parametrize("refuse_at_once", [True, False])
def test_only_the_request_with_unusable_inputs_fails(refuse_at_once: bool) -> None:
    batches: list[int] = []

    def positive_only(inputs, outputs, context):
        batches.append(len(context.rows))
        starts = np.cumsum([0, *context.rows[:-1]])
        bad = [k for k, start in enumerate(starts) if inputs["x"][start][0] < 0]
        if bad:
            errors = {k: internal(f"{inputs['x'][starts[k]][0]} is negative") for k in bad}
            raise RefusedRequestsError(errors if refuse_at_once else {bad[0]: errors[bad[0]]})
        return double(inputs, outputs, context)

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [-1, 0]), item(2, [1, 2], [3, 4]), item(3, [-5, 0]), item(4, [7, 8]))
        first, second, third, fourth = done.replies
        assert (first, third) == (internal("-1.0 is negative"), internal("-5.0 is negative"))
        assert [[t.array().tolist() for t in reply] for reply in (second, fourth)] == [[[[2, 4], [6, 8]]], [[[14, 16]]]]
        assert not done.failed
        assert batches == ([4, 2] if refuse_at_once else [4, 3, 2])
        alone = await harness.batch(worker, item(5, [-9, 0]), item(6, [-8, 0]))
        assert alone.replies == [internal("-9.0 is negative"), internal("-8.0 is negative")]
        assert alone.failed

    play(Tensors(positive_only), scenario)


def test_an_empty_refusal_is_an_error_of_the_model() -> None:
    def confused(inputs, outputs, context):
        raise RefusedRequestsError({})

    async def scenario(harness: Harness, worker: ThreadWorker) -> None:
        done = await harness.batch(worker, item(1, [1, 2]), item(2, [3, 4]))
        assert done.failed
        assert [reply.code for reply in done.replies] == [ErrorCode.INTERNAL] * 2

    play(Tensors(confused), scenario)
