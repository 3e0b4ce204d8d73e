"""Batches of models of sequences on an instance: ONNX models and backends of tests, without a process."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from halimede.backends.api import ExecuteRequest, Instance, RefusedRequestsError, RunContext
from halimede.backends.sequence_runner import SequenceHost, SequenceRunner
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.workers.host.backend_runner import DecoupledRunner
from halimede.workers.instance import InstanceRunner, Ran
from halimede.workers.states import HeldStates
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import BatchDone
from support.onnx_models import BACKEND, CPU, model, source
from support.onnx_models import tensor as info
from support.python_models import FakeHost
from support.python_models import values as python_values
from support.refusals import error_of
from support.sequences import CONTROLS, SUM, config_of, item, plan_of, sequences_of, tensor, values

FP32, BYTES = DataType.FP32, DataType.BYTES
OLDEST = "oldest { }"


def runner_of(
    folder: Path, proto: onnx.ModelProto, config: ModelConfig, files: Mapping[str, bytes] | None = None
) -> InstanceRunner:
    instance = BACKEND.load(config, source(folder, proto)).create_instance(CPU)
    return InstanceRunner("m_0", config, instance, state_files=files)


def answers(ran: Ran) -> list[Any]:
    return [values(reply) if isinstance(reply, list) else reply for reply in ran.replies]


def accumulator(shape: Sequence[Any] = ("n", 1)) -> onnx.ModelProto:
    """y = sum = sum_in + x."""
    return model(
        [helper.make_node("Add", ["sum_in", "x"], ["sum"]), helper.make_node("Identity", ["sum"], ["y"])],
        [info("x", FP32, shape), info("sum_in", FP32, shape)],
        [info("y", FP32, shape), info("sum", FP32, shape)],
    )


def delay(kind: DataType, state: Sequence[Any], shape: Sequence[Any] | None = None) -> onnx.ModelProto:
    """y = s, t = x: each answer is the input of the request before."""
    return model(
        [helper.make_node("Identity", ["s"], ["y"]), helper.make_node("Identity", ["x"], ["t"])],
        [info("x", kind, shape or state), info("s", kind, state)],
        [info("y", kind, state), info("t", kind, shape or state)],
    )


DELAY = 'state { input_name: "s" output_name: "t" data_type: %s dims: [ %s ] %s }'


def test_an_onnx_model_sums_up_each_sequence(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, accumulator(), config_of(OLDEST + SUM % ""))
    rng = np.random.default_rng(1)
    sums = dict.fromkeys(range(4), 0.0)
    for step in range(12):
        sequence_slots = [int(sequence_slot) for sequence_slot in rng.permutation(4)[: rng.integers(1, 5)]]
        starts = [step == 0 or bool(rng.integers(4) == 0) for _ in sequence_slots]
        ran = runner.run(
            [
                item(at, sequence_slot, step, start=start)
                for at, (sequence_slot, start) in enumerate(zip(sequence_slots, starts, strict=True))
            ]
        )
        for sequence_slot, start in zip(sequence_slots, starts, strict=True):
            sums[sequence_slot] = step if start else sums[sequence_slot] + step
        assert answers(ran) == [{"y": [[sums[sequence_slot]]]} for sequence_slot in sequence_slots], (
            "as if each had run alone"
        )


def test_a_sequence_ends_and_its_slot_begins_with_zeros(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, accumulator(), config_of(SUM % ""))
    for start, end, expected in ((True, False, 5.0), (False, True, 10.0), (True, False, 5.0), (True, False, 5.0)):
        assert answers(runner.run([item(1, 0, 5, start=start, end=end)])) == [{"y": [[expected]]}]


def test_null_rows_run_and_are_not_answered(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, accumulator(), config_of(SUM % ""))
    runner.run([item(1, 0, 1, start=True), item(2, 2, 2, start=True)])
    assert answers(runner.run([item(3, 2, 10)])) == [{"y": [[12.0]]}]
    assert answers(runner.run([item(4, 0, 10), item(5, 2, 10)])) == [{"y": [[11.0]]}, {"y": [[22.0]]}]


def test_an_onnx_model_gets_controls(tmp_path: Path) -> None:
    """y has the four controls beside each other."""
    kinds = {"START": DataType.INT32, "END": FP32, "READY": DataType.BOOL, "ID": DataType.UINT64}
    casts = [helper.make_node("Cast", [name], [f"{name}f"], to=onnx.TensorProto.FLOAT) for name in kinds]
    joined = helper.make_node("Concat", [f"{name}f" for name in kinds] + ["x"], ["y"], axis=1)
    proto = model(
        [*casts, joined],
        [info("x", FP32, ("n", "d")), *(info(name, kind, ("n", 1)) for name, kind in kinds.items())],
        [info("y", FP32, ("n", "d"))],
    )
    runner = runner_of(tmp_path, proto, config_of(CONTROLS, dims="-1"))
    ran = runner.run([item(1, 0, 8, start=True, identity=3), item(2, 1, 9, end=True, identity=4)])
    assert answers(ran) == [{"y": [[1, -1, 1, 3, 8]]}, {"y": [[0, 2.5, 1, 4, 9]]}]


@pytest.mark.parametrize("one_buffer", [False, True], ids=["array", "buffer"])
@pytest.mark.parametrize(
    "kind", [each for each in DataType if each is not DataType.INVALID], ids=lambda each: each.name
)
def test_an_onnx_state_of_every_datatype(tmp_path: Path, kind: DataType, one_buffer: bool) -> None:
    extra = "use_same_buffer_for_input_output: true" if one_buffer else ""
    config = config_of(DELAY % (kind.config_name, "2", extra), kind=kind.name, dims="2")
    runner = runner_of(tmp_path, delay(kind, ("n", 2)), config)
    one, two = (["a", "größe"], ["", "b"]) if kind is BYTES else ([1, 0], [0, 1])
    first = [[b"", b""]] if kind is BYTES else [[0, 0]]
    assert answers(runner.run([item(1, 0, one, start=True, kind=kind)])) == [{"y": first}]
    expected = tensor("y", kind, [one]).array().tolist()
    assert answers(runner.run([item(2, 0, two, kind=kind)])) == [{"y": expected}]
    assert answers(runner.run([item(3, 0, two, kind=kind)])) == [{"y": tensor("y", kind, [two]).array().tolist()}]


def test_states_of_different_shapes_in_one_batch(tmp_path: Path) -> None:
    config = config_of(DELAY % ("TYPE_FP32", "-1", "") + OLDEST, dims="-1")
    runner = runner_of(tmp_path, delay(FP32, ("n", "d"), ("n", "e")), config)
    for sequence_slot, value in ((0, [1]), (1, [2, 3]), (2, [4])):
        runner.run([item(1, sequence_slot, value, start=True)])
    ran = runner.run([item(1, 0, [9]), item(2, 1, [9]), item(3, 2, [9])])
    assert answers(ran) == [{"y": [[1]]}, {"y": [[2, 3]]}, {"y": [[4]]}]


def test_states_of_different_shapes_keep_their_rows(tmp_path: Path) -> None:
    config = config_of(DELAY % ("TYPE_FP32", "-1", ""), dims="-1")
    runner = runner_of(tmp_path, delay(FP32, ("n", "d"), ("n", "e")), config)
    runner.run([item(1, 0, [1], start=True)])
    runner.run([item(2, 1, [2, 3], start=True)])
    assert answers(runner.run([item(3, 0, [9]), item(4, 1, [9])])) == [{"y": [[1]]}, {"y": [[2, 3]]}]


def test_a_state_that_is_an_output_is_sent(tmp_path: Path) -> None:
    shown = 'output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    runner = runner_of(tmp_path, accumulator(), config_of(SUM % "", extra=shown))
    ran = runner.run([item(1, 0, 5, start=True), item(2, 1, 6, start=True, outputs=("y",))])
    assert answers(ran) == [{"y": [[5.0]], "sum": [[5.0]]}, {"y": [[6.0]]}]
    ran = runner.run([item(3, 0, 5, outputs=("sum",)), item(4, 1, 6, outputs=("y",))])
    assert answers(ran) == [{"sum": [[10.0]]}, {"y": [[12.0]]}]


def test_a_model_without_the_tensors_of_its_configuration_is_refused(tmp_path: Path) -> None:
    wrong = 'state { input_name: "s" output_name: "t" data_type: TYPE_INT32 dims: [ 1, 2 ] }'
    message = error_of(runner_of, tmp_path, accumulator(), config_of(CONTROLS + wrong)).message
    assert "configuration expects 6 inputs, model provides 2" in message
    for name in ("START", "ID", "s"):
        assert f"unexpected inference input '{name}', allowed inputs are: x, sum_in" in message
    assert "unexpected inference output 't', allowed outputs are: y, sum" in message
    wrong = 'state { input_name: "sum_in" output_name: "sum" data_type: TYPE_INT32 dims: [ 1, 2 ] }'
    error = error_of(runner_of, tmp_path, accumulator(), config_of(wrong))
    assert "configuration expects datatype TYPE_INT32 for input 'sum_in', model provides TYPE_FP32" in str(error)
    assert "tensor 'sum': the model expects 2 dimensions" in str(error)


def test_a_request_that_is_refused_leaves_the_rows_of_others(tmp_path: Path) -> None:
    """ONNX Runtime takes no strings that are not UTF-8."""
    config = config_of(DELAY % ("TYPE_STRING", "1", ""), kind="BYTES")
    runner = runner_of(tmp_path, delay(BYTES, ("n", 1)), config)
    runner.run([item(1, 0, "a", start=True, kind=BYTES), item(2, 1, "b", start=True, kind=BYTES)])
    ran = runner.run([item(3, 0, b"\xff", kind=BYTES), item(4, 1, "c", kind=BYTES)])
    assert ran.replies[0] == InferenceError(
        ErrorCode.INVALID_ARG,
        "input 'x': an element is not UTF-8 text (invalid start byte at its byte 0), and ONNX Runtime takes no other "
        "strings",
    )
    assert answers(ran)[1] == {"y": [[b"b"]]}
    ran = runner.run([item(5, 0, "d", kind=BYTES), item(6, 1, "e", kind=BYTES)])
    assert answers(ran) == [{"y": [[b"a"]]}, {"y": [[b"c"]]}], "the refused request did not change its state"
    ran = runner.run([item(7, 0, b"\xff", kind=BYTES), item(8, 1, b"\xff", kind=BYTES)])
    assert [type(reply) for reply in ran.replies] == [InferenceError] * 2
    assert ran.failed


class Rows:
    """A TensorInstance that records its inputs and computes with `compute`."""

    def __init__(self, compute: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self._compute = compute

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str], context: RunContext) -> Mapping[str, Any]:
        self.seen.append({name: array.tolist() for name, array in inputs.items()})
        self.outputs, self.rows = outputs, context.rows
        return dict(self._compute(inputs))

    def close(self) -> None:
        """Nothing to free."""


def summed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if (inputs["x"] < 0).any():
        raise ValueError("negative")
    total = inputs["x"] + inputs["sum_in"]
    return {"y": total, "sum": total}


def test_a_failed_execution_keeps_all_states() -> None:
    runner = InstanceRunner("m_0", config_of(OLDEST + SUM % ""), Rows(summed))
    runner.run([item(1, 0, 5, start=True), item(2, 1, 6, start=True)])
    failed = runner.run([item(3, 0, 1), item(4, 1, -1)])
    assert failed.failed
    assert [reply.code for reply in failed.replies if isinstance(reply, InferenceError)] == [ErrorCode.INTERNAL] * 2
    assert answers(runner.run([item(5, 0, 1), item(6, 1, 1)])) == [{"y": [[6.0]]}, {"y": [[7.0]]}]


def test_a_start_that_fails_leaves_the_state_of_a_new_sequence() -> None:
    runner = InstanceRunner("m_0", config_of(SUM % ""), Rows(summed))
    runner.run([item(1, 0, 5, start=True)])
    runner.run([item(2, 0, -1, start=True)])
    assert answers(runner.run([item(3, 0, 1)])) == [{"y": [[1.0]]}]


def test_a_padded_batch_of_sequences_is_executed_in_groups() -> None:
    padding = 'parameters { key: "PADDING" value { string_value: \'[{"input": "x", "axis": 1}]\' } }'
    shapes: list[tuple[int, ...]] = []

    class Counting:
        """A TensorInstance."""

        def run(self, inputs: Mapping[str, Any], outputs: object, context: object) -> Mapping[str, Any]:
            shapes.append(inputs["x"].shape)
            return {"y": inputs["sum_in"] + 1, "sum": inputs["sum_in"] + 1}

    runner = InstanceRunner("m_0", config_of(OLDEST + SUM % "", dims="-1", extra=padding), Counting())
    long, short, other = [item(at, at, start=True) for at in range(3)]
    long.request.inputs[0] = Tensor("x", DataType.FP32, (1, 9 << 20), bytes(36 << 20))
    for total in (1.0, 2.0):
        assert answers(runner.run([long, short, other])) == [{"y": [[total]]}] * 3
        for each in (long, short, other):
            each.request.sequence_start = False
    assert shapes == [(2, 1), (1, 9 << 20)] * 2


def test_null_rows_are_not_padded_to_the_length_of_a_long_request() -> None:
    padding = 'parameters { key: "PADDING" value { string_value: \'[{"input": "x", "axis": 1}]\' } }'
    rows = Rows(lambda inputs: {"y": np.zeros((len(inputs["x"]), inputs["x"].shape[1] // (1 << 20)), np.float32)})
    runner = InstanceRunner("m_0", config_of(CONTROLS, rows=16, dims="-1", extra=padding), rows)
    long, short = item(1, 0, start=True, identity=3), item(2, 9, start=True, identity=4)
    long.request.inputs[0] = Tensor("x", DataType.FP32, (1, 2 << 20), bytes(8 << 20))

    assert answers(runner.run([long, short])) == [{"y": [[0.0, 0.0]]}, {"y": [[]]}]


def test_states_are_computed_though_clients_do_not_ask_for_them() -> None:
    rows = Rows(summed)
    InstanceRunner("m_0", config_of(SUM % ""), rows).run([item(1, 0, 5, start=True, outputs=("y",))])
    assert rows.outputs == ("y", "sum")


def test_a_model_of_arrays_sees_null_rows() -> None:
    rows = Rows(summed)
    runner = InstanceRunner("m_0", config_of(CONTROLS + SUM % ""), rows)
    runner.run([item(1, 2, 5, start=True, identity=3)])
    [seen] = rows.seen
    assert seen == {
        "x": [[5], [5], [5]],
        "START": [[0], [0], [1]],
        "END": [[-1], [-1], [-1]],
        "READY": [[False], [False], [True]],
        "ID": [[0], [0], [3]],
        "sum_in": [[0], [0], [0]],
    }
    assert rows.rows == [1, 1, 1]


def test_an_array_that_a_model_returns_again_is_not_a_state() -> None:
    """The input of one request would otherwise be kept with the memory of its whole batch."""
    runner = InstanceRunner(
        "m_0", config_of(DELAY % ("TYPE_FP32", "1", "")), Rows(lambda inputs: {"y": inputs["s"], "t": inputs["x"]})
    )
    one = item(1, 0, 5, start=True)
    memory = bytearray(one.request.inputs[0].data)
    one.request.inputs[0].data = memoryview(memory)
    runner.run([one])
    memory[:] = bytes(4)
    assert answers(runner.run([item(2, 0, 6)])) == [{"y": [[5.0]]}]


def test_a_state_of_one_row_is_not_copied_and_one_of_several_is() -> None:
    """A slice would keep the memory of its whole batch alive."""
    given: list[int] = []
    made: list[Any] = []

    def compute(inputs: Mapping[str, Any]) -> dict[str, Any]:
        given.append(inputs["s"].ctypes.data)
        made.append(inputs["x"] + 1)
        return {"y": inputs["s"], "t": made[-1]}

    runner = InstanceRunner("m_0", config_of(OLDEST + DELAY % ("TYPE_FP32", "1", "")), Rows(compute))
    runner.run([item(1, 0, 5, start=True)])
    runner.run([item(2, 0, 6)])
    assert given[1] == made[0].ctypes.data
    runner.run([item(3, 0, 5), item(4, 1, 5, start=True)])
    assert answers(runner.run([item(5, 0, 7)])) == [{"y": [[6.0]]}]
    assert given[3] != made[2].ctypes.data


def test_the_memory_of_an_onnx_state_is_kept(tmp_path: Path) -> None:
    shown = 'output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    config = config_of(SUM % "", extra=shown)
    [reply] = runner_of(tmp_path, accumulator(), config).run([item(1, 0, 5, start=True)]).replies
    assert isinstance(reply, list)
    sequences = sequences_of(config)
    (row,) = sequences.begin([item(1, 0, start=True)])
    row.take(reply)
    row.end(is_last=True)
    (row,) = sequences.begin([item(2, 0)])
    assert row.request.inputs[-1].data is reply[1].data


def test_a_worker_on_a_thread_begins_with_the_contents_of_a_file(tmp_path: Path) -> None:
    initial = 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "f" }'
    config = config_of(SUM % initial)
    loaded = BACKEND.load(config, source(tmp_path, accumulator()))

    async def scenario() -> list[BatchDone]:
        events: asyncio.Queue[Any] = asyncio.Queue()
        files = {"sum_in": bytes.fromhex("0000c842")}
        loop = asyncio.get_running_loop()
        worker = await ThreadWorker(CPU, loaded, config, events.put_nowait, loop, files, states=HeldStates()).start()
        done = []
        for start in (True, False):
            worker.execute([item(1, 0, 5, start=start)])
            done.append(await events.get())
        await worker.stop()
        return done

    replies = [done.replies[0] for done in asyncio.run(scenario())]
    assert [values(reply) for reply in replies if isinstance(reply, list)] == [{"y": [[105.0]]}, {"y": [[110.0]]}]


def test_a_text_as_id_of_a_number_fails_alone() -> None:
    runner = InstanceRunner("m_0", config_of(CONTROLS + SUM % "" + OLDEST), Rows(summed))
    ran = runner.run([item(1, 0, 5, start=True, identity="a"), item(2, 1, 6, start=True)])
    assert answers(ran)[1] == {"y": [[6.0]]}
    assert isinstance(ran.replies[0], InferenceError)
    ran = runner.run([item(3, 0, 5, start=True, identity="a")])
    assert ran.failed
    assert isinstance(ran.replies[0], InferenceError)


def test_a_refusal_of_null_rows_alone_fails_the_batch() -> None:
    def refuse(inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise RefusedRequestsError({0: InferenceError(ErrorCode.INVALID_ARG, "odd")})

    ran = InstanceRunner("m_0", config_of(SUM % ""), Rows(refuse)).run([item(1, 1, 5, start=True)])
    assert ran.failed
    assert ran.replies == [
        InferenceError(
            ErrorCode.INTERNAL,
            "instance 'm_0' refused no request of the batch: 1 requests of the batch have unusable inputs",
        )
    ]


class Requests:
    """A RequestInstance."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        self.seen = [(sorted(request.inputs), request.outputs, request.is_cancelled()) for request in requests]
        for request in requests:
            total = request.inputs["x"].array() + request.inputs["sum_in"].array()
            if total < 0:
                request.fail(InferenceError(ErrorCode.UNAVAILABLE, "negative"))
            else:
                request.respond([tensor("y", FP32, total), tensor("sum", FP32, total)])

    def close(self) -> None:
        """Nothing to free."""


def test_a_backend_that_sees_requests_sees_rows() -> None:
    instance: Instance = Requests()
    runner = InstanceRunner("m_0", config_of(SUM % ""), instance)
    ran = runner.run([item(1, 1, 5, start=True)])
    assert answers(ran) == [{"y": [[5.0]]}]
    assert instance.seen == [(["sum_in", "x"], ("y", "sum"), True), (["sum_in", "x"], ("y", "sum"), False)]
    ran = runner.run([item(2, 0, 1, start=True), item(3, 1, -9)])
    assert answers(ran) == [{"y": [[1.0]]}, InferenceError(ErrorCode.UNAVAILABLE, "negative")]
    assert answers(runner.run([item(4, 1, 1)])) == [{"y": [[6.0]]}]


class Several:
    """A RequestInstance that sends two responses to each request."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        for request in requests:
            for at in (1, 2):
                total = request.inputs["x"].array() * at + request.inputs["sum_in"].array()
                request.respond([tensor("y", FP32, total), tensor("sum", FP32, total)], final=at == 2)

    def close(self) -> None:
        """Nothing to free."""


def test_a_decoupled_backend_keeps_the_state_of_its_last_response() -> None:
    config, host = config_of(SUM % ""), FakeHost()
    hosted = DecoupledRunner("m_0", Several(), lambda: None, SequenceHost(host), config)
    runner = SequenceRunner(hosted, plan_of(config), "m", {}, host.states)
    for start in (True, False):
        assert runner.execute([item(1, 1, 5, start=start)]) == [None]
    answered = [answer for answer in host.answers if answer[0] == 1]
    assert [(python_values(reply), final) for _, reply, final in answered] == [
        ({"y": [[5.0]]}, False),
        ({"y": [[10.0]]}, True),
        ({"y": [[15.0]]}, False),
        ({"y": [[20.0]]}, True),
    ]


def test_a_decoupled_request_whose_state_is_refused_ends_its_sequence() -> None:
    config, host = config_of(SUM % ""), FakeHost(states=HeldStates(3))
    hosted = DecoupledRunner("m_0", Several(), lambda: None, SequenceHost(host), config)
    runner = SequenceRunner(hosted, plan_of(config), "m", {}, host.states)
    assert runner.execute([item(1, 0, 5, start=True)]) == [None]
    _, error, final = host.answers[0]
    assert isinstance(error, InferenceError)
    assert (error.code, final) == (ErrorCode.UNAVAILABLE, True)
    assert runner.execute([item(2, 0, 5)]) == [error]
    assert runner.execute([item(3, 0, 5, start=True)]) == [None]
    assert host.states.account.held_bytes == 0
