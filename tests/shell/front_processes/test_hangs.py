"""Processes of a server that hang, because they are stopped by a signal, are ended and replaced."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.background import in_background
from support.calls import executing, load
from support.front_ends import TWO, connections_to_each, front_ends, wait_for_front_ends
from support.served import Stage, add_python, alive, children, descendants, infer, workers
from support.server import RunningServer, Start, start_server, wait_until

LIMIT_S = 2
HANG_TIMEOUT = f"--hang-timeout-secs={LIMIT_S}"
SLOW = "note(value(requests[0]))\ntime.sleep(value(requests[0]))\nreturn [answer(request) for request in requests]"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    repository = tmp_path_factory.mktemp("stage") / "models"
    repository.mkdir()
    explicit = ["--model-repository", repository, "--model-control-mode=explicit"]
    running = start_server(tmp_path_factory.mktemp("log"), [TWO, HANG_TIMEOUT, *explicit])
    stage = Stage(running, repository)
    stage.deploy("slow", SLOW)
    yield stage
    psutil.Process(running.process.pid).resume()
    assert running.stop() == 0, running.log


@pytest.fixture
def server(stage: Stage) -> RunningServer:
    wait_for_front_ends(stage.server)
    return stage.server


def hung(server: RunningServer) -> Counter[str]:
    """How many processes of each kind were ended because they hung."""
    name = r'halimede_hung_processes_total\{process="(\w+)"\} (\d+)'
    return Counter({kind: int(count) for kind, count in re.findall(name, server.metrics())})


def zygote_of(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def test_a_front_end_that_is_stopped_is_replaced(server: RunningServer):
    before, count = front_ends(server), hung(server)
    before[1].suspend()
    wait_for_front_ends(server, besides=before[1:])
    assert front_ends(server)[0] == before[0]
    assert hung(server) - count == {"frontend": 1}
    assert f"front-end-1 pid={before[1].pid} running> hangs: it has shown no sign of life for 2." in server.log
    assert "front-end process 1 ended by signal 9 (it hung for 2." in server.log


def test_a_worker_that_is_stopped_is_replaced_and_fails_what_it_had_begun(stage: Stage, server: RunningServer):
    (stopped,) = workers(server, "slow")
    count = hung(server)
    begun = in_background(lambda: infer(server, "slow", 60))
    wait_until(lambda: "60.0" in stage.notes("slow"), "the execution", server)
    stopped.suspend()
    next_one = in_background(lambda: infer(server, "slow", 0))
    status, text = begun.result(30)
    assert (status, f"It ended by signal 9 (it hung for {LIMIT_S}." in str(text)) == (500, True), text
    assert next_one.result(30) == (200, [0])
    assert not alive([stopped])
    assert hung(server) - count == {"worker": 1}


def test_a_zygote_that_is_stopped_is_replaced_with_its_workers(stage: Stage, server: RunningServer):
    stopped = zygote_of(workers(server, "slow")[0])
    before, fronts, count = children(stopped.pid), front_ends(server), hung(server)
    stage.add("late")
    stopped.suspend()
    assert load(server, "late") == (200, ""), "the load tries again"
    assert f"the process that starts workers hung for {LIMIT_S}." in server.log
    wait_until(lambda: not alive([stopped, *before]), "their end", server)
    assert infer(server, "late", 3) == (200, [3])
    wait_until(lambda: server.get("/v2/models/slow/ready").status == 200, "the other model's process", server)
    assert hung(server) - count == {"zygote": 1}
    assert front_ends(server) == fronts


def test_processes_that_wait_longer_than_the_limit_do_not_hang(server: RunningServer):
    """A model that waits, and all processes while the server and they are stopped, as on a suspended machine."""
    core = psutil.Process(server.process.pid)
    everyone = descendants(core.pid)
    waiting = in_background(lambda: infer(server, "slow", 2 * LIMIT_S))
    wait_until(lambda: executing(server, "slow") == 1, "the execution", server)
    for group in ([core], [core, *everyone]):
        for each in group:
            each.suspend()
        time.sleep(1.5 * LIMIT_S)  # the wait is the purpose
        for each in group:
            each.resume()
        wait_until(
            lambda: server.get("/v2/health/ready").status == 200, "the core's next beat", server, limit_s=LIMIT_S
        )
    assert waiting.result(30) == (200, [2 * LIMIT_S])
    assert infer(server, "slow", 0) == (200, [0])
    assert descendants(core.pid) == everyone


@pytest.mark.parametrize("limit_s", [LIMIT_S, 1000])
def test_a_stop_ends_in_time_while_processes_hang(start: Start, repository: Path, limit_s: int):
    """Without a limit at that of the stop: then no process is left either."""
    add_python(repository, "slow", SLOW)
    server = start("--model-repository", repository, f"--hang-timeout-secs={limit_s}", "--exit-timeout-secs=8")
    with connections_to_each(server):
        everyone = descendants(server.process.pid)
        for each in (front_ends(server)[0], *workers(server, "slow"), zygote_of(workers(server, "slow")[0])):
            each.suspend()
        begun = time.monotonic()
        assert server.stop() == (0 if limit_s == LIMIT_S else 1), server.log
        assert time.monotonic() - begun < 10
    wait_until(lambda: not alive(everyone), "the end of all processes")
