"""Statistics and metrics of models with known durations: the tests find a duration that is 0, doubled or swapped.

Lower bounds are the models' sleeps. The client measures the whole; the upper bound of a part is the whole minus the
lower bounds of the other parts. No bound depends on the speed of the machine. Each test has its own models, which count
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
    deploy,
    deploy_ensemble,
)
from support.models import add_identity
from support.served import Stage, notes_file, workers
from support.server import RunningServer, serving, wait_until


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("durations")
    repository = directory / "models"
    extra = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{round(COMPUTE * 1000)}" }} }}'
    add_identity(repository, "thread", dims="-1", extra=f"{DELAY} {extra}")
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=thread"]
    with serving(directory, arguments) as running:
        yield Stage(running, repository)


# As clients see it.


# As the server reports it.


# Requests that are answered once.


def test_durations_of_a_model_on_a_thread(stage: Stage) -> None:
    took = ask(stage.server, "thread")
    figures = Figures(stage.server, "thread")
    figures.check(took, queue=QUEUE, compute_infer=COMPUTE)
    figures.check_batch()


def test_durations_of_a_python_model(stage: Stage) -> None:
    deploy(stage, "plain", ANSWER)
    took = ask(stage.server, "plain")
    figures = Figures(stage.server, "plain")
    figures.check(took, queue=QUEUE, compute_infer=COMPUTE)
    figures.check_batch()


def test_each_request_of_a_batch_has_the_whole_time_of_its_batch(stage: Stage) -> None:
    extra = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    deploy(stage, "two", ANSWER, extra=extra)
    first = in_background(lambda: ask(stage.server, "two"))
    wait_until(lambda: metric(stage.server, "halimede_queue_requests", "two") == 1, "the first request", stage.server)
    time.sleep(QUEUE)
    took = ask(stage.server, "two")
    first_took = first.result(30)
    figures = Figures(stage.server, "two")
    [batch] = figures.stats["batch_stats"]
    assert (batch["batch_size"], batch["compute_infer"]["count"]) == (2, 1)
    assert COMPUTE <= batch["compute_infer"]["ns"] / 1e9 <= took
    for part in COMPUTES:
        assert figures.stats["inference_stats"][part] == {"count": 2, "ns": 2 * batch[part]["ns"]}
    assert QUEUE <= figures.secs["queue"] <= first_took + took - 2 * COMPUTE
    assert figures.secs["success"] <= first_took + took


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_durations_of_a_model_that_answers_by_response_sender(stage: Stage, where: str) -> None:
    name = f"send_{where.rsplit(maxsplit=1)[-1]}"
    work = "for request in requests: send_one(request)" if where == "in execute" else "on_threads(send_one, requests)"
    senders = "senders = [request.get_response_sender() for request in requests]"
    deploy(stage, name, f"{senders}\n{work}\nreturn [None] * len(requests)")
    took = ask(stage.server, name)
    Figures(stage.server, name).check(took, queue=QUEUE, compute_infer=COMPUTE)


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    """Suspend the process for the block, and for `PAUSE` after it."""
    process.suspend()
    try:
        yield
        time.sleep(PAUSE)
    finally:
        process.resume()


PAUSE = 0.4
KINDS = {
    "ordinary": {"execute": "wait_for_go()\nnote('over')\nreturn [answer(request) for request in requests]"},
    "sender": {
        "execute": "for request in requests: send_after_go(request)\nnote('over')\nreturn [None] * len(requests)"
    },
    "decoupled": {"execute": "for request in requests: send_after_go(request)\nnote('over')", "decoupled": True},
}


def let_end(stage: Stage, name: str) -> None:
    """Let a model of `KINDS` end its execution."""
    notes_file(stage.repository, name).with_suffix(".go").touch()


@pytest.mark.parametrize("kind", KINDS)
def test_input_duration_is_the_time_before_the_worker_begins(stage: Stage, kind: str) -> None:
    name = f"in_{kind}"[:11]
    deploy(stage, name, extra="", **KINDS[kind])
    let_end(stage, name)
    [worker] = workers(stage.server, name)
    with suspended(worker):
        asked = in_background(lambda: ask_stream(stage.server, name)[0])
        wait_until(lambda: executing(stage.server, name) == 1, "the request", stage.server)
    took = asked.result(60)
    Figures(stage.server, name).check(took, compute_input=PAUSE, compute_infer=COMPUTE)


@pytest.mark.parametrize("kind", KINDS)
def test_output_duration_is_the_time_after_the_worker_has_answered(stage: Stage, kind: str) -> None:
    name = f"out_{kind}"[:11]
    deploy(stage, name, extra="", **KINDS[kind])
    [worker] = workers(stage.server, name)
    asked = in_background(lambda: ask_stream(stage.server, name)[0])
    wait_until(lambda: executing(stage.server, name) == 1, "the request", stage.server)
    with suspended(psutil.Process(stage.server.process.pid)):
        let_end(stage, name)
        wait_until(lambda: stage.notes(name) == ["over"], "the end of execute", limit_s=30)
        # The worker waits for work only after its answer is sent.
        wait_until(lambda: worker.status() == psutil.STATUS_SLEEPING, "its answer", limit_s=30)
    took = asked.result(60)
    figures = Figures(stage.server, name)
    figures.check(took, compute_infer=COMPUTE, compute_output=PAUSE)
    for response in figures.responses:
        assert PAUSE <= response["compute_output"] <= figures.secs["compute_output"]


# Requests that are answered several times.


@pytest.mark.parametrize("where", STREAMING)
def test_durations_of_a_decoupled_models_answers(stage: Stage, where: str) -> None:
    name = f"pair_{where.rsplit(maxsplit=1)[-1]}"
    deploy(stage, name, decoupled=True, **STREAMING[where])
    stream = Stream(stage.server, name)
    stream.wait()
    stream.close()
    assert [what for what, _ in stream.answers] == ["data", "data", "empty"]
    first, _, took = (at - stream.begun for _, at in stream.answers)
    figures = Figures(stage.server, name)
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
    first_ms = metric(stage.server, "nv_inference_first_response_histogram_ms_sum", name)
    assert QUEUE + FIRST <= first_ms / 1000 <= first


def test_an_execution_of_a_decoupled_model_lasts_as_long_as_execute(stage: Stage) -> None:
    deploy(stage, "early", f"on_threads(send_pair, requests)\ntime.sleep({FIRST / 2})", decoupled=True)
    deploy(stage, "late", f"for request in requests: send_one(request)\ntime.sleep({COMPUTE})", decoupled=True)
    took = {}
    for name in ("early", "late"):
        begun = time.monotonic()
        ask_stream(stage.server, name)
        wait_until(lambda name=name: executions(stage.server, name) == 1, "the end of execute", stage.server)
        took[name] = time.monotonic() - begun
    for name, least in {"early": FIRST / 2, "late": 2 * COMPUTE}.items():
        [batch] = Figures(stage.server, name).stats["batch_stats"]
        assert least <= batch["compute_infer"]["ns"] / 1e9 <= took[name] - QUEUE


def executions(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_exec_count", model)


# Requests that fail.


def test_durations_of_a_failure(stage: Stage) -> None:
    deploy(stage, "raises", f"time.sleep({COMPUTE})\nraise ValueError")
    took = ask(stage.server, "raises", 500)
    figures = Figures(stage.server, "raises")
    figures.check_failure(took, QUEUE + COMPUTE)
    [batch] = figures.stats["batch_stats"]
    assert COMPUTE <= batch["compute_infer"]["ns"] / 1e9 <= took - QUEUE


def test_durations_of_a_failure_after_an_answer(stage: Stage) -> None:
    execute = f"""
        for request in requests:
            time.sleep({FIRST})
            request.get_response_sender().send(answer(request))
            time.sleep({SECOND})
        raise ValueError
        """
    deploy(stage, "then_raises", execute, decoupled=True)
    took, answers = ask_stream(stage.server, "then_raises")
    assert answers == ["data", "error"]
    figures = Figures(stage.server, "then_raises")
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    answered, failed = figures.responses
    assert failed.keys() == {"compute_infer", "fail"}
    assert FIRST <= answered["compute_infer"] <= took - QUEUE - SECOND
    assert SECOND <= failed["compute_infer"] == failed["fail"] <= took - QUEUE - FIRST


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_durations_of_requests_of_a_worker_that_dies(stage: Stage, where: str) -> None:
    name = f"die_{where.rsplit(maxsplit=1)[-1]}"
    execute = {
        "in execute": "for request in requests: send_and_die(request)",
        "on a thread": "on_threads(send_and_die, requests)",
    }
    deploy(stage, name, execute[where], decoupled=True)
    took, answers = ask_stream(stage.server, name)
    assert answers == ["data", "error"]
    figures = Figures(stage.server, name)
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    assert SECOND <= figures.responses[1]["fail"] <= took - QUEUE - FIRST


@pytest.mark.parametrize("where", ["in execute", "on a thread"])
def test_durations_of_a_cancelled_request(stage: Stage, where: str) -> None:
    name = f"stop_{where.rsplit(maxsplit=1)[-1]}"
    execute = {
        "in execute": "for request in requests: send_until_cancelled(request)",
        "on a thread": "on_threads(send_until_cancelled, requests)",
    }
    deploy(stage, name, execute[where], decoupled=True)
    stream = Stream(stage.server, name)
    stream.wait(answers=1)
    time.sleep(SECOND)
    stream.cancel()
    wait_until(lambda: canceled(stage.server, name) == 1, "the cancellation", stage.server)
    took = time.monotonic() - stream.begun
    stream.close()
    figures = Figures(stage.server, name)
    figures.check_failure(took, QUEUE + FIRST + SECOND)
    assert SECOND <= figures.responses[1]["cancel"] <= took - QUEUE - FIRST
    assert figures.responses[1].keys() == {"cancel"}


# Models that call others.


def test_an_ensemble_has_the_sums_of_its_steps(stage: Stage) -> None:
    deploy(stage, "step_one", ANSWER)
    deploy(stage, "step_two", ANSWER)
    deploy_ensemble(stage, "both", "step_one", "step_two")
    took = ask(stage.server, "both")
    steps = [Figures(stage.server, name) for name in ("step_one", "step_two")]
    for step in steps:
        step.check(took - QUEUE - COMPUTE, queue=QUEUE, compute_infer=COMPUTE)
    both = Figures(stage.server, "both", is_ensemble=True)
    both.check(took, compute_infer=2 * COMPUTE)
    both.check_batch()
    assert both.secs["success"] >= 2 * (QUEUE + COMPUTE)
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert both.stats["inference_stats"][part]["ns"] == sums


def test_an_ensemble_of_ensembles_has_the_sums_of_all_steps(stage: Stage) -> None:
    deploy(stage, "inner_step", ANSWER)
    deploy_ensemble(stage, "inner", "inner_step", "inner_step")
    deploy(stage, "outer_step", ANSWER)
    deploy_ensemble(stage, "outer", "inner", "outer_step")
    took = ask(stage.server, "outer")
    outer = Figures(stage.server, "outer", is_ensemble=True)
    outer.check(took, compute_infer=3 * COMPUTE)
    steps = [Figures(stage.server, "inner", is_ensemble=True), Figures(stage.server, "outer_step")]
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert outer.stats["inference_stats"][part]["ns"] == sums


def test_durations_of_an_ensemble_with_a_decoupled_step(stage: Stage) -> None:
    deploy(stage, "source", STREAMING["in execute"]["execute"], decoupled=True)
    deploy(stage, "sink", ANSWER, extra="")
    deploy_ensemble(stage, "flow", "source", "sink")
    took, answers = ask_stream(stage.server, "flow")
    figures = Figures(stage.server, "flow", is_ensemble=True)
    assert figures.counts["success"] == 1
    steps = [Figures(stage.server, name) for name in ("source", "sink")]
    for part in COMPUTES:
        sums = sum(step.stats["inference_stats"][part]["ns"] for step in steps)
        assert figures.stats["inference_stats"][part]["ns"] == sums
    assert answers[:2] == ["data", "data"]
    assert figures.responses[0]["success"] >= QUEUE + FIRST + COMPUTE
    whole = sum(response["compute_infer"] for response in figures.responses)
    assert QUEUE + FIRST + SECOND + COMPUTE <= whole <= took
    assert figures.secs["success"] <= took


def test_durations_of_a_model_that_calls_another(stage: Stage) -> None:
    deploy(stage, "called", ANSWER)
    deploy(stage, "calls", f"time.sleep({FIRST})\nreturn [call('called', request) for request in requests]")
    took = ask(stage.server, "calls")
    Figures(stage.server, "calls").check(took, queue=QUEUE, compute_infer=FIRST + QUEUE + COMPUTE)
    Figures(stage.server, "called").check(took - QUEUE - FIRST, queue=QUEUE, compute_infer=COMPUTE)


# Loads.


def test_the_duration_of_a_load(stage: Stage) -> None:
    stage.add("loads", methods=f"def initialize(self, args): time.sleep({INITIALIZE})")
    begun = time.monotonic()
    assert load(stage.server, "loads") == (200, "")
    took = time.monotonic() - begun
    assert INITIALIZE <= metric(stage.server, "nv_model_load_duration_secs", "loads") <= took
