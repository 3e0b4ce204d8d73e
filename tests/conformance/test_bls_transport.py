"""Calls between models in cycles, under load, and with processes that die on either side."""

import random
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from support.background import in_background
from support.calling import CALLS, COUNT_METHODS, PATIENT, add_script, each, run
from support.calls import executing, pending
from support.processes import resident_bytes
from support.served import ECHO, Stage, add_python, infer, parameter, workers
from support.server import Start, wait_until

MIB = 1 << 20

FORWARD = """
n = value(requests[0])
if n == 0: return [answer(requests[0])]
response = ask("{}", row(n - 1)).exec()
if response.has_error(): return [pb_utils.InferenceResponse(error=response.error())]
return [pb_utils.InferenceResponse(response.output_tensors())]
"""
"""Calls the other model with n - 1 until n is 0."""


def deploy_circle(stage: Stage, count: int) -> None:
    stage.deploy("ping", FORWARD.format("pong"), head=CALLS, count=count, max_batch_size=1)
    stage.deploy("pong", FORWARD.format("ping"), head=CALLS, count=count, max_batch_size=1)


def test_models_that_call_each_other_need_an_instance_per_call(stage: Stage) -> None:
    deploy_circle(stage, 2)
    assert [infer(stage.server, "ping", n) for n in range(4)] == [(200, [0])] * 4
    status, text = infer(stage.server, "ping", 4)
    assert (status, "all its instances wait for the answer" in str(text)) == (503, True), text
    assert infer(stage.server, "pong", 3) == (200, [0])


def test_a_cycle_that_many_clients_close_at_once_does_not_hang(stage: Stage) -> None:
    """Each model has one instance, which waits for the other's: only some of the calls can be served."""
    deploy_circle(stage, 1)
    server = stage.server
    with ThreadPoolExecutor(12) as clients:
        asked = [clients.submit(infer, server, name, 1) for _ in range(60) for name in ("ping", "pong")]
        outcomes = [each.result(60) for each in asked]
    for status, answer in outcomes:
        assert (status, answer) == (200, [0]) or (status == 503 and "all its instances wait" in str(answer))
    assert (200, [0]) in outcomes
    assert executing(server, "ping") == executing(server, "pong") == 0


SELF_ON_A_THREAD = """
for request in requests:
    threading.Thread(target=self.work, args=(request.get_response_sender(), request.inputs()[0].as_numpy())).start()
"""
SELF_ON_A_THREAD_METHODS = """
def work(self, sender, array):
    note("called")
    *_, last = ask("circle", tensor(array)).exec(decoupled=True)
    error = last.error()
    sender.send(pb_utils.InferenceResponse(error=error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SELF_ON_A_LOOP = """
for request in requests:
    note("called")
    async for response in await ask("circle", *request.inputs()).async_exec(decoupled=True):
        last = response
    sender = request.get_response_sender()
    sender.send(pb_utils.InferenceResponse(error=last.error()), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize(
    ("execute", "methods", "how"),
    [(SELF_ON_A_THREAD, SELF_ON_A_THREAD_METHODS, "def"), (SELF_ON_A_LOOP, "", "async def")],
    ids=["a thread", "a loop"],
)
def test_cycles_of_decoupled_models_end(stage: Stage, execute: str, methods: str, how: str) -> None:
    """Their batches have ended before their code makes the calls."""
    stage.deploy("circle", execute, methods=methods, head=CALLS, how=how, decoupled=True, max_batch_size=0)
    add_script(stage)
    assert "at most 32 deep" in str(
        run(stage.server, "return outcome(list(ask('circle', tensor(np.float32([1]))).exec(decoupled=True))[-1])")
    )
    # The script, and 31 nested calls; the next is refused.
    assert len(stage.notes("circle")) == 32
    wait_until(lambda: executing(stage.server, "circle") == 0, "the end of all", stage.server)


CALL_ITSELF = """
*_, last = ask("{}", tensor(requests[0].inputs()[0].as_numpy().ravel())).exec(decoupled=True)
self.error = last.error()
"""
SEND_ERROR = """
for request in requests:
    sender = request.get_response_sender()
    sender.send(pb_utils.InferenceResponse(error=self.error), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def work(code: str) -> str:
    return "def work(self, requests):\n" + textwrap.indent(code.strip(), "    ")


def refused(answer: object) -> bool:
    return "all its instances wait for the answer" in str(answer)


def test_a_decoupled_model_that_calls_itself_in_execute_fails_at_once(stage: Stage) -> None:
    methods = work(CALL_ITSELF.format("circle") + "\nnote('went on')\n")
    decoupled = {"decoupled": True, "max_batch_size": 0}
    stage.deploy("circle", "self.work(requests)" + SEND_ERROR, methods=methods, head=CALLS, **decoupled)
    add_script(stage)
    assert refused(
        run(stage.server, "return outcome(list(ask('circle', tensor(np.float32([1]))).exec(decoupled=True))[-1])")
    )
    # The call was not executed: otherwise it would have called the model again.
    assert stage.notes("circle") == ["went on"]
    wait_until(lambda: executing(stage.server, "circle") == 0, "the end of all", stage.server)


@pytest.mark.parametrize("way", ["a thread", "a task"])
def test_a_cycle_through_open_requests_of_a_decoupled_model_is_detected(stage: Stage, way: str) -> None:
    decoupled = {"decoupled": True, "max_batch_size": 0}
    call = CALL_ITSELF.format("waits").replace("as_numpy().ravel()", "as_numpy().reshape(1, -1)")
    if way == "a thread":
        start = "threading.Thread(target=self.work, args=(requests,)).start()"
        stage.deploy("partner", start, methods=work(call + SEND_ERROR), head=CALLS, **decoupled)
    else:
        execute = (
            "await asyncio.sleep(0)\nasync for last in await ask('waits', row(1)).async_exec(decoupled=True): pass\n"
        )
        stage.deploy(
            "partner", f"{execute}self.error = last.error()\n{SEND_ERROR}", head=CALLS, how="async def", **decoupled
        )
    answered = "return [pb_utils.InferenceResponse(error=self.error)]"
    stage.deploy("waits", f"{CALL_ITSELF.format('partner').strip()}\n{answered}", head=CALLS)
    status, answer = infer(stage.server, "waits", 1)
    assert (status, refused(answer)) == (503, True), answer
    wait_until(lambda: executing(stage.server, "waits") == executing(stage.server, "partner") == 0, "all", stage.server)


def test_a_thread_that_execute_does_not_join_may_call_its_own_model(stage: Stage) -> None:
    """The call waits for the one instance until `execute` returns, without a time limit."""
    execute = """
if value(requests[0]):
    threading.Thread(target=self.work, args=(requests,)).start()
    while not os.path.exists(NOTES + ".go"): time.sleep(0.005)
else:
    self.error = None
    self.send_error(requests)
"""
    methods = work(
        "note('calls')\n" + CALL_ITSELF.format("own").replace("ravel()", "ravel() - 1") + "self.send_error(requests)"
    )
    methods += "\ndef send_error(self, requests):\n" + textwrap.indent(SEND_ERROR.strip(), "    ")
    stage.deploy("own", execute, methods=methods, head=CALLS, decoupled=True, max_batch_size=0)
    add_script(stage)
    code = "return outcome(list(ask('own', tensor(np.float32([1]))).exec(decoupled=True))[-1])"
    asked = in_background(lambda: run(stage.server, code))
    wait_until(lambda: stage.notes("own") == ["calls"], "the call", stage.server)
    wait_until(lambda: pending(stage.server, "own") == 1, "the call to be queued", stage.server)
    (stage.repository.parent / "own.notes.go").touch()
    assert asked.result(30) == []


THREAD_OF_ITS_OWN = """
for request in requests:
    response = ThreadPoolExecutor(1).submit(self.work, request).result()
    sender = request.get_response_sender()
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALL_THE_OTHER = """
def work(self, request):
    if value(request) == 0: return answer(request)
    *_, last = ask("{}", row(value(request) - 1)).exec(decoupled=True)
    if last.has_error(): return pb_utils.InferenceResponse(error=last.error())
    return pb_utils.InferenceResponse(last.output_tensors())
"""


def test_models_that_call_each_other_on_threads_continue_after_timeout(stage: Stage) -> None:
    """The server cannot detect that `execute` waits for its thread, and therefore detects no cycle."""
    head = CALLS + "from concurrent.futures import ThreadPoolExecutor\n"
    server = stage.server
    for name, other, timeout_ms in (("first", "second", "60000"), ("second", "first", "1500")):
        stage.deploy(
            name,
            THREAD_OF_ITS_OWN,
            methods=CALL_THE_OTHER.format(other),
            head=head,
            decoupled=True,
            extra=parameter("BLS_TIMEOUT_MS", timeout_ms),
        )
    add_script(stage)
    code = "return outcome(next(iter(ask('first', row({})).exec(decoupled=True))))"
    begun = time.monotonic()
    answer = str(run(server, code.format(2)))
    took = time.monotonic() - begun
    assert answer.startswith("UNAVAILABLE: "), answer
    assert "model 'first' is not called: the call of model 'second' was queued for 15" in answer
    assert (
        "(its BLS_TIMEOUT_MS is 1500); if the called model waits for its caller, more instances would serve" in answer
    )
    assert 1.5 <= took < 15
    line = "model 'second': its call of model 'first' was ended after 15"
    wait_until(lambda: line in server.log, "the line of the log", server)
    # Both models continue, and the timeout does not limit a call that is not queued.
    assert run(server, code.format(1)) == [[[0]]]
    assert executing(server, "first") == executing(server, "second") == 0


def test_a_call_that_executes_is_not_ended_by_its_timeout(stage: Stage) -> None:
    stage.deploy("slow", f"time.sleep(0.6)\n{ECHO}")
    execute = (
        "return [pb_utils.InferenceResponse(ask('slow', *each.inputs()).exec().output_tensors()) for each in requests]"
    )
    stage.deploy("caller", execute, head=CALLS, extra=parameter("BLS_TIMEOUT_MS", "200"))
    assert infer(stage.server, "caller", 3) == (200, [3])


def test_an_undetectable_cycle_ends_with_the_timeout_of_its_call(stage: Stage) -> None:
    """The server cannot detect which thread sets an event."""
    execute = """
finished = threading.Event()
threading.Thread(target=lambda: (self.work(requests), finished.set())).start()
finished.wait()
"""
    queue = "dynamic_batching { default_queue_policy { timeout_action: REJECT allow_timeout_override: true } }"
    methods = work(CALL_ITSELF.format("hidden").replace("ravel())", "ravel()), timeout=300_000"))
    methods = methods.replace("ravel())", "reshape(1, -1))")
    stage.deploy(
        "hidden", execute + SEND_ERROR, methods=methods, head=CALLS, decoupled=True, max_batch_size=1, extra=queue
    )
    add_script(stage)
    answer = run(stage.server, "return outcome(list(ask('hidden', row(1)).exec(decoupled=True))[-1])")
    assert "UNAVAILABLE: Request timeout expired" in str(answer)


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exit", "kill"])
def test_calls_of_a_process_that_dies_are_cancelled(stage: Stage, end: str) -> None:
    server = stage.server
    stage.deploy("patient", PATIENT, count=2)
    sign = stage.repository.parent / "mortal.die"
    sign.unlink(missing_ok=True)
    mortal = f"""
if value(requests[0]) == 0: return [answer(requests[0])]
for _ in range(2): threading.Thread(target=lambda: ask("patient", row(1)).exec(), daemon=True).start()
while not os.path.exists({str(sign)!r}): time.sleep(0.005)
{end}
"""
    stage.deploy("mortal", mortal, head=CALLS)
    asked = in_background(lambda: infer(server, "mortal", 1))
    wait_until(lambda: stage.notes("patient") == ["begun"] * 2, "both calls", server)
    sign.touch()
    assert asked.result(30)[0] == 500
    wait_until(lambda: stage.notes("patient")[2:] == ["cancelled"] * 2, "the called model to see it", server)
    assert infer(server, "mortal", 0) == (200, [0])
    wait_until(lambda: executing(server, "patient") == 0, "the end of the calls", server)


def test_a_decoupled_model_that_dies_ends_its_answers_with_an_error(stage: Stage) -> None:
    stage.deploy(
        "count",
        "for r in requests: threading.Thread(target=self.count, args=(r.get_response_sender(), 5, 0)).start()",
        methods=COUNT_METHODS.replace("    sender.send(flags", "    os._exit(9)\n    sender.send(flags"),
        decoupled=True,
        max_batch_size=0,
    )
    add_script(stage)
    *answers, last = run(
        stage.server, "return [outcome(r) for r in ask('count', tensor(np.float32([1]))).exec(decoupled=True)]"
    )  # type: ignore[misc]
    assert answers == [[[n]] for n in range(5)]
    assert "exit code 9" in str(last)


def test_a_disconnected_client_cancels_calls_of_its_decoupled_model(stage: Stage) -> None:
    server = stage.server
    stage.deploy("patient", PATIENT)
    execute = """
for request in requests:
    response = await ask("patient", row(1)).async_exec()
    note(outcome(response))
    request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    stage.deploy("caller", execute, head=CALLS, how="async def", decoupled=True, max_batch_size=0)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: None)  # noqa: ARG005  it names them
        given = grpcclient.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.ones(1, np.float32))
        client.async_stream_infer("caller", [given])
        wait_until(lambda: stage.notes("patient") == ["begun"], "the call", server)
        client.stop_stream(cancel_requests=True)
    wait_until(lambda: stage.notes("patient") == ["begun", "cancelled"], "the called model to see it", server)
    wait_until(lambda: stage.notes("caller"), "the caller to get its answer", server)


def test_unread_answers_to_a_caller_use_bounded_memory(stage: Stage) -> None:
    server = stage.server
    stage.deploy(
        "large",
        "for r in requests: threading.Thread(target=self.count, args=(r.get_response_sender(), 100, 0)).start()",
        methods=COUNT_METHODS.replace("np.array([number], np.float32)", "np.full(1 << 19, number, np.float32)").replace(
            "        time.sleep(pause)", "        note(number)"
        ),
        decoupled=True,
        max_batch_size=0,
    )
    add_script(stage)
    before = resident_bytes(server)
    code = """
model.responses = ask("large", tensor(np.float32([1]))).exec(decoupled=True)
return [next(model.responses).output_tensors()[0].as_numpy()[0].item() for _ in range(3)]
"""
    assert run(server, code) == [0, 1, 2]
    wait_until(lambda: len(stage.notes("large")) >= 5, "what may be ahead", server)
    time.sleep(0.3)  # time for further answers, which would be too many
    # Three answers of 2 MiB were read, and 8 MiB may be in transit.
    assert len(stage.notes("large")) <= 3 + 8
    assert resident_bytes(server) - before < 100 * MIB
    rest = "return [r.output_tensors()[0].as_numpy()[-1].item() for r in model.responses if r.output_tensors()]"
    # The iterator keeps the answers that it has returned.
    assert run(server, rest)[-2:] == [98, 99]  # type: ignore[index]


def test_calls_outlive_the_deaths_of_both_sides_under_load(stage: Stage) -> None:
    """Every request has an outcome, whichever process dies during it, and nothing of it is left."""
    server = stage.server
    stage.deploy("double", each("2 * x"), count=2)
    caller = """
found = []
for request in requests:
    responses = [ask("double", *request.inputs()) for _ in range(3)]
    answers = [response.exec() for response in responses]
    errors = [answer.error() for answer in answers if answer.has_error()]
    found.append(pb_utils.InferenceResponse(answers[0].output_tensors() if not errors else [], errors[0] if errors else None))
return found
"""
    stage.deploy("caller", caller, head=CALLS, count=2)
    stop_at = time.monotonic() + 1.4
    outcomes: list[tuple[int, object]] = []

    def client(number: int) -> None:
        while time.monotonic() < stop_at:
            outcomes.append(infer(server, "caller", number))

    choose = random.Random(5)
    clients = [in_background(lambda n=n: client(n)) for n in range(8)]
    # Fewer deaths than park a model: five in a minute.
    for model in ("double", "caller", "double", "caller"):
        with suppress(psutil.NoSuchProcess, IndexError):
            choose.choice(workers(server, model)).kill()
        time.sleep(0.25)
    for each_client in clients:
        each_client.result(30)
    assert {status for status, _ in outcomes} <= {200, 500, 503}
    good = [answer for status, answer in outcomes if status == 200]
    assert all(answer in ([2.0 * n] for n in range(8)) for answer in good)
    assert len(good) > 20
    wait_until(lambda: infer(server, "caller", 3) == (200, [6]), "both models to be back", server)
    wait_until(lambda: executing(server, "double") == executing(server, "caller") == 0, "the end of all", server)


def test_a_request_with_running_calls_is_answered_during_the_drain(start: Start, repository: Path) -> None:
    add_python(repository, "double", each("2 * x"))
    caller = """
note("begun")
for _ in range(20):
    time.sleep(0.05)
    response = ask("double", *requests[0].inputs()).exec()
    if response.has_error(): return [pb_utils.InferenceResponse(error=response.error())]
return [pb_utils.InferenceResponse(response.output_tensors())]
"""
    add_python(repository, "caller", caller, head=CALLS)
    server = start("--model-repository", repository)
    asked = in_background(lambda: infer(server, "caller", 4))
    wait_until((repository.parent / "caller.notes").exists, "the request", server)
    server.process.send_signal(signal.SIGTERM)
    assert asked.result(30) == (200, [8])
    assert server.process.wait(30) == 0
