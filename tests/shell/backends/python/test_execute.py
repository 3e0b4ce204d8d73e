"""The responses that a batch's requests get for each behaviour of the model."""

import asyncio
import contextlib
import weakref
from pathlib import Path

import numpy as np
import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceResponse, Tensor
from support.python_executions import FAILED, failure, imported
from support.python_models import FakeHost, asked, body, fp32, runner_of, values

ECHO = 'return [pb.InferenceResponse([pb.Tensor("OUT", pb.get_input_tensor_by_name(r, "IN").as_numpy())]) for r in requests]'


def test_each_request_gets_its_own_response_in_order(tmp_path):
    replies = runner_of(tmp_path, body(ECHO)).execute([asked(5), asked(7)])
    assert [values(reply) for reply in replies] == [{"OUT": [[1.0, 5.0]]}, {"OUT": [[1.0, 7.0]]}]


def test_output_is_sent_from_the_models_own_memory(tmp_path):
    memory = bytearray(16)
    request = asked(0, Tensor("IN", DataType.FP32, (1, 4), memoryview(memory)))
    [reply] = runner_of(tmp_path, body(ECHO)).execute([request])
    memory[:4] = np.float32(3).tobytes()
    assert values(reply) == {"OUT": [[3.0, 0.0, 0.0, 0.0]]}


def test_only_requested_outputs_are_sent_in_the_models_order(tmp_path):
    runner = runner_of(
        tmp_path,
        body(
            """
            one = np.ones(1, np.float32)
            return [pb.InferenceResponse([pb.Tensor(n, one) for n in ("MORE", "NOT_CONFIGURED", "OUT")]) for r in requests]
            """
        ),
    )
    replies = runner.execute([asked(), asked(outputs=("OUT", "MORE")), asked(outputs=("OUT",))])
    assert [list(values(reply)) for reply in replies] == [["MORE", "OUT"], ["MORE", "OUT"], ["OUT"]]


TWO_NAMES = """
one = np.ones(1, np.float32)
return [pb.InferenceResponse([pb.Tensor(n, one) for n in ("OTU", "OUT")]) for r in requests]
"""
UNKNOWN = "unexpected inference output 'OTU'; the model has OUT, MORE"


def test_undeclared_output_is_dropped_with_one_warning(tmp_path):
    host = FakeHost()
    runner = runner_of(tmp_path, body(TWO_NAMES), host)
    for _ in range(2):
        replies = runner.execute([asked(), asked(outputs=("OUT",))])
        assert [list(values(reply)) for reply in replies] == [["OUT"], ["OUT"]]
    assert host.logs == [("WARNING", f"{UNKNOWN}: it is left out of the answer")]


def test_unrequested_output_is_dropped_without_warning(tmp_path):
    host = FakeHost()
    runner = runner_of(tmp_path, body(TWO_NAMES.replace("OTU", "MORE")), host)
    assert [list(values(reply)) for reply in runner.execute([asked(outputs=("OUT",))])] == [["OUT"]]
    assert host.logs == []


@pytest.mark.parametrize("way", ["returned", "sent"])
def test_strict_outputs_refuse_an_unknown_name(tmp_path, way):
    host = FakeHost()
    code = TWO_NAMES
    if way == "sent":
        code = """
        one = np.ones(1, np.float32)
        requests[0].get_response_sender().send(pb.InferenceResponse([pb.Tensor("OTU", one)]))
        """
    strict = {"STRICT_OUTPUTS": {"string_value": "True"}}
    replies = runner_of(tmp_path, body(code), host, parameters=strict).execute([asked()])
    sent = replies if way == "returned" else [reply for _, reply, _ in host.answers]
    assert sent == [InferenceError(ErrorCode.INTERNAL, UNKNOWN)]
    assert host.logs == []


FAILED_CALL = """
answer = pb.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[]).exec()
{read}
"""


@pytest.mark.parametrize(
    ("read", "cause"),
    [
        (
            "pb.get_output_tensor_by_name(answer, 'OUT').as_numpy()",
            "AttributeError: 'NoneType' object has no attribute",
        ),
        ("answer.output_tensors()[0].as_numpy()", "IndexError: list index out of range"),
    ],
)
@pytest.mark.parametrize("how", ["def", "async def"])
def test_error_of_an_unchecked_answer_is_reported(tmp_path, read, cause, how):
    lost = InferenceResponse("other", "1", error=InferenceError(ErrorCode.UNAVAILABLE, "no more room"))
    host = FakeHost(infers=lambda _: [lost])
    runner = runner_of(tmp_path, body(FAILED_CALL.format(read=read), how), host)
    [reply] = runner.execute([asked()]) if how == "def" else asyncio.run(runner.execute_async([asked()]))
    assert reply.message.startswith(FAILED + cause)
    assert reply.message.endswith("; the model read outputs of a response that is an error: no more room")
    [(_, line)] = host.logs
    assert line.endswith("the model read outputs of a response that is an error: no more room")


def test_error_of_an_earlier_batch_is_not_reported(tmp_path):
    lost = InferenceResponse("other", "1", error=InferenceError(ErrorCode.UNAVAILABLE, "no more room"))
    code = """
        if len(requests) == 1:
            answer = pb.InferenceRequest(model_name="other", requested_output_names=["OUT"], inputs=[]).exec()
            assert pb.get_output_tensor_by_name(answer, "OUT") is None
            return [pb.InferenceResponse([])]
        raise ValueError("boom")
        """
    runner = runner_of(tmp_path, body(code), FakeHost(infers=lambda _: [lost]))
    runner.execute([asked()])
    assert runner.execute([asked(), asked()]) == [failure("ValueError: boom")] * 2


@pytest.mark.parametrize("is_relative", [False, True])
def test_traceback_begins_with_the_models_own_frames(tmp_path, is_relative):
    host = FakeHost()
    with contextlib.chdir(tmp_path):
        folder = Path() if is_relative else tmp_path
        runner_of(folder, body("raise ValueError('boom')"), host).execute([asked()])
    [(_, line)] = host.logs
    frames = [each for each in line.splitlines() if each.startswith("  File")]
    assert [each.split(",")[0] for each in frames] == [f'  File "{tmp_path}/m/1/model.py"']


def test_parameters_go_with_the_outputs(tmp_path):
    code = body('return [pb.InferenceResponse([], parameters={"a": 1, "b": "x", "c": True})]')
    [reply] = runner_of(tmp_path, code).execute([asked()])
    assert reply.parameters == {"a": 1, "b": "x", "c": True}


def test_error_response_fails_only_its_own_request(tmp_path):
    code = body(
        """
        ones = pb.Tensor("OUT", np.ones(1, np.float32))
        return [pb.InferenceResponse([ones], error=pb.TritonError("no such row", pb.TritonError.NOT_FOUND)),
                pb.InferenceResponse([ones])]
        """
    )
    first, second = runner_of(tmp_path, code).execute([asked(), asked()])
    assert first == InferenceError(ErrorCode.NOT_FOUND, "no such row")
    assert values(second) == {"OUT": [1.0]}


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("raise ValueError('boom')", "ValueError: boom"),
        ("raise ValueError", "ValueError"),
        ("raise MemoryError('8 TiB')", "MemoryError: 8 TiB"),
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("raise StopIteration(1)", "StopIteration: 1"),
        ("raise pb.TritonModelException('no')", "TritonModelException: no"),
        ("raise ValueError('y' * 2000)", "ValueError: " + "y" * 1009 + "..."),
        ("open(__file__ + 'x')", "FileNotFoundError: [Errno 2] No such file or directory: 'model.pyx'"),
        ("f = lambda: f(); f()", "RecursionError: maximum recursion depth exceeded"),
        ("return (1,)", "Expected a list in the execute return, found type '<class 'tuple'>': execute must return a list of responses, one for each request."),
        ("pass", "Expected a list in the execute return, found type '<class 'NoneType'>': execute must return a list of responses, one for each request."),
        (
            "return [pb.InferenceResponse([])]",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1",
        ),
        (
            "return [pb.InferenceResponse([]), 'x']",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        ("return [pb.InferenceResponse(None)] * 2", "TypeError: InferenceResponse(): 'output_tensors' must be a list of Tensor, not NoneType"),
    ],
)  # fmt: skip
def test_exception_fails_the_batch_and_the_next_one_runs(tmp_path, line, text):
    runner = runner_of(tmp_path, body(f"if len(requests) == 1:\n    {ECHO}\n{line}"))
    first, second = runner.execute([asked(), asked()])
    # A RecursionError's text goes on with what was called, in some Pythons.
    assert first == failure(text) or ("Recursion" in text and first.message.startswith(FAILED + text))
    assert second == first
    assert values(runner.execute([asked(2)])[0]) == {"OUT": [[1.0, 2.0]]}


def test_the_log_has_the_traceback_of_a_failed_batch(tmp_path):
    host = FakeHost()
    runner_of(tmp_path, body("raise ValueError('boom')"), host).execute([asked()])
    [(level, line)] = host.logs
    assert level == "ERROR"
    assert "execute failed: Traceback" in line
    assert "line 6, in execute" in line


def test_a_failed_batch_frees_the_memory_of_its_requests(tmp_path):
    class Memory(bytearray):
        """Plain memory that can be watched."""

    for how, line in (
        ("def", "raise ValueError('boom')"),
        ("async def", "raise ValueError('boom')"),
        ("def", "return 1"),
    ):
        memory = Memory(8)
        alive = weakref.ref(memory)
        request = asked(0, Tensor("IN", DataType.FP32, (1, 2), memoryview(memory)))
        runner = runner_of(tmp_path, body("kept = requests[0].inputs()[0].as_numpy()\n" + line, how))
        errors = asyncio.run(runner.execute_async([request])) if runner.is_async else runner.execute([request])
        del memory, request
        assert len(errors) == 1
        assert alive() is None


def test_raised_triton_error_keeps_its_code(tmp_path):
    code = body("raise pb.TritonError('try later', pb.TritonError.UNAVAILABLE)")
    assert runner_of(tmp_path, code).execute([asked()]) == [failure("TritonError: try later", ErrorCode.UNAVAILABLE)]


def test_model_may_modify_the_request_list(tmp_path):
    code = body("n = len(requests); requests.clear(); raise ValueError(n)")
    assert runner_of(tmp_path, code).execute([asked(), asked()]) == [failure("ValueError: 2")] * 2


def test_none_without_a_sender_fails_the_request(tmp_path):
    host = FakeHost()
    runner = runner_of(
        tmp_path, "kept = []\n" + body("kept.extend(requests); return [pb.InferenceResponse([]), None]"), host
    )
    answer, error = runner.execute([asked(), asked()])
    assert values(answer) == {}
    assert "never asked for" in error.message
    model = imported()
    with pytest.raises(model.pb.TritonModelException, match="more than one response"):
        model.kept[1].get_response_sender().send(model.pb.InferenceResponse([]), 1)
    assert host.answers == []


def test_rescheduling_a_request_is_refused(tmp_path):
    code = body("requests[0].set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\nreturn [None]")
    [error] = runner_of(tmp_path, code).execute([asked()])
    assert "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE" in error.message


ASYNC = "import asyncio\n"


def test_a_coroutine_is_awaited(tmp_path):
    runner = runner_of(tmp_path, ASYNC + body("await asyncio.sleep(0)\n" + ECHO, "async def"))
    assert runner.is_async
    assert values(asyncio.run(runner.execute_async([asked(6)]))[0]) == {"OUT": [[1.0, 6.0]]}


def test_decorated_coroutine_function_is_recognized(tmp_path):
    code = (
        "import functools\ndef timed(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
    )
    runner = runner_of(tmp_path, code + body(ECHO, "@timed\n    async def"))
    assert runner.is_async
    assert values(asyncio.run(runner.execute_async([asked(6)]))[0]) == {"OUT": [[1.0, 6.0]]}


def test_coroutine_returned_by_a_plain_function_is_awaited(tmp_path):
    code = "async def work(requests): " + ECHO + "\n" + body("return work(requests)")
    runner = runner_of(tmp_path, code)
    assert not runner.is_async
    assert values(runner.execute([asked(6)])[0]) == {"OUT": [[1.0, 6.0]]}


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "raise asyncio.CancelledError(3)", "raise KeyError(3)"])
def test_exception_of_a_coroutine_is_the_error_of_its_batch(tmp_path, line):
    runner = runner_of(tmp_path, ASYNC + body("await asyncio.sleep(0)\n" + line, "async def"))
    name = line[6:-3].removeprefix("asyncio.")
    assert asyncio.run(runner.execute_async([asked(), asked()])) == [failure(f"{name}: 3")] * 2


def test_batches_of_a_decoupled_coroutine_overlap(tmp_path):
    code = ASYNC + body(
        """
        global both, waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 10)
        for r in requests:
            r.get_response_sender().send(flags=1)
        """,
        "async def",
    )
    host = FakeHost()
    runner = runner_of(tmp_path, "waiting, both = 0, None\n" + code, host, decoupled=True)

    async def two() -> list:
        imported().both = asyncio.Event()
        return await asyncio.gather(runner.execute_async([asked(1)]), runner.execute_async([asked(2)]))

    assert asyncio.run(two()) == [[None], [None]]
    assert sorted(key for key, _, _ in host.answers) == [1, 2]


@pytest.mark.parametrize(
    ("how", "line", "ready"),
    [("def", "return True", True), ("async def", "return True", True), ("async def", "return False", False)],
)
def test_model_may_report_its_readiness(tmp_path, how, line, ready):
    runner = runner_of(tmp_path, body("return []") + f"    {how} is_ready(self):\n        {line}\n")
    assert runner.answers_is_ready
    assert asyncio.run(runner.is_ready()) is ready


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("return 1", "TypeError: is_ready() must return a boolean value"),
        ("return None", "TypeError: is_ready() must return a boolean value"),
        ("raise ValueError('no')", "ValueError: no"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_model_whose_is_ready_fails_is_not_ready(tmp_path, line, cause):
    host = FakeHost()
    runner = runner_of(tmp_path, body("return []") + f"    def is_ready(self):\n        {line}\n", host)
    assert asyncio.run(runner.is_ready()) is False
    [(level, text)] = host.logs
    assert (level, text.rstrip().rpartition("\n")[2]) == ("ERROR", cause)


def test_model_without_is_ready_does_not_report_readiness(tmp_path):
    assert not runner_of(tmp_path, body("return []")).answers_is_ready


def test_received_request_returns_the_clients_fields(tmp_path):
    code = body(
        """
        for r in requests:
            seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(),
                    sorted(r.requested_output_names()), [t.name() for t in r.inputs()], r.trace().get_context()]
            assert isinstance(r, pb.InferenceRequest)
            assert r.inputs()[0] is r.inputs()[0]
            r.set_flags(pb.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
            pb.Logger.log_info(repr(seen + [r.flags()]))
        return [pb.InferenceResponse([]) for r in requests]
        """
    )
    host = FakeHost()
    whole = asked(
        0,
        fp32("A", [1]),
        fp32("B", [1]),
        id="r1",
        sequence_id="s",
        sequence_start=True,
        sequence_end=True,
        timeout_us=5,
        parameters={"s": 'é"q', "i": 5, "b": True, "f": 1.5},
        outputs=("OUT",),
    )
    runner_of(tmp_path, code, host).execute([whole, asked()])
    assert [eval(line) for _, line in host.logs] == [
        ["r1", "s", 3, 5, '{"s":"é\\"q","i":5,"b":true,"f":1.5}', ["OUT"], ["A", "B"], None, 2],
        ["", 0, 0, 0, "{}", ["MORE", "OUT"], ["IN"], None, 2],
    ]
