"""Requests of an ensemble while its steps die or the server stops."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.calls import executing, metric
from support.ensemble_models import add_ensemble, add_plus, chain
from support.models import add_identity
from support.open_loop import Phase, Stream, run_phases
from support.processes import resident_bytes
from support.served import infer, parameter, workers
from support.server import Start, wait_until


def test_a_stop_completes_all_steps_of_accepted_requests(repository: Path, start: Start) -> None:
    add_identity(repository, "slow", dims="4", extra=parameter("execute_delay_ms", "400"))
    add_plus(repository, "plus")
    add_ensemble(repository, "e", chain("slow", "plus", "plus"))
    add_ensemble(repository, "outer", chain("e", "plus"))
    server = start("--model-repository", repository)
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(infer, server, name, 1, 1, 1, 1) for name in ("e", "outer") * 2]
        wait_until(lambda: executing(server, "e") == 4, "all to be accepted", server)
        server.process.send_signal(signal.SIGTERM)
        assert sorted(answer.result()[1][0] for answer in answers) == [3.0, 3.0, 4.0, 4.0]  # type: ignore[index]
    assert server.process.wait(20) == 0


def dying_steps(
    repository: Path, start: Start, seconds: float, every_s: float, growth_mib: float, callers: int = 64
) -> None:
    """Many clients of an ensemble of 8 steps; every few seconds the process of one step is killed."""
    names = [f"step{number}" for number in range(8)]
    for name in names:
        add_plus(repository, name)
    add_ensemble(repository, "e", chain(*names))
    server = start("--model-repository", repository)
    with ThreadPoolExecutor(1) as pool:

        def run(length: float) -> Any:
            stream = Stream("e", server.http_port, "/v2/models/e/infer", content, callers=callers)
            return pool.submit(run_phases, [Phase(length, (stream,))])

        content = '{"inputs":[{"name":"IN","shape":[1,4],"datatype":"FP32","data":[1,1,1,1]}]}'
        run(seconds / 3).result()
        before = resident_bytes(server)
        under_way = run(seconds)
        begun = time.monotonic()
        for name in (names * 100)[: int(seconds / every_s)]:
            while not (alive := workers(server, name)):
                time.sleep(0.01)
            os.kill(alive[0].pid, signal.SIGKILL)
            time.sleep(every_s)
            assert time.monotonic() < begun + 3 * seconds + 30
        (phase,) = under_way.result()
    outcome = phase["e"]
    assert set(outcome.latencies_ms) <= {"200", "500", "503"}, set(outcome.latencies_ms)
    assert sum(len(each) for each in outcome.latencies_ms.values()) == outcome.sent
    assert outcome.count(200) > outcome.count(500) + outcome.count(503)
    assert "in ensemble 'e', " in outcome.bodies.get("500", "in ensemble 'e', ")
    wait_until(lambda: executing(server, "e") == 0, "nothing in flight", server)
    for name in names:
        wait_until(lambda name=name: executing(server, name) == 0, f"nothing in flight in {name}", server)
    assert (resident_bytes(server) - before) / 2**20 < growth_mib
    # The client counts answers within its time; the server also counts the warm-up and requests in flight at the end.
    assert metric(server, "nv_inference_request_success", "e") >= outcome.count(200)
    wait_until(lambda: infer(server, "e", 1, 1, 1, 1)[0] == 200, "all steps to be back", server)
    assert server.stop() == 0


@pytest.mark.parametrize(("seconds", "callers"), [(0.9, 16), pytest.param(3, 64, marks=pytest.mark.large)])
def test_steps_that_die_leave_no_request_unanswered(
    repository: Path, start: Start, seconds: float, callers: int
) -> None:
    dying_steps(repository, start, seconds, every_s=seconds / 3, growth_mib=40, callers=callers)


@pytest.mark.load
@pytest.mark.timeout(300)
def test_steps_that_die_for_a_minute_leave_no_request_unanswered(repository: Path, start: Start) -> None:
    dying_steps(repository, start, seconds=60, every_s=5, growth_mib=40)
