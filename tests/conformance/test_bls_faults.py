"""Calls between models that do not end with an answer: errors, cancellation, disconnected clients, dead workers."""

import json
import socket

import pytest

from support.background import in_background
from support.calling import (
    CALLS,
    COUNT,
    COUNT_METHODS,
    PATIENT,
    add_async_script,
    add_count,
    add_script,
    load_on,
    run,
)
from support.calls import executing, metric, pending
from support.models import add_identity
from support.served import ECHO, Stage, body, infer, parameter, workers
from support.server import RunningServer, wait_until

FAILED = "Failed to process the request(s) for model instance"
ERROR = "Model {} - Error when running inference: {}"


def test_errors_of_a_called_model_reach_the_caller_and_its_client(stage: Stage) -> None:
    server = stage.server
    failing = """
number = value(requests[0])
if number == 1: raise ValueError("boom")
error = pb_utils.TritonError("no such row", pb_utils.TritonError.NOT_FOUND)
return [pb_utils.InferenceResponse(error=error)]
"""
    stage.deploy("failing", failing)
    add_script(stage)
    expected = [f"INTERNAL: {FAILED} 'failing_0_0', message: ValueError: boom", "NOT_FOUND: no such row"]
    assert run(server, "return [outcome(ask('failing', row(n)).exec()) for n in (1, 2)]") == expected
    iterated = "return [outcome(each) for n in (1, 2) for each in ask('failing', row(n)).exec(decoupled=True)]"
    assert run(server, iterated) == expected
    passing = "return [pb_utils.InferenceResponse(error=ask('failing', *requests[0].inputs()).exec().error())]"
    stage.deploy("passing", passing, head=CALLS)
    assert infer(server, "passing", 2) == (404, "no such row")


def test_an_invalid_call_fails_with_the_reason(stage: Stage) -> None:
    server = stage.server
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "same")
    stage.add("unloaded")
    add_count(stage)
    add_script(stage)
    unexpected = "unexpected inference {} '{}' for model 'same'"
    decoupled = (
        "Model count is using the decoupled. The current BLS request call doesn't support models using the decoupled"
        " transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for decoupled"
        " models.'"
    )
    calls = {
        "ask('nowhere', row(1))": "NOT_FOUND: "
        + ERROR.format("nowhere", "Request for unknown model: 'nowhere' is not found"),
        "ask('unloaded', row(1))": "NOT_FOUND: "
        + ERROR.format("unloaded", "Request for unknown model: 'unloaded' is not found"),
        "ask('same', row(1), model_version=7)": "NOT_FOUND: "
        + ERROR.format("same", "Request for unknown model: 'same' version 7 is not found"),
        "ask('same', row(1), outputs=['X'])": "INVALID_ARG: " + ERROR.format("same", unexpected.format("output", "X")),
        "ask('same', tensor(np.float32([[1]]), 'X'))": "INVALID_ARG: "
        + ERROR.format("same", unexpected.format("input", "X")),
        "ask('count', tensor(np.float32([3, 0])))": "INTERNAL: " + ERROR.format("count", decoupled),
    }
    for code, text in calls.items():
        assert run(server, f"return outcome({code}.exec())") == text
    awaited = "return [outcome(await ask('count', tensor(np.float32([3, 0]))).async_exec())]"
    add_async_script(stage, "awaiting")
    assert run(server, awaited, "awaiting") == [calls["ask('count', tensor(np.float32([3, 0])))"]]
    assert metric(server, "nv_inference_exec_count", "count") == 0, "it is refused before it is asked"
    # The model continues normally.
    assert run(server, "return outcome(ask('same', row(1)).exec())") == [[[1]]]


def test_a_call_whose_model_dies_fails_with_the_exit_reason(stage: Stage) -> None:
    server = stage.server
    stage.deploy("mortal", f"if value(requests[0]) == 3: os._exit(7)\n{ECHO}")
    add_script(stage)
    error = run(server, "return outcome(ask('mortal', row(3)).exec())")
    assert "exit code 7" in str(error), error
    # A call during the start of the next process waits for it.
    assert run(server, "return outcome(ask('mortal', row(1)).exec())") == [[[1]]]


def test_calls_of_a_parked_model_fail_as_not_ready(stage: Stage) -> None:
    server = stage.server
    stage.deploy("doomed", "os._exit(7)")
    add_script(stage)
    code = """
for _ in range(7):
    last = outcome(ask("doomed", row(1)).exec())
return last
"""
    last = str(run(server, code))
    assert last.startswith("UNAVAILABLE: ")
    assert "Failed for execute the inference request. Model 'doomed' is not ready. " in last
    assert "exit code 7" in last


def test_a_model_that_calls_itself_without_free_instance_fails_at_once(stage: Stage) -> None:
    server = stage.server
    execute = """
error = ask("selfish", *requests[0].inputs()).exec().error()
return [pb_utils.InferenceResponse(error=error)]
"""
    stage.deploy("selfish", execute, head=CALLS)
    status, text = infer(server, "selfish", 1)
    assert (status, "all its instances wait for the answer" in str(text)) == (503, True), text
    two = "return [pb_utils.InferenceResponse(error=ask('{}', *requests[0].inputs()).exec().error())]"
    stage.deploy("ping", two.format("pong"), head=CALLS)
    stage.deploy("pong", two.format("ping"), head=CALLS)
    status, text = infer(server, "ping", 1)
    assert (status, "all its instances wait for the answer" in str(text)) == (503, True), text


def test_the_depth_of_nested_calls_is_limited(stage: Stage) -> None:
    server = stage.server
    execute = """
note("called")
response = await ask("deep", *requests[0].inputs()).async_exec()
return [pb_utils.InferenceResponse(error=response.error())]
"""
    stage.deploy("deep", execute, head=CALLS, how="async def", extra=parameter("MAX_CONCURRENCY", "64"))
    status, text = infer(server, "deep", 1)
    assert status == 400
    assert "at most 32 deep" in str(text)
    # The client's request, and the nested calls.
    assert len(stage.notes("deep")) == 33
    assert workers(server, "deep")


@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_a_dropped_iterator_cancels_its_call(stage: Stage, how: str) -> None:
    server = stage.server
    add_count(stage)
    add_script(stage)
    code = {
        "cancel": """
responses = ask("count", tensor(np.float32([1000000, 0.001]))).exec(decoupled=True)
first = outcome(next(responses))
responses.cancel()
rest = [outcome(each) for each in responses]
return first, rest[-1], len(rest) < 10000
""",
        "drop": """
responses = ask("count", tensor(np.float32([1000000, 0.001]))).exec(decoupled=True)
first = outcome(next(responses))
del responses
return first
""",
    }[how]
    found = run(server, code)
    if how == "drop":
        assert found == [[0]]
    else:
        first, last, is_soon = found  # type: ignore[misc]
        assert (first, is_soon) == ([[0]], True)
        assert last == []
    wait_until(lambda: stage.notes("count") == ["cancelled"], "the model to see it", server)


def test_cancelled_call_delivers_what_its_model_still_sends(stage: Stage) -> None:
    """More answers than a model may send before its caller takes some."""
    stage.deploy("count", COUNT, methods=COUNT_METHODS.replace("break", ""), decoupled=True, max_batch_size=0)
    add_script(stage)
    code = """
responses = ask("count", tensor(np.float32([100, 0]))).exec(decoupled=True)
first = next(responses)
responses.cancel()
return [outcome(each) for each in (first, *responses)]
"""
    assert run(stage.server, code) == [*([[number]] for number in range(100)), []]
    assert set(stage.notes("count")) == {"cancelled"}


def test_a_slow_caller_holds_back_the_called_model(stage: Stage) -> None:
    server = stage.server
    stage.deploy(
        "count",
        "for request in requests:\n"
        "    threading.Thread(target=self.count, args=(request.get_response_sender(), 300, 0)).start()",
        methods=COUNT_METHODS.replace("    for number", "    note('begun')\n    for number").replace(
            "        time.sleep(pause)", "        note(number)"
        ),
        decoupled=True,
        max_batch_size=0,
    )
    add_script(stage)
    code = """
model.responses = ask("count", tensor(np.float32([0, 0]))).exec(decoupled=True)
return outcome(next(model.responses))
"""
    assert run(server, code) == [[0]]
    wait_until(lambda: len(stage.notes("count")) > 20, "the first answers", server)
    assert run(server, "return [outcome(next(model.responses)) for _ in range(50)]") == [[[n]] for n in range(1, 51)]
    # 51 were read: the model may be 32 ahead in each of the two processes, and not 300.
    assert len(stage.notes("count")) < 250
    rest = "return [outcome(each) for each in model.responses][-2:], len(list(model.responses))"
    assert run(server, rest) == ([[[299]], []], 301)


@pytest.mark.parametrize(
    "code",
    [
        """
task = ask("patient", row(1)).async_exec()
while not os.path.exists(NOTES.replace("script", "patient")): await asyncio.sleep(0.005)
task.cancel()
try: await task
except asyncio.CancelledError: return "cancelled"
""",
        """
async def too_long():
    await ask("patient", row(1)).async_exec()
try: await asyncio.wait_for(too_long(), 0.3)
except asyncio.TimeoutError: return "cancelled"
""",
    ],
    ids=["cancel", "wait_for"],
)
def test_a_cancelled_task_cancels_its_call(stage: Stage, code: str) -> None:
    server = stage.server
    stage.deploy("patient", PATIENT)
    add_async_script(stage)
    assert run(server, code) == "cancelled"
    wait_until(lambda: stage.notes("patient") == ["begun", "cancelled"], "the model to see it", server)


def test_a_disconnected_client_cancels_the_calls_of_its_request(stage: Stage) -> None:
    server = stage.server
    stage.deploy("patient", PATIENT)
    stage.deploy("caller", "note(outcome(ask('patient', *requests[0].inputs()).exec()))\n" + ECHO, head=CALLS)
    leave_once(server, "caller", lambda: stage.notes("patient") == ["begun"])
    wait_until(lambda: stage.notes("patient") == ["begun", "cancelled"], "the called model to see it", server)
    # The called model may still answer: the caller gets the answer, and only the client is gone.
    wait_until(lambda: stage.notes("caller") == ["[[[1.0]]]"], "the caller to get its answer", server)
    wait_until(lambda: executing(server, "caller") == 0, "the end of the caller", server)


def test_calls_continue_while_the_batch_has_a_connected_client(stage: Stage) -> None:
    server = stage.server
    stage.deploy("gate", "note('begun')\nwhile not os.path.exists(NOTES + '.go'): time.sleep(0.005)\n" + ECHO)
    execute = """
note(len(requests))
response = ask("gate", *requests[0].inputs()).exec()
return [pb_utils.InferenceResponse(response.output_tensors()) for _ in requests]
"""
    stage.deploy(
        "caller", execute, head=CALLS, extra="dynamic_batching { max_queue_delay_microseconds: 10000000 preferred_batch_size: [ 2 ] }"
    )  # fmt: skip
    staying = in_background(lambda: infer(server, "caller", 4))
    wait_until(lambda: pending(server, "caller") == 1, "the first request", server)
    leave_once(server, "caller", lambda: stage.notes("gate") == ["begun"], value=4)
    assert stage.notes("caller") == ["2"]
    (stage.repository.parent / "gate.notes.go").touch()
    assert staying.result(30) == (200, [4])


def leave_once(server: RunningServer, model: str, is_time: object, value: float = 1.0) -> None:
    """Send a request, and close the connection when `is_time` returns true."""
    content = json.dumps(body(value)).encode()
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.http_port)) as client:
        client.sendall(head + content)
        wait_until(is_time, "the right time to leave", server)


def test_the_timeout_of_a_call_is_for_the_queue_of_the_called_model(stage: Stage) -> None:
    server = stage.server
    stage.deploy(
        "queued",
        "note('begun')\nwhile not os.path.exists(NOTES + '.go'): time.sleep(0.005)\n" + ECHO,
        extra="dynamic_batching { default_queue_policy { timeout_action: REJECT allow_timeout_override: true } }",
        max_batch_size=1,
    )
    add_script(stage, count=2)
    first = in_background(lambda: run(server, "return outcome(ask('queued', row(1), timeout=1000).exec())"))
    wait_until(lambda: stage.notes("queued") == ["begun"], "the first call", server)
    assert (
        run(server, "return outcome(ask('queued', row(2), timeout=1000).exec())")
        == "UNAVAILABLE: Request timeout expired"
    )
    (stage.repository.parent / "queued.notes.go").touch()
    assert first.result(30) == [[[1]]]


def test_calls_from_initialize_and_finalize_are_refused(stage: Stage) -> None:
    server = stage.server
    add_identity(stage.repository, "same", dims="-1")
    load_on(stage, "same")
    methods = """
def try_it(self):
    for call in (lambda: ask("same", row(1)).exec(), lambda: asyncio.run(self.later())):
        try: note(outcome(call()))
        except pb_utils.TritonModelException as error: note(error)
async def later(self):
    return await ask("same", row(1)).async_exec()
def initialize(self, args): self.try_it()
def finalize(self): self.try_it()
"""
    stage.deploy("early", f"self.try_it()\n{ECHO}", methods=methods, head=CALLS)
    infer(server, "early", 1)
    stage.clear()
    refused = "BLS is only supported during the 'execute' function."
    assert stage.notes("early") == [refused, refused, "[[[1.0]]]", "[[[1.0]]]", refused, refused]


def test_without_an_event_loop_only_exec_works(stage: Stage) -> None:
    add_script(stage)
    code = """
try: ask("script", row(1)).async_exec()
except RuntimeError as error: return str(error)
"""
    assert run(stage.server, code) == "no running event loop"


def test_a_process_that_a_model_forks_cannot_call_models(stage: Stage) -> None:
    add_script(stage)
    code = """
child = os.fork()
if not child:
    note(outcome(ask("script", row(1)).exec()))
    os._exit(0)
os.waitpid(child, 0)
"""
    run(stage.server, code)
    [line] = stage.notes("script")
    assert "only the process that hosts a model can call other models" in line
