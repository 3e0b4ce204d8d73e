"""Python models of sequences: controls, null rows, state, and requests that are executed again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from halimede.backends.hosting import RESCHEDULED, BatchReply, Runner
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse
from support.python_executions import FAILED, failure, imported
from support.python_models import FakeHost, body, sequence_runner_of, values
from support.sequences import CONTROLS, SUM, config_of, item, json_of

FP32 = DataType.FP32

ACCUMULATE = """
replies = []
for request in requests:
    named = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    total = named["x"] + named["sum_in"]
    if total < 0:
        replies.append(pb.InferenceResponse(error=pb.TritonError("negative")))
        continue
    replies.append(pb.InferenceResponse([pb.Tensor("y", total), pb.Tensor("sum", total)]))
    if total > 1000:
        raise ValueError("too much")
return replies
"""


def runner_of(folder: Path, code: str, batching: str, host: FakeHost | None = None, **how: Any) -> Runner:
    decoupled = how.pop("decoupled", False)
    config = json_of(config_of(batching, backend="python", **how))
    return sequence_runner_of(folder, code, config, host or FakeHost(), decoupled=decoupled)


def answers(replies: Sequence[BatchReply]) -> list[Any]:
    return [reply if reply is None or isinstance(reply, InferenceError) else values(reply) for reply in replies]


def test_a_python_model_sums_up_each_sequence(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, body(ACCUMULATE), SUM % "")
    assert answers(runner.execute([item(1, 0, 5, start=True), item(2, 1, 6, start=True)])) == [
        {"y": [[5.0]]},
        {"y": [[6.0]]},
    ]
    assert answers(runner.execute([item(3, 1, 1)])) == [{"y": [[7.0]]}]
    assert answers(runner.execute([item(4, 0, 1, end=True), item(5, 1, 1)])) == [{"y": [[6.0]]}, {"y": [[8.0]]}]
    assert answers(runner.execute([item(6, 0, 1, start=True), item(7, 1, 1, start=True)])) == [{"y": [[1.0]]}] * 2


def test_errors_leave_the_state_as_it_was(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, body(ACCUMULATE), "oldest { }" + SUM % "")
    runner.execute([item(1, 0, 5, start=True), item(2, 1, 6, start=True)])
    replies = runner.execute([item(3, 0, -9), item(4, 1, 1)])
    assert answers(replies) == [InferenceError(ErrorCode.INTERNAL, "negative"), {"y": [[7.0]]}]
    replies = runner.execute([item(5, 0, 1), item(6, 1, 2000)])
    assert answers(replies) == [failure("ValueError: too much")] * 2
    assert answers(runner.execute([item(7, 0, 1), item(8, 1, 1)])) == [{"y": [[6.0]]}, {"y": [[8.0]]}]


RECORD = "seen = []\n" + body(
    """
        for request in requests:
            row = {tensor.name(): tensor.as_numpy().tolist() for tensor in request.inputs()}
            seen.append((row, request.flags(), request.correlation_id()))
        return [pb.InferenceResponse([pb.Tensor("y", np.full((1, 1), at, np.float32))]) for at in range(len(requests))]
        """
)


def test_null_rows_are_requests_whose_responses_are_dropped(tmp_path: Path) -> None:
    host = FakeHost()
    runner = runner_of(tmp_path, RECORD, CONTROLS, host)
    replies = runner.execute([item(1, 1, 5, start=True, identity=3), item(2, 3, 6, end=True, identity=4)])
    null = {"x": [[5.0]], "START": [[0]], "END": [[-1.0]], "READY": [[False]], "ID": [[0]]}
    assert imported().seen == [
        (null, 0, 0),
        ({**null, "START": [[1]], "READY": [[True]], "ID": [[3]]}, 1, 3),
        (null, 0, 0),
        ({"x": [[6.0]], "START": [[0]], "END": [[2.5]], "READY": [[True]], "ID": [[4]]}, 2, 4),
    ]
    assert answers(replies) == [{"y": [[1.0]]}, {"y": [[3.0]]}], "in the order of the requests"
    assert host.answers == []


def test_a_model_that_writes_to_its_inputs_does_not_reach_other_rows(tmp_path: Path) -> None:
    code = body(
        """
        replies = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            x += 1
            replies.append(pb.InferenceResponse([pb.Tensor("y", x)]))
        return replies
        """
    )
    one = item(1, 1, 5, start=True)
    one.request.inputs[0].data = memoryview(bytearray(one.request.inputs[0].data))
    assert answers(runner_of(tmp_path, code, CONTROLS).execute([one])) == [{"y": [[6.0]]}]


def test_a_state_is_not_the_models_own_array(tmp_path: Path) -> None:
    code = "array = np.zeros((1, 1), np.float32)\n" + body(
        """
        before = pb.get_input_tensor_by_name(requests[0], "sum_in").as_numpy().copy()
        array[:] += 1
        return [pb.InferenceResponse([pb.Tensor("y", before), pb.Tensor("sum", array)])]
        """
    )
    runner = runner_of(tmp_path, code, SUM % "")
    runner.execute([item(1, 0, start=True)])
    imported().array[:] = 9
    assert answers(runner.execute([item(2, 0)])) == [{"y": [[1.0]]}]


def test_a_request_that_the_model_passes_on_is_as_the_client_sent_it(tmp_path: Path) -> None:
    host = FakeHost(infers=lambda _: [InferenceResponse("m", "1")])
    code = body("requests[1].exec(); return [pb.InferenceResponse([])] * 2")
    runner_of(tmp_path, code, CONTROLS + SUM % "", host).execute([item(1, 1, start=True)])
    [request] = host.inferred
    assert ([tensor.name for tensor in request.inputs], request.sequence_start) == (["x"], True)


SEND = """
for request in requests:
    sender = request.get_response_sender()
    total = float(pb.get_input_tensor_by_name(request, "sum_in").as_numpy()[0, 0])
    for _ in range(2):
        total += 1
        tensors = [pb.Tensor(name, np.array([[total]], np.float32)) for name in ("y", "sum")]
        sender.send(pb.InferenceResponse(tensors))
    sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_the_last_response_of_a_decoupled_model_is_the_state(tmp_path: Path) -> None:
    host = FakeHost()
    runner = runner_of(tmp_path, body(SEND), "oldest { }" + SUM % "", host, decoupled=True)
    assert runner.execute([item(1, 0, start=True)]) == [None]
    assert runner.execute([item(2, 0)]) == [None]
    sent = [(key, None if reply is None else values(reply), final) for key, reply, final in host.answers]
    assert sent == [
        (1, {"y": [[1.0]]}, False),
        (1, {"y": [[2.0]]}, False),
        (1, None, True),
        (2, {"y": [[3.0]]}, False),
        (2, {"y": [[4.0]]}, False),
        (2, None, True),
    ]


def test_a_response_with_an_invalid_state_ends_the_request(tmp_path: Path) -> None:
    code = SEND.replace("np.float32)) for", "np.int32)) for")
    host = FakeHost()
    runner = runner_of(tmp_path, body(code), "oldest { }" + SUM % "", host, decoupled=True)
    runner.execute([item(1, 0, start=True)])
    error = InferenceError(
        ErrorCode.INTERNAL,
        "state output 'sum': the model returned INT32, but the configuration says TYPE_FP32",
    )
    assert host.answers[0] == (1, error, True)


def test_a_state_that_is_an_output_is_sent(tmp_path: Path) -> None:
    shown = 'output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    runner = runner_of(tmp_path, body(ACCUMULATE), "oldest { }" + SUM % "", extra=shown)
    requests = [item(1, 0, 5, start=True), item(2, 1, 6, start=True, outputs=("y",))]
    assert answers(runner.execute(requests)) == [{"y": [[5.0]], "sum": [[5.0]]}, {"y": [[6.0]]}]
    assert answers(runner.execute([item(3, 1, 1)])) == [{"y": [[7.0]], "sum": [[7.0]]}]


def test_a_state_begins_with_the_contents_of_its_file(tmp_path: Path) -> None:
    state = SUM % 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "start.bin" }'
    folder = tmp_path / "m" / "initial_state"
    folder.mkdir(parents=True)
    (folder / "start.bin").write_bytes(bytes.fromhex("0000c842"))
    runner = runner_of(tmp_path, body(ACCUMULATE), state)
    assert answers(runner.execute([item(1, 0, 5, start=True)])) == [{"y": [[105.0]]}]
    (folder / "start.bin").unlink()
    with pytest.raises(InferenceError, match="the initial state of 'sum_in' cannot be read"):
        runner_of(tmp_path, body(ACCUMULATE), state)


def test_a_batch_of_coroutines_ends_after_them(tmp_path: Path) -> None:
    code = body(ACCUMULATE, "async def")
    runner = runner_of(tmp_path, code, SUM % "")
    assert (runner.is_async, runner.ends_late) == (True, True)
    for total in (5, 10):
        replies = asyncio.run(runner.execute_async([item(1, 1, 5, start=total == 5)]))
        assert answers(replies) == [{"y": [[total]]}]


ITERATIVE = "iterative_sequence: true "


def test_a_request_is_executed_until_it_has_a_response(tmp_path: Path) -> None:
    code = "kept = {}\n" + body(
        """
        replies = []
        for request in requests:
            key = request.correlation_id()
            kept[key] = kept.get(key, 0) + 1
            if kept[key] < pb.get_input_tensor_by_name(request, "x").as_numpy():
                request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                replies.append(None)
            else:
                replies.append(pb.InferenceResponse([pb.Tensor("y", np.array([[kept[key]]], np.float32))]))
        return replies
        """
    )
    runner = runner_of(tmp_path, code, ITERATIVE)
    assert (
        runner.execute([item(1, 0, 3, start=True, identity=1), item(2, 1, 1, start=True, identity=2)])[0] is RESCHEDULED
    )
    assert runner.execute([item(1, 0, 3, identity=1)]) == [RESCHEDULED]
    assert answers(runner.execute([item(1, 0, 3, identity=1)])) == [{"y": [[3.0]]}]


STREAM = """
for request in requests:
    sender = request.get_response_sender()
    senders.append(sender)
    total = pb.get_input_tensor_by_name(request, "sum_in").as_numpy() + 1
    sender.send(pb.InferenceResponse([pb.Tensor("y", total), pb.Tensor("sum", total)]))
    if total < 3:
        request.set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
    else:
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_request_has_one_sender_in_all_its_executions(tmp_path: Path) -> None:
    host = FakeHost()
    runner = runner_of(tmp_path, "senders = []\n" + body(STREAM), ITERATIVE + SUM % "", host, decoupled=True)
    replies = [runner.execute([item(1, 0, start=step == 0)])[0] for step in range(3)]
    assert replies == [RESCHEDULED, RESCHEDULED, None]
    assert [(None if reply is None else values(reply), final) for _, reply, final in host.answers] == [
        ({"y": [[1.0]]}, False),
        ({"y": [[2.0]]}, False),
        ({"y": [[3.0]]}, False),
        (None, True),
    ]
    assert len({id(sender) for sender in imported().senders}) == 1
    assert runner.execute([item(2, 0, start=True)]) == [RESCHEDULED]
    assert runner.execute([item(3, 0, start=True)]) == [RESCHEDULED], "the scheduler has ended the other one"
    assert len({id(sender) for sender in imported().senders}) == 3


def test_a_later_execution_that_fails_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    code = STREAM + "    if total == 2:\n        raise ValueError('odd')\n"
    runner = runner_of(tmp_path, "senders = []\n" + body(code), ITERATIVE + SUM % "", decoupled=True)
    assert runner.execute([item(1, 0, start=True)]) == [RESCHEDULED]
    assert runner.execute([item(1, 0)]) == [failure("ValueError: odd")]
    assert runner.execute([item(2, 0)]) == [failure("ValueError: odd")], "its state is again 1, not 2"


def test_a_request_with_its_last_response_is_not_executed_again(tmp_path: Path) -> None:
    code = STREAM.replace("if total < 3:", "sender.send(flags=1)\n    if True:")
    runner = runner_of(tmp_path, "senders = []\n" + body(code), ITERATIVE + SUM % "", decoupled=True)
    assert runner.execute([item(1, 0, start=True)]) == [None]


def test_a_request_that_is_executed_again_has_no_returned_response(tmp_path: Path) -> None:
    code = body(
        """
        requests[0].set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [pb.InferenceResponse([])]
        """
    )
    [reply] = runner_of(tmp_path, code, ITERATIVE).execute([item(1, 0, start=True)])
    assert isinstance(reply, InferenceError)
    assert reply.message.startswith(
        FAILED + "Expected a None object in the execute function return list for reschduled request, found type"
    )


@pytest.mark.parametrize("decoupled", [False, True])
def test_models_that_are_not_iterative_cannot_reschedule(tmp_path: Path, decoupled: bool) -> None:
    code = body(
        f"""
        requests[0].set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return {None if decoupled else [None]}
        """
    )
    replies = runner_of(tmp_path, code, "", decoupled=decoupled).execute([item(1, 0, start=True)])
    text = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to"
    assert replies == [failure(f"{text} handle such a flag.")]
