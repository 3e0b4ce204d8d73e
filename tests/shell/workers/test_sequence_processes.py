"""Models of sequences in processes of their own, and requests that are executed several times."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.workers.worker import BatchDone, BatchItem, ResponseSent, WorkerDown, WorkerUp
from support.loops import in_a_loop
from support.onnx_models import model
from support.onnx_models import tensor as info
from support.pumping import Bench
from support.sequence_playing import Play, playing, python_model
from support.sequence_requests import oldest
from support.sequences import CONTROLS, SUM, config_of, item, values


def onnx_model(folder: Path, proto: onnx.ModelProto) -> Path:
    file = folder / "1" / "model.onnx"
    file.parent.mkdir()
    onnx.save(proto, file)
    return file


def answers(done: BatchDone) -> list[Any]:
    return [values(reply) if isinstance(reply, list) else reply for reply in done.replies]


ACCUMULATE = """
def execute(self, requests):
    replies = []
    for request in requests:
        named = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        total = named["x"] + named["sum_in"] + 1000 * named["START"]
        total = total.astype(np.float32)
        replies.append(pb.InferenceResponse([pb.Tensor("y", total), pb.Tensor("sum", total)]))
    return replies
"""
INITIAL = SUM % 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "start" }'


def initial_state(folder: Path) -> None:
    (folder / "initial_state").mkdir()
    (folder / "initial_state" / "start").write_bytes(bytes.fromhex("0000c842"))


async def sums(play: Play) -> None:
    """Batches of two sequences, with null rows before and between them."""
    done = await play.batch(item(1, 1, 5, start=True), item(2, 3, 6, start=True))
    assert answers(done) == [{"y": [[1105.0]]}, {"y": [[1106.0]]}]
    done = await play.batch(item(3, 3, 1))
    assert answers(done) == [{"y": [[1107.0]]}]
    done = await play.batch(item(4, 1, 1, end=True), item(5, 3, 1))
    assert answers(done) == [{"y": [[1106.0]]}, {"y": [[1108.0]]}]
    done = await play.batch(item(6, 1, 2, start=True))
    assert answers(done) == [{"y": [[1102.0]]}]


@in_a_loop
async def test_a_python_model_keeps_states_in_its_process(tmp_path: Path) -> None:
    initial_state(tmp_path)
    config = config_of(CONTROLS + INITIAL, backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, ACCUMULATE)) as play:
        await sums(play)


@in_a_loop
async def test_an_onnx_model_keeps_states_in_its_process(tmp_path: Path) -> None:
    shape = ("n", 1)
    kinds = {"START": DataType.INT32, "END": DataType.FP32, "READY": DataType.BOOL, "ID": DataType.UINT64}
    proto = model(
        [
            helper.make_node("Cast", ["START"], ["start"], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", ["start", "thousand"], ["first"]),
            helper.make_node("Sum", ["sum_in", "x", "first"], ["sum"]),
            helper.make_node("Identity", ["sum"], ["y"]),
        ],
        [info(name, DataType.FP32, shape) for name in ("x", "sum_in")]
        + [info(name, kind, shape) for name, kind in kinds.items()],
        [info(name, DataType.FP32, shape) for name in ("y", "sum")],
        [helper.make_tensor("thousand", onnx.TensorProto.FLOAT, [], [1000.0])],
    )
    initial_state(tmp_path)
    config = config_of(CONTROLS + INITIAL)
    async with playing(tmp_path, config, onnx_model(tmp_path, proto)) as play:
        await sums(play)


@in_a_loop
async def test_the_states_of_a_process_that_died_are_gone(tmp_path: Path) -> None:
    config = config_of(CONTROLS + SUM % "", backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, ACCUMULATE)) as play:
        await play.batch(item(1, 0, 5, start=True))
        os.kill(play.worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        assert answers(await play.batch(item(2, 0, 1))) == [{"y": [[1.0]]}]


ITERATIVE = "iterative_sequence: true "
STREAM = """
def execute(self, requests):
    for request in requests:
        named = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        total = named["sum_in"] + 1 + 100 * (request.flags() & 1)
        sender = request.get_response_sender()
        sender.send(pb.InferenceResponse([pb.Tensor(name, total.astype(np.float32)) for name in ("y", "sum")]))
        if total % 100 < named["x"]:
            request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        else:
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def sent(play: Play) -> list[tuple[int, Any, bool]]:
    return [
        (each.key, values(each.reply) if isinstance(each.reply, list) else each.reply, each.final)
        for each in play.heard(ResponseSent)
    ]


def again(*items: BatchItem) -> list[BatchItem]:
    """As the pump sends them again."""
    for each in items:
        each.request.sequence_start = False
    return list(items)


@in_a_loop
async def test_a_request_streams_one_response_in_each_execution(tmp_path: Path) -> None:
    config = config_of(ITERATIVE + "oldest { }" + SUM % "", backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, STREAM), decoupled=True) as play:
        one, two = item(1, 0, 3, start=True), item(2, 1, 1, start=True)
        done = await play.batch(one, two)
        assert (done.replies, list(done.again)) == ([None, None], [0])
        done = await play.batch(*again(one))
        assert (done.replies, list(done.again)) == ([None], [0])
        done = await play.batch(*again(one))
        assert (done.replies, list(done.again)) == ([None], [])
        assert [each for each in sent(play) if each[0] == 1] == [
            (1, {"y": [[101.0]]}, False),
            (1, {"y": [[102.0]]}, False),
            (1, {"y": [[103.0]]}, False),
            (1, None, True),
        ]
        assert "requests=0" in repr(play.worker)


LATE = """
def execute(self, requests):
    (request,) = requests
    sender = request.get_response_sender()
    request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    response = pb.InferenceResponse([pb.Tensor("y", np.ones((1, 1), np.float32))])
    threading.Timer(0.05, sender.send, (response,)).start()
"""


@in_a_loop
async def test_a_request_may_have_a_response_between_its_executions(tmp_path: Path) -> None:
    config = config_of(ITERATIVE, backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, LATE), decoupled=True) as play:
        await play.batch(item(1, 0, start=True))
        await play.until(lambda: play.heard(ResponseSent), "the response")
        assert sent(play) == [(1, {"y": [[1.0]]}, False)]


@in_a_loop
async def test_a_request_that_ended_between_executions_is_forgotten(tmp_path: Path) -> None:
    """Its client has disconnected, so the scheduler has dropped it and gives its sequence slot to another request."""
    config = config_of(ITERATIVE + SUM % "", backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, STREAM), decoupled=True) as play:
        for key in range(5):
            done = await play.batch(item(key, 0, 3, start=True))
            assert list(done.again) == [0]
            assert "requests=1" in repr(play.worker)
        last = item(9, 0, 1, start=True)
        await play.batch(last)
        assert "requests=0" in repr(play.worker)
        assert sent(play)[-2:] == [(9, {"y": [[101.0]]}, False), (9, None, True)]


CANCELLED = """
def execute(self, requests):
    (request,) = requests
    if request.is_cancelled():
        return [pb.InferenceResponse([], error=pb.TritonError("stopped", pb.TritonError.CANCELLED))]
    request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    return [None]
"""


@in_a_loop
async def test_a_cancel_between_two_executions_is_seen_by_the_next(tmp_path: Path) -> None:
    config = config_of(ITERATIVE, backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, CANCELLED)) as play:
        one = item(1, 0, start=True)
        assert list((await play.batch(one)).again) == [0]
        play.worker.cancel(1)
        [reply] = (await play.batch(*again(one))).replies
        assert isinstance(reply, InferenceError)
        assert reply.message == "stopped"


@in_a_loop
async def test_a_dead_process_does_not_end_what_the_scheduler_has_again(tmp_path: Path) -> None:
    config = config_of(ITERATIVE + "oldest { }", backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, CANCELLED)) as play:
        await play.batch(item(1, 0, start=True))
        os.kill(play.worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        assert [len(play.heard(kind)) for kind in (WorkerDown, BatchDone, ResponseSent)] == [1, 1, 0]
        assert "requests=0" in repr(play.worker)


@asynccontextmanager
async def pumping(folder: Path, methods: str) -> AsyncIterator[tuple[Bench, Play]]:
    """A decoupled model behind a pump whose scheduler runs one request at a time, again and again."""
    config = config_of(ITERATIVE + SUM % "", backend="python")
    async with playing(folder, config, python_model(folder, methods), decoupled=True) as play:
        bench = Bench(workers=0, scheduler=SequenceScheduler(oldest(max_batch_size=1, iterative=True)))
        play.pump = bench.pump
        bench.pump.add_worker(play.worker)
        yield bench, play


def asked(value: float) -> dict[str, Any]:
    """The fields of a request of a new sequence."""
    request = item(0, 0, value, start=True).request
    return {"inputs": request.inputs, "sequence_start": True}


@in_a_loop
async def test_a_pump_streams_the_responses_of_all_executions(tmp_path: Path) -> None:
    async with pumping(tmp_path, STREAM) as (bench, play):
        for key in (1, 2):
            bench.submit(key, **asked(3))
            await play.until(lambda: bench.requests.count == 0, "the end of the request")
        got = [(key, values(each.outputs), each.final) for key, each in bench.responses]
        sums = [{"y": [[101.0]]}, {"y": [[102.0]]}, {"y": [[103.0]]}]
        one, two = ([*((key, each, False) for each in sums), (key, {}, True)] for key in (1, 2))
        assert got == one + two
        assert bench.stats.success_count == 2


ENDLESS = STREAM.replace("if total % 100 < named", "time.sleep(0.005)\n        if True or total < named")


@in_a_loop
async def test_the_death_of_a_process_fails_a_request_once(tmp_path: Path) -> None:
    async with pumping(tmp_path, ENDLESS) as (bench, play):
        bench.submit(1, **asked(3))
        await play.until(lambda: len(bench.responses) > 5, "some responses")
        os.kill(play.worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: bench.requests.count == 0, "the end of the request")
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        assert [final for _, _, final in bench.answers].count(True) == 1
        assert bench.answers[-1][1:] == (ErrorCode.INTERNAL, True)
        bench.submit(2, **asked(3))
        await play.until(lambda: bench.answers[-1] == (2, "ok", False), "a response")
        assert values(next(each.outputs for key, each in bench.responses if key == 2)) == {"y": [[101.0]]}
        bench.pump.cancel(2)
        await play.until(lambda: bench.requests.count == 0, "the end of the request")


@in_a_loop
async def test_cancelled_requests_end_between_or_in_their_executions(tmp_path: Path) -> None:
    async with pumping(tmp_path, ENDLESS) as (bench, play):
        for key in range(1, 9):
            bench.submit(key, **asked(3))
            await play.until(lambda key=key: (key, "ok", False) in bench.answers, "a response")
            bench.pump.cancel(key)
            await play.until(lambda: bench.requests.count == 0, "the end of the request")
            assert bench.answers[-1] == (key, ErrorCode.CANCELLED, True)


# A DONE frame of the first batch that asks for another execution.
NONSENSE = """
def execute(self, requests):
    from halimede.backends.hosting import RESCHEDULED
    from halimede.workers.frames.answers import encode_done
    frame = encode_done(1, [RESCHEDULED], False, (1, 2, 3), {}, lambda _: None, lambda: (0, []))
    for number in os.listdir("/proc/self/fd"):
        if int(number) >= 512:
            os.write(int(number), frame)
    time.sleep(3600)
"""


@in_a_loop
async def test_a_process_cannot_ask_for_executions_that_are_not_configured(tmp_path: Path) -> None:
    async with playing(tmp_path, config_of("", backend="python"), python_model(tmp_path, NONSENSE)) as play:
        play.worker.execute([item(1, 0, start=True)])
        await play.until(lambda: play.heard(ResponseSent), "the end of the request")
        [(key, reply, final)] = sent(play)
        assert (key, final, play.heard(BatchDone)) == (1, True, [])
        assert "DONE: another execution, which the model is not configured to request" in str(reply)


SLOW = """
async def execute(self, requests):
    import asyncio
    (request,) = requests
    sum_in = pb.get_input_tensor_by_name(request, "sum_in").as_numpy()
    await asyncio.sleep(0.05)
    sender = request.get_response_sender()
    tensors = [pb.Tensor(name, sum_in + 1) for name in ("y", "sum")]
    sender.send(pb.InferenceResponse(tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@in_a_loop
async def test_a_batch_of_a_decoupled_coroutine_ends_with_its_state(tmp_path: Path) -> None:
    config = config_of(SUM % "", backend="python")
    async with playing(tmp_path, config, python_model(tmp_path, SLOW), decoupled=True) as play:
        for step in range(3):
            await play.batch(item(step, 0, start=step == 0))
        assert [each[1:] for each in sent(play)] == [({"y": [[step + 1.0]]}, True) for step in range(3)]
