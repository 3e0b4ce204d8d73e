"""A python model's process that dies, hangs or corrupts its channel fails only the batch that it holds."""

import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.background import in_background
from support.calls import executing, index, load, metric
from support.latency import median_ms
from support.processes import cpu_secs
from support.served import (
    BATCHING,
    ECHO,
    Stage,
    add_python,
    alive,
    body,
    children,
    descendants,
    infer,
    parameter,
    workers,
    zygote,
)
from support.server import RunningServer, Start, wait_until


def failed(instance: str, why: str) -> str:
    return f"Failed to process the request(s) for model instance '{instance}', message: {why}"


def dead(instance: str, how: str) -> str:
    return failed(instance, f"Stub process '{instance}' is not healthy. It ended by {how}.")


@dataclass
class Caller:
    """Results of requests that are sent in sequence."""

    answers: list[tuple[float, int, object]] = field(default_factory=list)
    """The monotonic time of each answer, its status, and the numbers or the error."""
    slowest_secs: float = 0.0

    @property
    def statuses(self) -> Counter[int]:
        return Counter(status for _, status, _ in self.answers)


@contextmanager
def calling(server: RunningServer, model: str, pause_secs: float = 0.01) -> Iterator[Caller]:
    """Send requests at an interval on one connection, until the block ends."""
    caller = Caller()
    stop = threading.Event()

    def call() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        number = 0.0
        while not stop.wait(pause_secs):
            number += 1
            begun = time.monotonic()
            connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body(number)))
            response = connection.getresponse()
            document = json.loads(response.read())
            now = time.monotonic()
            content = document["outputs"][0]["data"] if response.status == 200 else document["error"]
            if response.status == 200:
                assert content == [number]
            caller.answers.append((now, response.status, content))
            caller.slowest_secs = max(caller.slowest_secs, now - begun)
        connection.close()

    done = in_background(call)
    try:
        yield caller
    finally:
        stop.set()
        done.result(70)


def is_ready(server: RunningServer, model: str) -> bool:
    return server.get(f"/v2/models/{model}/ready").status == 200


def worker_health(server: RunningServer, model: str) -> object:
    """The state of the model's processes in the index, which only HTTP reports."""
    found = server.post("/v2/repository/index").json
    return next(entry["workers"] for entry in found if entry["name"] == model)


def recover(server: RunningServer, model: str) -> None:
    wait_until(lambda: is_ready(server, model), f"{model} to be ready again", server)


def test_no_request_fails_when_an_idle_worker_is_killed(stage: Stage) -> None:
    server = stage.server
    stage.deploy("idle")
    recoveries, unready = [], []
    with calling(server, "idle") as caller:
        for _ in range(4):  # a fifth death within a minute would park it
            recover(server, "idle")
            [worker] = workers(server, "idle")
            wait_until(lambda: len(caller.answers) > 10, "requests", server)
            killed = time.monotonic()
            worker.kill()
            # It usually reaches the worker while the worker is dying.
            at_once = in_background(lambda: infer(server, "idle", 3))
            wait_until(lambda: not is_ready(server, "idle"), "the model to be not ready", server)
            unready.append(time.monotonic() - killed)
            assert server.get("/v2/health/live").status == 200
            wait_until(lambda killed=killed: caller.answers[-1][0] > killed + 0.5, "an answer", server)
            assert at_once.result(30) == (200, [3])
            recoveries.append(next(at for at, _, _ in caller.answers if at > killed + 0.05) - killed)
    print(f"not ready {max(unready) * 1e3:.0f} ms after the death, recovered after {max(recoveries) * 1e3:.0f} ms")
    assert caller.statuses == Counter({200: len(caller.answers)}), caller.answers
    assert min(unready) < 1  # the goal is 0.2 s; the shortest of four, because other load of the machine delays some
    assert caller.slowest_secs < 10  # the goal is 1 s plus the model's load


DEATHS = {
    -1: ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9"),
    -2: ("ctypes.string_at(0)", "signal 11"),
    -3: ("os._exit(3)", "exit code 3"),
}
DYING = "".join(
    f"if value(request) == {number}:\n        note(time.monotonic_ns())\n        {how}\n    "
    for number, (how, _) in DEATHS.items()
)


def test_a_death_fails_only_its_batch_and_immediately(stage: Stage) -> None:
    server = stage.server
    stage.deploy("dying", f"for request in requests:\n    {DYING}\n{ECHO}", extra=BATCHING)
    for number, (_, how) in DEATHS.items():
        mates = [in_background(lambda n=n: (infer(server, "dying", n), time.monotonic_ns())) for n in (1, number, 2)]
        answers = [mate.result(30) for mate in mates]
        assert [answer for answer, _ in answers] == [(500, dead("dying_0_0", how))] * 3
        late_ms = (max(at for _, at in answers) - int(stage.notes("dying")[-1])) / 1e6
        print(f"{how}: answered {late_ms:.1f} ms after the death")
        assert late_ms < 5000  # the goal is a few milliseconds
        assert infer(server, "dying", 5, 6) == (200, [5, 6])
    assert metric(server, "nv_inference_request_success", "dying") == 3


@pytest.mark.load
@pytest.mark.parametrize("number", DEATHS)
def test_a_death_fails_its_batch_within_50_ms(stage: Stage, number: int) -> None:
    server = stage.server

    def late_ms(_: int) -> float:
        recover(server, "dying")
        assert infer(server, "dying", number)[0] == 500
        return (time.monotonic_ns() - int(stage.notes("dying")[-1])) / 1e6

    stage.deploy("dying", f"for request in requests:\n    {DYING}\n{ECHO}")
    # A fifth death within a minute would park it.
    assert median_ms(late_ms, attempts=3) <= 50


def test_a_death_does_not_affect_other_instances_of_its_model(stage: Stage) -> None:
    server = stage.server
    execute = f"if value(requests[0]) == 7: time.sleep(0.5)\nif value(requests[0]) == -3: os._exit(3)\n{ECHO}"
    stage.deploy("pair", execute, count=2)
    slow = in_background(lambda: infer(server, "pair", 7))
    wait_until(lambda: executing(server, "pair") == 1, "the execution", server)
    before = workers(server, "pair")
    status, text = infer(server, "pair", -3)
    assert (status, text) in [(500, dead(f"pair_0_{n}", "exit code 3")) for n in (0, 1)]
    assert is_ready(server, "pair")
    assert [infer(server, "pair", n) for n in (1, 2)] == [(200, [1]), (200, [2])]
    assert slow.result(30) == (200, [7])
    wait_until(lambda: len(workers(server, "pair")) == 2, "the second instance", server)
    assert len(set(before) & set(workers(server, "pair"))) == 1


def test_a_model_that_dies_at_every_request_is_parked_until_it_is_loaded(stage: Stage) -> None:
    server = stage.server
    stage.deploy("loop", f"if value(requests[0]) < 0: ctypes.string_at(0)\n{ECHO}")
    log_start = len(server.log)
    before = cpu_secs(server)
    for _ in range(5):
        assert infer(server, "loop", -1) == (500, dead("loop_0_0", "signal 11"))
    refusal = "model 'loop' is not ready: worker exited 5 times (last: signal 11)"
    assert infer(server, "loop") == (503, refusal)
    assert not is_ready(server, "loop")
    assert workers(server, "loop") == []
    wait_until(lambda: index(server)["loop", "1"][0] == "UNAVAILABLE", "the state in the index", server, 10)
    assert index(server)["loop", "1"] == ("UNAVAILABLE", f"Unavailable: {refusal}")
    assert server.get("/v2/health/live").status == 200
    assert cpu_secs(server) - before < 2  # the restarts took 1.5 s, nearly all of it waiting
    assert worker_health(server, "loop") == {
        "failure": "worker exited 5 times (last: signal 11)",
        "out_of_memory": False,
    }
    lines = [line for line in server.log[log_start:].splitlines() if "loop_0_0" in line and " http:500] " not in line]
    assert len(lines) <= 12, lines
    assert load(server, "loop") == (200, "")
    assert infer(server, "loop", 4) == (200, [4])
    assert index(server)["loop", "1"] == ("READY", "")
    assert worker_health(server, "loop") == {}


def test_a_model_that_dies_at_every_start_is_parked_until_it_is_loaded(stage: Stage, tmp_path: Path) -> None:
    server = stage.server
    broken = tmp_path / "broken"
    initialize = f"def initialize(self, args):\n    if os.path.exists({str(broken)!r}): os.kill(os.getpid(), 11)\n"
    stage.deploy("restart", methods=initialize)
    broken.touch()
    workers(server, "restart")[0].kill()
    waiting = in_background(lambda: infer(server, "restart"))
    reason = "worker exited 5 times (last: Stub process 'restart_0_0' is not healthy: it ended by signal 11 while it started)"
    assert waiting.result(60) == (503, f"model 'restart' is not ready: {reason}")
    assert infer(server, "restart") == (503, f"model 'restart' is not ready: {reason}")
    wait_until(lambda: index(server)["restart", "1"][0] == "UNAVAILABLE", "the state in the index", server, 10)
    assert index(server)["restart", "1"][1] == f"Unavailable: model 'restart' is not ready: {reason}"
    status, text = load(server, "restart")
    assert (status, "it ended by signal 11 while it started" in text) == (400, True), text
    broken.unlink()
    assert load(server, "restart") == (200, "")
    assert infer(server, "restart", 4) == (200, [4])


def test_a_request_that_kills_its_process_fails_few_others(stage: Stage) -> None:
    server = stage.server
    stage.deploy(
        "poison", f"if any(value(r) == -1 for r in requests): os._exit(3)\n{ECHO}", extra="dynamic_batching {}"
    )
    with calling(server, "poison") as one, calling(server, "poison") as two:
        wait_until(lambda: len(one.answers) > 50, "requests", server)
        assert infer(server, "poison", -1) == (500, dead("poison_0_0", "exit code 3"))
        seen = len(one.answers)
        wait_until(lambda: len(one.answers) > seen + 50, "requests after it", server)
    failures = one.statuses + two.statuses
    del failures[200]
    # At most one batch of three requests, one of which kills the process.
    assert failures.total() <= 2, failures


def test_a_hung_model_is_ended_when_it_has_a_time_limit(stage: Stage) -> None:
    server = stage.server
    hang = f"if value(requests[0]) < 0: time.sleep(600)\n{ECHO}"
    stage.deploy("limited", hang, extra=parameter("EXECUTION_TIMEOUT_MS", "300") + BATCHING)
    begun = time.monotonic()
    mates = [in_background(lambda: infer(server, "limited", -1)) for _ in range(2)]
    for mate in mates:
        status, text = mate.result(30)
        assert (status, "timed out after 300 ms" in str(text)) == (500, True), text
    assert 0.3 < time.monotonic() - begun < 5
    assert infer(server, "limited", 3) == (200, [3])


def test_a_hung_model_that_ignores_sigterm_is_killed_after_its_time_limit(stage: Stage) -> None:
    server = stage.server
    hang = f"""
        if value(requests[0]) < 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        {ECHO}
        """
    stage.deploy("stubborn", hang, extra=parameter("EXECUTION_TIMEOUT_MS", "100"))
    (hung,) = workers(server, "stubborn")
    status, text = infer(server, "stubborn", -1)
    assert (status, "timed out after 100 ms" in str(text)) == (500, True), text
    # A new process serves while this one has two seconds to end.
    assert infer(server, "stubborn", 3) == (200, [3])
    wait_until(lambda: not hung.is_running(), "its end", server)


def test_requests_queued_at_a_hung_model_get_their_queue_timeout(stage: Stage) -> None:
    server = stage.server
    policy = "default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 200000 }"
    stage.deploy(
        "hung", f"if value(requests[0]) < 0: time.sleep(600)\n{ECHO}", extra=f"dynamic_batching {{ {policy} }}"
    )
    hung = in_background(lambda: infer(server, "hung", -1))
    wait_until(lambda: executing(server, "hung") == 1, "the execution", server)
    begun = time.monotonic()
    assert infer(server, "hung") == (503, "Request timeout expired")
    assert time.monotonic() - begun < 5
    assert infer(server, "bystander", 3) == (200, [3])
    workers(server, "hung")[0].kill()
    assert hung.result(30) == (500, dead("hung_0_0", "signal 9"))


def test_a_hung_model_does_not_hold_the_exit(start: Start, repository: Path) -> None:
    add_python(
        repository, "hung", f"signal.signal(15, signal.SIG_IGN)\nif value(requests[0]) < 0: time.sleep(600)\n{ECHO}"
    )
    server = start("--model-repository", repository, "--exit-timeout-secs=1")
    everything = descendants(server.process.pid)
    hung = in_background(lambda: infer(server, "hung", -1))
    wait_until(lambda: executing(server, "hung") == 1, "the execution", server)
    begun = time.monotonic()
    code = server.stop(30)
    took = time.monotonic() - begun
    assert hung.result(10)[0] == 503
    assert (code, took < 8) == (1, True), server.log  # the goal is 1 + 2 s
    wait_until(lambda: not alive(everything), "the end of all processes")


def test_requests_wait_for_a_stopped_worker(stage: Stage) -> None:
    server = stage.server
    stage.deploy("still", extra="dynamic_batching {}")
    [worker] = workers(server, "still")
    worker.suspend()
    waiting = [in_background(lambda n=n: infer(server, "still", n)) for n in range(1, 9)]
    time.sleep(2)  # the time for which the process is stopped
    assert not any(each.done() for each in waiting)
    assert infer(server, "bystander", 3) == (200, [3])
    worker.resume()
    assert [each.result(30) for each in waiting] == [(200, [n]) for n in range(1, 9)]
    assert workers(server, "still") == [worker]


CHANNEL = """
import socket, stat
def channel():
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [n for n in numbers if n > 2 and os.path.exists(f"/proc/self/fd/{n}") and stat.S_ISSOCK(os.fstat(n).st_mode)]
"""
# On a busy machine the server answers before the zygote has reported the exit status.
CLOSED = "signal 9|It closed its channel"
HOSTILE = {
    "garbage": ("for n in channel(): os.write(n, b'\\xff' * 1000)\ntime.sleep(600)", "It sent garbage"),
    "a lot": ("for n in channel():\n    while True: os.write(n, b'\\x00' * 65536)", "It sent garbage"),
    "closes": ("for n in channel(): os.close(n)\ntime.sleep(600)", CLOSED),
    "shuts": ("for n in channel(): socket.socket(fileno=os.dup(n)).shutdown(2)\ntime.sleep(600)", CLOSED),
}


def test_a_worker_that_misuses_its_channel_is_replaced(stage: Stage) -> None:
    server = stage.server
    execute = "".join(
        f"if value(requests[0]) == {-number}:\n{''.join(f'    {line}{chr(10)}' for line in code.splitlines())}"
        for number, (code, _) in enumerate(HOSTILE.values(), 1)
    )
    stage.deploy("hostile", execute + ECHO, head=CHANNEL)
    for number, (what, (_, how)) in enumerate(HOSTILE.items(), 1):
        before = workers(server, "hostile")
        status, text = infer(server, "hostile", -number)
        assert (status, bool(re.search(how, str(text)))) == (500, True), (what, text)
        assert infer(server, "hostile", 3) == (200, [3]), what
        assert workers(server, "hostile") != before
    assert server.get("/v2/health/live").status == 200


FLOODS = {
    "print(f'line {n} of a flood', flush=True)": r"\d+ lines of its output were left out",
    "pb_utils.Logger.log_info(f'line {n} of a flood')": r"\d+ (more )?lines",
}


@pytest.mark.parametrize("how", FLOODS, ids=["print", "Logger"])
def test_a_flood_of_output_is_limited_and_counted(stage: Stage, how: str) -> None:
    server = stage.server
    flood = f"""
        if value(requests[0]) < 0:
            end = time.monotonic() + 1
            n = 0
            while time.monotonic() < end:
                {how}
                n += 1
            note(n)
        {ECHO}
        """
    stage.deploy("flood", flood)
    before = workers(server, "flood")
    log_start = len(server.log)
    flooding = in_background(lambda: infer(server, "flood", -1))
    with calling(server, "bystander") as caller:
        assert flooding.result(60) == (200, [-1])
    print(
        f"{stage.notes('flood')[-1]} lines in a second; a request of another model took {caller.slowest_secs * 1e3:.0f} ms"
    )
    assert caller.statuses == Counter({200: len(caller.answers)})
    assert caller.slowest_secs < 5  # the goal is 20 ms
    assert workers(server, "flood") == before
    wait_until(lambda: re.search(FLOODS[how], server.log[log_start:]), "the count", server, 10)
    lines = server.log[log_start:].count("of a flood")
    assert 0 < lines < 1000, lines  # 100 lines a second are written


WRECKS = {
    1: "os.chdir('/')",
    2: "os.closerange(0, 256)",
    3: "signal.signal(signal.SIGTERM, lambda *_: None); signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    4: "sys.exit(7)",
    5: "threading.Thread(target=time.sleep, args=(600,)).start()",
    6: "os.environ.clear(); sys.path.clear(); sys.stdout = sys.stderr = None",
    7: "threading.Thread(target=lambda: 1 / 0).start()",
}


def test_a_model_that_damages_its_process_affects_only_itself(stage: Stage) -> None:
    server = stage.server
    execute = "".join(f"if value(requests[0]) == {number}: {code}\n" for number, code in WRECKS.items())
    stage.deploy("wreck", execute + ECHO)
    for number in WRECKS:
        wanted = (500, failed("wreck_0_0", "SystemExit: 7")) if number == 4 else (200, [number])
        assert infer(server, "wreck", number) == wanted
        assert infer(server, "wreck", 100) == (200, [100])


FORKS = {
    1: "child = os.fork()\nif child == 0: return [answer(r) for r in requests]\nos.waitpid(child, 0)",
    2: "child = os.fork()\nif child == 0: raise RuntimeError('of the child')\nos.waitpid(child, 0)",
    3: "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        note(os.getpid())\n        time.sleep(600)\n    os._exit(0)",
    4: "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)",
}


def test_child_processes_of_a_model_end_with_it(stage: Stage) -> None:
    server = stage.server
    execute = "".join(
        f"if value(requests[0]) == {number}:\n" + "".join(f"    {line}\n" for line in code.splitlines())
        for number, code in FORKS.items()
    )
    stage.deploy("forks", execute + ECHO)
    for number in FORKS:
        assert infer(server, "forks", number) == (200, [number])
        assert infer(server, "forks", 100) == (200, [100])
    [worker] = workers(server, "forks")
    wait_until(lambda: stage.notes("forks"), "the daemon", server)
    daemon = psutil.Process(int(stage.notes("forks")[0]))
    left = descendants(worker.pid)
    assert daemon in left
    assert len(alive(left)) == 2, left
    stage.clear()
    wait_until(lambda: not alive(left), "the end of what the model has started", server)


def test_sys_exit_in_initialize_is_an_error_of_the_load(stage: Stage) -> None:
    stage.add("leaves", methods="def initialize(self, args): sys.exit(7)")
    status, text = load(stage.server, "leaves")
    assert (status, "SystemExit: 7" in text) == (400, True), text
    assert workers(stage.server, "leaves") == []


def test_the_death_of_the_zygote_fails_at_most_the_batches_in_flight(start: Start, repository: Path) -> None:
    for name in ("one", "two"):
        add_python(repository, name, f"if value(requests[0]) < 0: time.sleep(30)\n{ECHO}")
    server = start("--model-repository", repository)
    busy = in_background(lambda: infer(server, "one", -1))
    wait_until(lambda: executing(server, "one") == 1, "the execution", server)
    with calling(server, "two") as caller:
        wait_until(lambda: len(caller.answers) > 10, "requests", server)
        before = descendants(server.process.pid)
        killed = time.monotonic()
        zygote(server).kill()
        assert busy.result(30) == (500, dead("one_0_0", "signal 9"))
        recover(server, "one")
        wait_until(lambda: caller.answers[-1][0] > killed + 0.5, "answers", server)
    print(f"the longest wait of a request was {caller.slowest_secs * 1e3:.0f} ms")
    assert caller.statuses[500] <= 1, caller.answers
    assert caller.statuses.total() - caller.statuses[500] == caller.statuses[200]
    assert infer(server, "one", 3) == (200, [3])
    assert not alive(before)
    assert len(children(server.process.pid)) == 1
    assert len(workers(server)) == 2
    assert server.stop() == 0
