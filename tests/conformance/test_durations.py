"""Statistics and metrics of models whose times are known: a duration that is 0, doubled or another one is found.

A model sleeps at least as long as it says. The client measures the whole, which bounds each part from above by what the
other parts leave of it: no bound is a guess of how slow the machine is. Each test has models of its own, which count
from zero.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from support.background import in_background
from support.calls import canceled, executing, load, metric
from support.durations import (
    ANSWER,
    COMPUTE,
    COMPUTES,
    DELAY,
    FIRST,
    INITIALIZE,
    LAST,
    QUEUE,
    SECOND,
    STREAMING,
    Figures,
    Stream,
    ask,
    ask_stream,
    put_up,
    put_up_ensemble,
)
from support.models import add_identity
from support.served import Stage, notes_file, workers
from support.server import RunningServer, start_server, wait_until


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


# What a client sees.


# What the server says.


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


def let_end(house: Stage, name: str) -> None:
    """Let a model of `KINDS` come to its end."""
    notes_file(house.repository, name).with_suffix(".go").touch()


@pytest.mark.parametrize("kind", KINDS)
def test_input_is_what_passes_before_the_worker_begins(house: Stage, kind: str) -> None:
    name = f"in_{kind}"[:11]
    put_up(house, name, extra="", **KINDS[kind])
    let_end(house, name)
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
        let_end(house, name)
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
