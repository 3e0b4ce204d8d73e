"""Front-end processes that are killed or hang, and the death of the core."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.background import in_background
from support.calls import ONES_JSON, executing, index, metric, pending
from support.front_ends import TWO, Connection, connections_to_each, front_ends, wait_for_front_ends
from support.models import add_identity
from support.processes import holding_no_more, open_files
from support.served import Stage, add_python, alive, body, children, descendants
from support.server import RunningServer, start_server, wait_until

HELD = """
for request in requests:
    note("begun")
    while not request.is_cancelled():
        time.sleep(0.005)
    note("cancelled")
return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)) for _ in requests]
"""
WAITS = """
def initialize(self, args):
    note("begun")
    while not os.path.exists(NOTES + ".go"):
        time.sleep(0.005)
"""
QUICK = "/v2/models/quick/infer"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    repository = tmp_path_factory.mktemp("stage") / "models"
    repository.mkdir()
    add_identity(repository, "quick")
    add_python(repository, "held", HELD, max_batch_size=0)
    running = start(tmp_path_factory.mktemp("log"), repository)
    yield Stage(running, repository)
    assert running.process.poll() is None, running.log
    assert running.stop() == 0, running.log


def start(log: Path, repository: Path) -> RunningServer:
    explicit = ["--model-control-mode=explicit", "--load-model=quick", "--load-model=held"]
    return start_server(log, [TWO, "--model-repository", repository, *explicit])


@pytest.fixture
def server(stage: Stage) -> RunningServer:
    return stage.server


@pytest.fixture
def fronts(server: RunningServer) -> Iterator[list[Connection]]:
    wait_for_front_ends(server)
    with connections_to_each(server) as found:
        yield found


def kill(connection: Connection) -> None:
    os.kill(connection.pid, signal.SIGKILL)


def ends(server: RunningServer) -> list[str]:
    return [line for line in server.log.splitlines() if "front-end process" in line and "ended by" in line]


def one_of_each(fronts: list[Connection]) -> list[Connection]:
    by_pid = {front.pid: front for front in fronts}
    return list(by_pid.values())


def test_the_death_of_one_ends_only_its_own_requests(stage: Stage, fronts: list[Connection]):
    server = stage.server
    first, second = one_of_each(fronts)
    before, logged = front_ends(server), len(ends(server))
    failed = metric(server, "nv_inference_request_failure", "held", 'reason="CANCELED",')
    held = json_of(1.0)
    with connections_to_each(server, each=4) as more:
        mine = [one for one in more if one.pid == first.pid][:4]
        lost = [in_background(lambda one=one: one.post("/v2/models/held/infer", held)) for one in mine]
        wait_until(lambda: executing(server, "held") == 1, "an execution", server)
        wait_until(lambda: pending(server, "held") == 3, "three requests that wait", server)
        is_over = threading.Event()

        def use() -> set[int]:
            found = set()
            while not is_over.is_set():
                found.add(second.post(QUICK, ONES_JSON).status)
            return found

        used = in_background(use)
        kill(first)
        for call in lost:
            with pytest.raises(ConnectionError):
                call.result(30)
    wait_until(lambda: "cancelled" in stage.notes("held"), "the model to see the cancellation", server)
    wait_until(lambda: (executing(server, "held"), pending(server, "held")) == (0, 0), "no request of 'held'", server)
    assert metric(server, "nv_inference_request_failure", "held", 'reason="CANCELED",') == failed + 4

    wait_for_front_ends(server, besides=[each for each in before if each.pid == first.pid])
    is_over.set()
    assert used.result(30) == {200}
    after = front_ends(server)
    assert len(after) == 2
    assert second.pid in [each.pid for each in after]
    (line,) = ends(server)[logged:]
    number = [each.pid for each in before].index(first.pid)
    assert f"front-end process {number} ended by signal 9: its connections are lost, and it is started again" in line


def json_of(*values: float) -> str:
    return json.dumps(body(*values, batch=False))


def test_each_of_three_deaths_in_a_row_is_followed_by_a_start(server: RunningServer):
    for _ in range(3):
        wait_for_front_ends(server)
        before = front_ends(server)
        os.kill(before[1].pid, signal.SIGKILL)
        wait_for_front_ends(server, besides=before[1:])
        after = front_ends(server)
        assert (after[0], after[1] == before[1]) == (before[0], False)
        with connections_to_each(server) as found:
            for front in found:
                assert front.post(QUICK, ONES_JSON).status == 200


def test_the_death_of_all_at_once(server: RunningServer):
    wait_for_front_ends(server)
    before = front_ends(server)
    for each in before:
        each.kill()
    # The kernel keeps new connections until a front end accepts them.
    assert server.post(QUICK, ONES_JSON).status == 200
    wait_for_front_ends(server, besides=before)


def test_the_death_of_their_zygote(server: RunningServer):
    wait_for_front_ends(server)
    before = front_ends(server)
    before[0].parent().kill()  # type: ignore[union-attr]
    wait_until(lambda: not alive(before), "their end", server)
    wait_for_front_ends(server, besides=before)
    with connections_to_each(server) as found:
        assert {front.post(QUICK, ONES_JSON).status for front in found} == {200}


def test_a_load_continues_after_the_death_of_its_front_end(stage: Stage, fronts: list[Connection]):
    server, first = stage.server, fronts[0]
    add_python(stage.repository, "late", methods=WAITS)
    loading = in_background(lambda: first.post("/v2/repository/models/late/load"))
    wait_until(lambda: stage.notes("late") == ["begun"], "the load to begin", server)
    kill(first)
    with pytest.raises(ConnectionError):
        loading.result(30)

    (stage.repository.parent / "late.notes.go").touch()

    wait_until(lambda: index(server)["late", "1"][0] == "READY", "the model to be ready", server)
    wait_for_front_ends(server)


def test_a_front_end_that_hangs_does_not_get_all_new_connections(server: RunningServer, fronts: list[Connection]):
    """It has the fewest connections, but does not accept the next one."""
    hung, other = psutil.Process(fronts[0].pid), fronts[-1]
    hung.suspend()
    try:
        for _ in range(20):
            assert server.post(QUICK, ONES_JSON).status == 200
        assert other.post(QUICK, ONES_JSON).status == 200
    finally:
        hung.resume()
    assert fronts[0].post(QUICK, ONES_JSON).status == 200


def test_signals_that_all_processes_get_end_no_front_end(server: RunningServer, fronts: list[Connection]):
    """A terminal and a supervisor signal the whole process group; the core decides."""
    for each in front_ends(server):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
            each.send_signal(number)
    for front in fronts:
        assert front.post(QUICK, ONES_JSON).status == 200


def test_the_death_of_the_core_leaves_no_process(tmp_path: Path, stage: Stage):
    running = start(tmp_path, stage.repository)
    try:
        with connections_to_each(running) as fronts:
            calls: list[Any] = [
                in_background(lambda one=one: one.post("/v2/models/held/infer", json_of(1.0))) for one in fronts
            ]
            wait_until(lambda: executing(running, "held") == pending(running, "held") == 1, "both requests", running)
            everyone = descendants(running.process.pid)
            assert len([each for each in everyone if each.name().startswith("front-end")]) == 2
            running.process.kill()
            running.process.wait()
            for call in calls:
                with pytest.raises(ConnectionError):
                    call.result(30)
        wait_until(lambda: not alive(everyone), f"the end of {everyone}")
        assert "Traceback" not in running.log
        with pytest.raises(ConnectionRefusedError):
            running.get("/v2/health/live")
    finally:
        running.kill()


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.large)])
def test_no_restart_leaves_a_zombie_or_a_descriptor(tmp_path: Path, stage: Stage, count: int):
    """All processes die three times; a place waits longer before each restart."""
    arguments = [f"--frontend-processes={count}", "--model-repository", stage.repository]
    running = start_server(tmp_path, [*arguments, "--model-control-mode=explicit", "--load-model=quick"])
    try:
        core = psutil.Process(running.process.pid)

        def restart() -> None:
            before = front_ends(running)
            for each in before:
                each.kill()
            wait_for_front_ends(running, count, besides=before)

        restart()
        wait_until(lambda: len(front_ends(running)) == count, "all processes", running)
        with holding_no_more(core.pid, growth_bytes=16 << 20):
            for _ in range(2):
                restart()
        zombies = [each for each in descendants(core.pid) if each.status() == psutil.STATUS_ZOMBIE]
        assert zombies == []
        assert [
            len(children(each.pid)) for each in children(core.pid) if front_ends(running)[0] in children(each.pid)
        ] == [count]
        assert running.stop() == 0, running.log
    finally:
        running.kill()


def test_a_restart_waits_for_free_descriptors(tmp_path: Path, stage: Stage):
    """With one more each time the start fails at a later step, of which none keeps descriptors."""
    running = start(tmp_path, stage.repository)
    try:
        # The tables of the start read files.
        wait_until(lambda: "Started Metrics Service" in running.log, "the end of the start", running)
        core = psutil.Process(running.process.pid)
        _, hard = core.rlimit(psutil.RLIMIT_NOFILE)
        descriptors = open_files(core.pid)
        before = front_ends(running)
        # Those of the process that dies are free then.
        allowed = descriptors - 3
        core.rlimit(psutil.RLIMIT_NOFILE, (allowed, hard))
        before[0].kill()

        def failures() -> int:
            return running.log.count("Too many open files")

        def is_started() -> bool:
            return "front-end process 0 serves again" in running.log

        wait_until(lambda: failures() == 1, "the first start to fail", running)
        allowed += 4
        while not is_started():
            allowed += 1
            core.rlimit(psutil.RLIMIT_NOFILE, (allowed, hard))
            failed = failures()
            wait_until(lambda failed=failed: failures() > failed or is_started(), "a start", running)
        assert failures() > 1
        wait_for_front_ends(running, besides=before[:1])
        wait_until(lambda: open_files(core.pid) <= descriptors, f"{descriptors} open files again", running)
        assert "Traceback" not in running.log
    finally:
        running.kill()


REFUSES_THREADS = """
import os
from concurrent.futures import ThreadPoolExecutor
submit = ThreadPoolExecutor.submit

def refusing(self, *arguments, **named):
    if os.path.exists({flag!r}):
        raise RuntimeError("can't start new thread")
    return submit(self, *arguments, **named)

ThreadPoolExecutor.submit = refusing
"""
"""A played machine that has no thread left while the file exists."""


def test_a_restart_waits_for_threads(tmp_path: Path, stage: Stage):
    flag = tmp_path / "no threads"
    arguments = [TWO, "--model-repository", stage.repository, "--model-control-mode=explicit"]
    server = start_server(tmp_path, arguments, first=REFUSES_THREADS.format(flag=str(flag)))
    try:
        before = front_ends(server)
        flag.touch()
        before[0].kill()
        refusal = "a front-end process cannot be started: RuntimeError: can't start new thread"
        wait_until(lambda: refusal in server.log, "the refusal", server)

        flag.unlink()

        wait_for_front_ends(server, besides=before[:1])
        assert server.stop() == 0, server.log
    finally:
        server.kill()
