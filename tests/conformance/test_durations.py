"""Statistics and metrics of models whose times are known: a duration that is 0, doubled or another one is found.

A model sleeps at least as long as it says. The client measures the whole, which bounds each part from above by what the
other parts leave of it: no bound is a guess of how slow the machine is. Each test has models of its own, which count
from zero.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from support.background import in_background
from support.calls import canceled, executing, load, metric
from support.models import add_identity, write_config
from support.served import Stage, body, notes_file, workers
from support.server import RunningServer, start_server, wait_until

QUEUE = 0.2
"""Seconds that each request waits for others, which do not come."""
COMPUTE = 0.3
"""Seconds that a model computes that answers once."""
INITIALIZE = 1.0
"""Seconds that a model takes to initialize: more than all else of its load."""
FIRST, SECOND, LAST = 0.2, 0.3, 0.1
"""Seconds before each of the two answers that a model sends, and before its final flag."""

DELAY = f"dynamic_batching {{ max_queue_delay_microseconds: {round(QUEUE * 1e6)} }}"
HEAD = f"""
import asyncio

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def send_pair(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    time.sleep({SECOND})
    sender.send(answer(request))
    time.sleep({LAST})
    sender.send(flags=FINAL)


async def send_pair_async(request):
    sender = request.get_response_sender()
    await asyncio.sleep({FIRST})
    sender.send(answer(request))
    await asyncio.sleep({SECOND})
    sender.send(answer(request))
    await asyncio.sleep({LAST})
    sender.send(flags=FINAL)


def send_one(request):
    sender = request.get_response_sender()
    time.sleep({COMPUTE})
    sender.send(answer(request), FINAL)


def until_go():
    time.sleep({COMPUTE})
    while not os.path.exists(NOTES.replace(".notes", ".go")):
        time.sleep(0.005)


def send_when_told(request):
    sender = request.get_response_sender()
    until_go()
    sender.send(answer(request), FINAL)


def send_until_cancelled(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    while not request.is_cancelled():
        time.sleep(0.005)
    sender.send(flags=FINAL)


def send_and_die(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    time.sleep({SECOND})
    os._exit(3)


def on_threads(work, requests):
    for request in requests:
        threading.Thread(target=work, args=[request]).start()


def call(model, request):
    tensor = pb_utils.get_input_tensor_by_name(request, "IN")
    called = pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["OUT"])
    return pb_utils.InferenceResponse(called.exec().output_tensors())
"""
ANSWER = f"time.sleep({COMPUTE})\nreturn [answer(request) for request in requests]"
STREAMING = {
    "in execute": {"execute": "for request in requests: send_pair(request)"},
    "on a thread": {"execute": "on_threads(send_pair, requests)"},
    "on a loop": {"execute": "for request in requests: await send_pair_async(request)", "how": "async def"},
}

ENSEMBLE = """
    name: "{name}"
    platform: "ensemble"
    max_batch_size: 8
    input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
    output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
    ensemble_scheduling {{ step [
      {{ model_name: "{first}" model_version: -1
         input_map {{ key: "IN" value: "IN" }} output_map {{ key: "OUT" value: "between" }} }},
      {{ model_name: "{second}" model_version: -1
         input_map {{ key: "IN" value: "between" }} output_map {{ key: "OUT" value: "OUT" }} }}
    ] }}
"""


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("durations")
    repository = directory / "models"
    extra = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{round(COMPUTE * 1000)}" }} }}'
    add_identity(repository, "thread", dims="-1", extra=f"{DELAY} {extra}")
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=thread"]
    running = start_server(directory, arguments)
    yield Stage(running, repository)
    assert running.process.poll() is None, f"the server died\n{running.log}"
    assert running.stop() == 0, running.log


def put_up(house: Stage, name: str, execute: str, *, extra: str = DELAY, **how: object) -> None:
    house.put_up(name, execute, head=HEAD, extra=extra, **how)


def put_up_ensemble(house: Stage, name: str, first: str, second: str) -> None:
    (house.repository / name / "1").mkdir(parents=True)
    write_config(house.repository / name, ENSEMBLE.format(name=name, first=first, second=second))
    assert load(house.server, name) == (200, "")


# What a client sees.


def ask(server: RunningServer, model: str, status: int = 200) -> float:
    """The seconds that one request over HTTP took."""
    begun = time.monotonic()
    answer = server.post(f"/v2/models/{model}/infer", body(1.0))
    took = time.monotonic() - begun
    assert answer.status == status, answer.body
    return took


class Stream:
    """One request on a gRPC stream: what its answers were, and when each came."""

    def __init__(self, server: RunningServer, model: str) -> None:
        self.answers: list[tuple[str, float]] = []
        self.is_over = False
        self._server = server
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._on_answer)
        tensor = grpcclient.InferInput("IN", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        self.begun = time.monotonic()
        self._client.async_stream_infer(model, [tensor], enable_empty_final_response=True)

    def _on_answer(self, result: grpcclient.InferResult | None, error: Exception | None) -> None:
        now = time.monotonic()
        if result is None:
            self.answers.append(("error", now))
            self.is_over = True
            return
        response = result.get_response()
        self.answers.append(("data" if response.outputs else "empty", now))
        self.is_over = response.parameters["triton_final_response"].bool_param

    def wait(self, answers: int = 0) -> None:
        """For so many answers, or for the last one."""
        wait_until(lambda: len(self.answers) >= answers if answers else self.is_over, "the answers", self._server)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.close()


def ask_stream(server: RunningServer, model: str) -> tuple[float, list[str]]:
    """The seconds that one request over a gRPC stream took until its last answer, and what its answers were."""
    stream = Stream(server, model)
    stream.wait()
    stream.close()
    return stream.answers[-1][1] - stream.begun, [what for what, _ in stream.answers]


# What the server says.

COMPUTES = ("compute_input", "compute_infer", "compute_output")
PARTS = ("queue", *COMPUTES)


IN_US = {
    f"nv_inference_{name}_duration_us": part
    for name, part in {"request": "success", **dict(zip(PARTS, PARTS, strict=True))}.items()
}
IN_SECONDS = {
    "halimede_request_duration_seconds_sum": "success",
    "halimede_queue_duration_seconds_sum": "queue",
}


class Figures:
    """All that the server says of one model's durations, which must agree with one another. In seconds."""

    def __init__(self, server: RunningServer, model: str) -> None:
        # A model that answers by its sender is answered before its batch is counted: read all between two equal reads.
        after = statistics(server, model)
        while True:
            self.stats = after
            metrics = {name: metric(server, name, model) for name in [*IN_US, *IN_SECONDS]}
            over_grpc = grpc_statistics(server, model)
            if (after := statistics(server, model)) == self.stats:
                break
        self.counts = {name: each["count"] for name, each in self.stats["inference_stats"].items()}
        ns = {name: each["ns"] for name, each in self.stats["inference_stats"].items()}
        self.secs = {name: each / 1e9 for name, each in ns.items()}
        by_index = self.stats.get("response_stats", {})
        self.responses = [
            {name: each["ns"] / 1e9 for name, each in by_index[key].items() if each["count"]}
            for key in sorted(by_index, key=int)
        ]
        for name, part in IN_US.items():
            assert metrics[name] == ns[part] // 1000
        for name, part in IN_SECONDS.items():
            assert metrics[name] == pytest.approx(self.secs[part])
        check_grpc(over_grpc, self.stats)

    def check(self, took: float, **least: float) -> None:
        """One request: each part took what it must at least, and no more than the other parts leave of the whole."""
        whole = sum(least.values())
        assert {self.counts[part] for part in ("success", *PARTS)} == {1}
        for part in PARTS:
            known = least.get(part, 0)
            assert known <= self.secs[part] <= took - whole + known, (part, took, self.secs)
        assert min(self.secs[part] for part in COMPUTES) > 0
        assert sum(self.secs[part] for part in PARTS) <= self.secs["success"] <= took

    def check_batch(self) -> None:
        """One execution, which took what its request did."""
        [batch] = self.stats["batch_stats"]
        assert {part: batch[part] for part in COMPUTES} == {
            part: self.stats["inference_stats"][part] for part in COMPUTES
        }

    def check_failure(self, took: float, least: float) -> None:
        assert (self.counts["success"], self.counts["fail"]) == (0, 1)
        assert least <= self.secs["fail"] <= took
        assert {self.secs[part] for part in ("success", *PARTS)} == {0}


def statistics(server: RunningServer, model: str) -> Any:
    [stats] = server.get(f"/v2/models/{model}/stats").json["model_stats"]  # type: ignore[index]
    return stats


def grpc_statistics(server: RunningServer, model: str) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        [said] = client.get_inference_statistics(model).model_stats
    return said


def check_grpc(said: Any, stats: Any) -> None:
    """gRPC says what HTTP says."""
    pairs = [(stats["inference_stats"], said.inference_stats)]
    pairs += [(each, said.response_stats[key]) for key, each in stats.get("response_stats", {}).items()]
    pairs += list(zip(stats["batch_stats"], said.batch_stats, strict=True))
    for over_http, over_grpc in pairs:
        for name, duration in over_http.items():
            if name != "batch_size":
                other = getattr(over_grpc, name)
                assert (other.count, other.ns) == (duration["count"], duration["ns"]), name


# Requests that are answered once.


def test_a_model_on_a_thread(house: Stage) -> None:
    took = ask(house.server, "thread")
    figures = Figures(house.server, "thread")
    figures.check(took, queue=QUEUE, compute_infer=COMPUTE)
    figures.check_batch()


def test_a_python_model(house: Stage) -> None:
    put_up(house, "plain", ANSWER)
    took = ask(house.server, "plain")
    figures = Figures(house.server, "plain")
    figures.check(took, queue=QUEUE, compute_infer=COMPUTE)
    figures.check_batch()


def test_each_request_of_a_batch_has_the_whole_time_of_its_batch(house: Stage) -> None:
    extra = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    put_up(house, "two", ANSWER, extra=extra)
    first = in_background(lambda: ask(house.server, "two"))
    wait_until(lambda: metric(house.server, "halimede_queue_requests", "two") == 1, "the first request", house.server)
    time.sleep(QUEUE)
    took = ask(house.server, "two")
    first_took = first.result(30)
    figures = Figures(house.server, "two")
    [batch] = figures.stats["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (2, 1)
    assert COMPUTE <= batch["compute_infer"]["ns"] / 1e9 <= took
    for part in COMPUTES:
        assert figures.stats["inference_stats"][part] == {"count": 2, "ns": 2 * batch[part]["ns"]}
    assert QUEUE <= figures.secs["queue"] <= first_took + took - 2 * COMPUTE
    assert figures.secs["success"] <= first_took + took


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_a_model_that_answers_by_its_response_sender(house: Stage, where: str) -> None:
    name = f"send_{where.rsplit(maxsplit=1)[-1]}"
    work = "for request in requests: send_one(request)" if where == "in execute" else "on_threads(send_one, requests)"
    senders = "senders = [request.get_response_sender() for request in requests]"
    put_up(house, name, f"{senders}\n{work}\nreturn [None] * len(requests)")
    took = ask(house.server, name)
    Figures(house.server, name).check(took, queue=QUEUE, compute_infer=COMPUTE)


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """It stands still for the block, and for `PAUSE` when the block has come to its end."""
    process.suspend()
    try:
        yield
        time.sleep(PAUSE)
    finally:
        process.resume()


PAUSE = 0.4
KINDS = {
    "ordinary": {"execute": "until_go()\nnote('over')\nreturn [answer(request) for request in requests]"},
    "sender": {
        "execute": "for request in requests: send_when_told(request)\nnote('over')\nreturn [None] * len(requests)"
    },
    "decoupled": {"execute": "for request in requests: send_when_told(request)\nnote('over')", "decoupled": True},
}


def tell(house: Stage, name: str) -> None:
    """Let a model of `KINDS` come to its end."""
    notes_file(house.repository, name).with_suffix(".go").touch()


@pytest.mark.parametrize("kind", KINDS)
def test_input_is_what_passes_before_the_worker_begins(house: Stage, kind: str) -> None:
    name = f"in_{kind}"[:11]
    put_up(house, name, extra="", **KINDS[kind])
    tell(house, name)
    [worker] = workers(house.server, name)
    with suspended(worker):
        asked = in_background(lambda: ask_stream(house.server, name)[0])
        wait_until(lambda: executing(house.server, name) == 1, "the request", house.server)
    took = asked.result(60)
    Figures(house.server, name).check(took, compute_input=PAUSE, compute_infer=COMPUTE)


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_what_passes_after_the_worker_has_answered(house: Stage, kind: str) -> None:
    name = f"out_{kind}"[:11]
    put_up(house, name, extra="", **KINDS[kind])
    [worker] = workers(house.server, name)
    asked = in_background(lambda: ask_stream(house.server, name)[0])
    wait_until(lambda: executing(house.server, name) == 1, "the request", house.server)
    with suspended(psutil.Process(house.server.process.pid)):
        tell(house, name)
        wait_until(lambda: house.notes(name) == ["over"], "the end of execute", limit_s=30)
        # It waits for work again once its answer is sent, and for nothing before.
        wait_until(lambda: worker.status() == psutil.STATUS_SLEEPING, "its answer", limit_s=30)
    took = asked.result(60)
    figures = Figures(house.server, name)
    figures.check(took, compute_infer=COMPUTE, compute_output=PAUSE)
    for response in figures.responses:
        assert PAUSE <= response["compute_output"] <= figures.secs["compute_output"]


# Requests that are answered several times.


@pytest.mark.parametrize("where", STREAMING)
def test_answers_of_a_decoupled_model(house: Stage, where: str) -> None:
    name = f"pair_{where.rsplit(maxsplit=1)[-1]}"
    put_up(house, name, decoupled=True, **STREAMING[where])
    stream = Stream(house.server, name)
    stream.wait()
    stream.close()
    assert [what for what, _ in stream.answers] == ["data", "data", "empty"]
    first, _, took = (at - stream.begun for _, at in stream.answers)
    figures = Figures(house.server, name)
    figures.check(took, queue=QUEUE, compute_infer=FIRST + SECOND + LAST)
    spare, sent = took - QUEUE - FIRST - SECOND - LAST, QUEUE
    for response, least, outcome in zip(
        figures.responses, (FIRST, SECOND, LAST), ("success", "success", "empty_response"), strict=True
    ):
        assert least <= response["compute_infer"] <= least + spare
        sent += least
        output = response.get("compute_output", 0)
        assert 0 <= output <= took - sent
        assert response[outcome] == pytest.approx(response["compute_infer"] + output)
        assert response.keys() == {outcome, "compute_infer", *(["compute_output"] if outcome == "success" else [])}
    assert all(response["compute_output"] > 0 for response in figures.responses[:2])
    first_ms = metric(house.server, "nv_inference_first_response_histogram_ms_sum", name)
    assert QUEUE + FIRST <= first_ms / 1000 <= first


def test_an_execution_of_a_decoupled_model_is_as_long_as_its_execute(house: Stage) -> None:
    put_up(house, "early", f"on_threads(send_pair, requests)\ntime.sleep({FIRST / 2})", decoupled=True)
    put_up(house, "late", f"for request in requests: send_one(request)\ntime.sleep({COMPUTE})", decoupled=True)
    took = {}
    for name in ("early", "late"):
        begun = time.monotonic()
        ask_stream(house.server, name)
        wait_until(lambda name=name: executions(house.server, name) == 1, "the end of execute", house.server)
        took[name] = time.monotonic() - begun
    for name, least in {"early": FIRST / 2, "late": 2 * COMPUTE}.items():
        [batch] = Figures(house.server, name).stats["batch_stats"]
        assert least <= batch["compute_infer"]["ns"] / 1e9 <= took[name] - QUEUE


def executions(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_exec_count", model)


# Requests that fail.


def test_a_failure(house: Stage) -> None:
    put_up(house, "raises", f"time.sleep({COMPUTE})\nraise ValueError")
    took = ask(house.server, "raises", 500)
    figures = Figures(house.server, "raises")
    figures.check_failure(took, QUEUE + COMPUTE)
    [batch] = figures.stats["batch_stats"]
    assert COMPUTE <= batch["compute_infer"]["ns"] / 1e9 <= took - QUEUE


def test_a_failure_after_an_answer(house: Stage) -> None:
    execute = f"""
        for request in requests:
            time.sleep({FIRST})
            request.get_response_sender().send(answer(request))
            time.sleep({SECOND})
        raise ValueError
        """
    put_up(house, "then_raises", execute, decoupled=True)
    took, answers = ask_stream(house.server, "then_raises")
    assert answers == ["data", "error"]
    figures = Figures(house.server, "then_raises")
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    answered, failed = figures.responses
    assert failed.keys() == {"compute_infer", "fail"}
    assert FIRST <= answered["compute_infer"] <= took - QUEUE - SECOND
    assert SECOND <= failed["compute_infer"] == failed["fail"] <= took - QUEUE - FIRST


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_the_death_of_a_worker(house: Stage, where: str) -> None:
    name = f"die_{where.rsplit(maxsplit=1)[-1]}"
    execute = {
        "in execute": "for request in requests: send_and_die(request)",
        "on a thread": "on_threads(send_and_die, requests)",
    }
    put_up(house, name, execute[where], decoupled=True)
    took, answers = ask_stream(house.server, name)
    assert answers == ["data", "error"]
    figures = Figures(house.server, name)
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    assert SECOND <= figures.responses[1]["fail"] <= took - QUEUE - FIRST


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_a_request_that_is_cancelled(house: Stage, where: str) -> None:
    name = f"stop_{where.rsplit(maxsplit=1)[-1]}"
    execute = {
        "in execute": "for request in requests: send_until_cancelled(request)",
        "on a thread": "on_threads(send_until_cancelled, requests)",
    }
    put_up(house, name, execute[where], decoupled=True)
    stream = Stream(house.server, name)
    stream.wait(answers=1)
    time.sleep(SECOND)
    stream.cancel()
    wait_until(lambda: canceled(house.server, name) == 1, "the cancellation", house.server)
    took = time.monotonic() - stream.begun
    stream.close()
    figures = Figures(house.server, name)
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    assert SECOND <= figures.responses[1]["cancel"] <= took - QUEUE - FIRST
    assert figures.responses[1].keys() == {"cancel"}


# Models that others call.


def test_an_ensemble_has_the_sums_of_its_steps(house: Stage) -> None:
    put_up(house, "step_one", ANSWER)
    put_up(house, "step_two", ANSWER)
    put_up_ensemble(house, "both", "step_one", "step_two")
    took = ask(house.server, "both")
    steps = [Figures(house.server, name) for name in ("step_one", "step_two")]
    for step in steps:
        step.check(took - QUEUE - COMPUTE, queue=QUEUE, compute_infer=COMPUTE)
    both = Figures(house.server, "both")
    both.check(took, compute_infer=2 * COMPUTE)
    both.check_batch()
    assert both.secs["success"] >= 2 * (QUEUE + COMPUTE)
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert both.stats["inference_stats"][part]["ns"] == sums


def test_an_ensemble_of_ensembles_has_the_sums_of_all(house: Stage) -> None:
    put_up(house, "inner_step", ANSWER)
    put_up_ensemble(house, "inner", "inner_step", "inner_step")
    put_up(house, "outer_step", ANSWER)
    put_up_ensemble(house, "outer", "inner", "outer_step")
    took = ask(house.server, "outer")
    outer = Figures(house.server, "outer")
    outer.check(took, compute_infer=3 * COMPUTE)
    steps = [Figures(house.server, name) for name in ("inner", "outer_step")]
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert outer.stats["inference_stats"][part]["ns"] == sums


def test_an_ensemble_with_a_decoupled_step(house: Stage) -> None:
    put_up(house, "source", STREAMING["in execute"]["execute"], decoupled=True)
    put_up(house, "sink", ANSWER, extra="")
    put_up_ensemble(house, "flow", "source", "sink")
    took, answers = ask_stream(house.server, "flow")
    figures = Figures(house.server, "flow")
    assert figures.counts["success"] == 1
    steps = [Figures(house.server, name) for name in ("source", "sink")]
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert figures.stats["inference_stats"][part]["ns"] == sums
    assert answers[:2] == ["data", "data"]
    assert figures.responses[0]["success"] >= QUEUE + FIRST + COMPUTE
    whole = sum(response["compute_infer"] for response in figures.responses)
    assert QUEUE + FIRST + SECOND + COMPUTE <= whole <= took
    assert figures.secs["success"] <= took


def test_a_model_that_calls_another(house: Stage) -> None:
    put_up(house, "called", ANSWER)
    put_up(house, "calls", f"time.sleep({FIRST})\nreturn [call('called', request) for request in requests]")
    took = ask(house.server, "calls")
    Figures(house.server, "calls").check(took, queue=QUEUE, compute_infer=FIRST + QUEUE + COMPUTE)
    Figures(house.server, "called").check(took - QUEUE - FIRST, queue=QUEUE, compute_infer=COMPUTE)


# Loads.


def test_a_load(house: Stage) -> None:
    house.add("loads", methods=f"def initialize(self, args): time.sleep({INITIALIZE})")
    begun = time.monotonic()
    assert load(house.server, "loads") == (200, "")
    took = time.monotonic() - begun
    assert INITIALIZE <= metric(house.server, "nv_model_load_duration_secs", "loads") <= took
