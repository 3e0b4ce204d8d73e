import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from halimede.core.restarts import ProcessExit, describe_exit
from halimede.core.types import ErrorCode, InferenceError
from halimede.processes.zygote import MAX_COMMAND_BYTES
from support.family import FAMILY
from support.processes import open_files
from support.refusals import error_of
from support.server import wait_until
from support.workers import FOLDER, LIMIT_S, Crew, Talk, ended, is_alive, printed

FORKED, EXECUTED = "", sys.executable
BOTH_WAYS = pytest.mark.parametrize("python", [FORKED, EXECUTED], ids=["forked", "executed"])


EXITS = {
    "end(0)": ProcessExit(code=0),
    "end(7)": ProcessExit(code=7),
    "import os; os._exit(3)": ProcessExit(code=3),
    "import sys; sys.exit(4)": ProcessExit(code=4),
    "raise RuntimeError('no')": ProcessExit(code=1),
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": ProcessExit(signal=11),
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": ProcessExit(signal=15),
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)": ProcessExit(signal=2),
}
OF_BOOTSTRAP = (
    "end(7)",
    "import sys; sys.exit(4)",
    "raise RuntimeError('no')",
    "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
)
"""Exits that depend on the code that sets up an executed worker."""


@pytest.mark.parametrize(
    ("code", "python"),
    [
        *((code, FORKED) for code in EXITS),
        *(pytest.param(code, EXECUTED, marks=() if code in OF_BOOTSTRAP else pytest.mark.large) for code in EXITS),
    ],
)
def test_the_exit_of_a_worker_is_reported(crew: Crew, code: str, python: str):
    worker = crew.talk(python=python)

    worker.say(code)

    assert ended(worker.process) == EXITS[code]


def test_a_worker_ends_by_itself_when_its_channel_is_closed(crew: Crew):
    assert crew.talk().end() == ProcessExit(code=0)


def test_an_exception_of_the_entry_is_printed(crew: Crew):
    process = crew.spawn(entry="talkative:fail")

    assert ended(process) == ProcessExit(code=1)
    assert printed(process).endswith("RuntimeError: there is a bug\n")


def test_an_entry_that_does_not_exist_is_printed(crew: Crew):
    process = crew.spawn(entry="no_such_module:main")

    assert ended(process) == ProcessExit(code=1)
    assert "No module named 'no_such_module'" in printed(process)


def test_a_worker_can_be_killed(crew: Crew):
    worker = crew.talk()
    assert worker.ask("1 + 1") == 2
    assert repr(worker.process).endswith(" running>")

    worker.process.kill(signal.SIGKILL)

    assert ended(worker.process) == ProcessExit(signal=9)
    # It has ended: a process that now has its pid gets no signal.
    worker.process.kill(signal.SIGKILL)


def test_a_signal_sent_before_the_worker_runs_is_not_lost(crew: Crew):
    for _ in range(20):
        worker = crew.talk()
        worker.process.kill(signal.SIGTERM)
        assert ended(worker.process) == ProcessExit(signal=15)
        worker.process.close()


def test_a_waiting_task_learns_at_once_that_a_worker_died(crew: Crew):
    async def death(worker: Talk) -> float:
        """How long after the death of the worker the task continues, in seconds."""
        pid = worker.ask("__import__('os').getpid()")
        # The zygote may report it later than the worker answers.
        wait_until(lambda: worker.process.pid == pid, "the process id")
        waiting = asyncio.ensure_future(worker.process.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.wait_for(waiting, LIMIT_S) == ProcessExit(signal=9)
        return time.monotonic() - killed

    took_s = [asyncio.run(death(crew.talk())) for _ in range(3)]

    # The goal is a few milliseconds, not a check once a second. The machine may delay some of the three.
    assert min(took_s) < 0.5


def test_a_wait_can_be_cancelled_and_repeated(crew: Crew):
    worker = crew.talk()

    async def scenario() -> ProcessExit:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.process.wait(), 0.01)
        # The socket is no longer polled, because its descriptor may be reused.
        assert not asyncio.get_running_loop().remove_reader(worker.process.status)
        worker.process.kill(signal.SIGKILL)
        exit_ = await asyncio.wait_for(worker.process.wait(), LIMIT_S)
        assert await worker.process.wait() == exit_
        return exit_

    assert asyncio.run(scenario()) == ProcessExit(signal=9)


@BOTH_WAYS
def test_a_worker_inherits_no_descriptors_of_others(crew: Crew, python: str):
    others = [crew.talk() for _ in range(3)]
    assert [other.ask("1") for other in others] == [1, 1, 1]
    worker = crew.talk(python=python)

    open_ = worker.ask(
        "{int(n): os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{n}')} if (os := __import__('os')) else 0"
    )

    kinds = {number: path.partition(":")[0] for number, path in open_.items()}
    # The descriptor of the listed folder is closed when it is checked.
    assert kinds == {"0": "/dev/null", "1": "pipe", "2": "pipe", "512": "socket"}
    assert open_["1"] == open_["2"]


@BOTH_WAYS
def test_a_worker_leads_its_own_session_without_the_signals_of_others(crew: Crew, python: str):
    worker = crew.talk(python=python)

    seen = worker.ask(
        """
import os, signal, sys, threading
answer = {
    "leads": os.getpid() == os.getpgid(0) == os.getsid(0),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "ignored": sorted(n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN),
    "threads": len(os.listdir("/proc/self/task")),
    "argv": sys.argv,
    "main": sys.modules["__main__"].__dict__.get("__file__"),
    "inheritable": os.get_inheritable(channel.fileno()),
    "oom_score_adj": int(open("/proc/self/oom_score_adj").read()),
}
"""
    )

    assert seen == {
        "leads": True,
        "blocked": [],
        "ignored": [signal.SIGPIPE, signal.SIGXFSZ],
        "threads": 1,
        "argv": [""],
        "main": None,
        "inheritable": False,
        "oom_score_adj": min(int(Path("/proc/self/oom_score_adj").read_text()) + 500, 1000),
    }


@BOTH_WAYS
def test_a_worker_gets_the_servers_environment_with_overrides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_crew: Crew, python: str
):
    monkeypatch.setenv("OF_THE_SERVER", "1")
    monkeypatch.setenv("SET_OVER", "before")
    for name in ("OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)

    environment = {"SET_OVER": "after é", "NEW": ""}
    worker = own_crew.talk(python=python, environment=environment, working_directory=str(tmp_path))

    child = "import json, os; print(json.dumps(dict(os.environ)))"
    wanted = {**json.loads(subprocess.check_output([sys.executable, "-c", child])), **environment}
    assert worker.ask("dict(__import__('os').environ)") == wanted
    # The environment of the C library, too.
    got = worker.ask(f"__import__('subprocess').check_output([{sys.executable!r}, '-c', {child!r}]).decode()")
    assert json.loads(got) == wanted
    assert worker.ask("__import__('os').getcwd()") == str(tmp_path)


@pytest.mark.parametrize("name", ["OPENBLAS_NUM_THREADS", "OPENBLAS_THREAD_TIMEOUT"])
def test_a_setting_of_the_servers_blas_reaches_its_workers(monkeypatch: pytest.MonkeyPatch, own_crew: Crew, name: str):
    monkeypatch.setenv(name, "3")

    assert own_crew.talk().ask(f"__import__('os').environ[{name!r}]") == "3"


def test_the_zygote_imports_a_module_for_all_later_workers(
    tmp_path: Path, own_crew: Crew, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "counted.py").write_text(f"import os\nopen({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} ')")
    (tmp_path / "broken.py").write_text("1 / 0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    for module in ("counted", "counted", "broken", "no_such_module"):
        assert own_crew.talk(module=module).ask("'counted' in __import__('sys').modules") is True

    assert (tmp_path / "pids").read_text().split() == [str(own_crew.launcher.zygote_pid)]


BLAS_CPU = """[
    __import__("halimede.processes.blas", fromlist=["x"]).set_blas_threads(3),
    __import__("time").sleep(0.3),
    sum(each.system_time + each.user_time for each in __import__("psutil").Process().threads()[1:]),
]"""


def test_threads_of_a_workers_blas_spin_for_less_than_a_millisecond(own_crew: Crew):
    _, _, cpu_s = own_crew.talk().ask(BLAS_CPU)

    # In ticks of 10 ms. By default two threads spin for 30 ms each.
    assert cpu_s <= 0.02


@BOTH_WAYS
def test_a_worker_that_closes_descriptors_keeps_its_channel(crew: Crew, python: str):
    worker = crew.talk(python=python)

    assert worker.ask("__import__('os').closerange(3, 256)") is None
    assert worker.ask("2 + 2") == 4


@BOTH_WAYS
def test_output_of_a_worker_is_not_buffered(crew: Crew, python: str):
    worker = crew.talk(python=python)

    with pytest.raises(BlockingIOError):
        os.read(worker.process.output, 1)
    worker.ask("print('café \\ud800', flush=False)")

    assert printed(worker.process, until="\n") == "café \\ud800\n"


def test_a_worker_runs_its_exit_functions(crew: Crew):
    worker = crew.talk()
    worker.ask("__import__('atexit').register(print, 'the end') and None")

    assert worker.end() == ProcessExit(code=0)
    assert printed(worker.process) == "the end\n"


def test_workers_have_different_random_numbers(crew: Crew):
    drawn = [crew.talk().ask("__import__('random').random()") for _ in range(2)]
    drawn_by_numpy = [crew.talk().ask("__import__('numpy').random.random()") for _ in range(2)]

    assert drawn[0] != drawn[1]
    assert drawn_by_numpy[0] != drawn_by_numpy[1]


@BOTH_WAYS
@pytest.mark.parametrize("how", ["import os; os._exit(0)", "import os; os.kill(os.getpid(), 9)"], ids=["exit", "kill"])
def test_processes_of_a_worker_end_with_it(crew: Crew, python: str, how: str):
    bystander = crew.talk()
    bystanders = bystander.ask(FAMILY)
    worker = crew.talk(python=python)
    family = worker.ask(FAMILY)
    assert all(is_alive(pid) for pid in family)

    worker.say(how)
    ended(worker.process)

    wait_until(lambda: not any(is_alive(pid) for pid in family), "the worker's family to die")
    # It is also reaped: no zombie is left.
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in family), "the dead to be reaped")
    assert all(is_alive(pid) for pid in bystanders)


def test_a_daemon_of_a_worker_lives_as_long_as_the_worker(crew: Crew):
    worker, other = crew.talk(), crew.talk()
    daemon = worker.ask(FAMILY)[2]

    other.end()

    assert crew.talk().ask("1") == 1
    assert is_alive(daemon)


SHARES = """
import multiprocessing, os
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
held = SharedMemory(create=True, size=64), multiprocessing.get_context("spawn").Semaphore()
answer = [name for name in os.listdir("/dev/shm") if name in held[0].name or name.startswith("sem.mp-")]
"""


@pytest.mark.parametrize("kill", ["worker", "zygote's end"])
def test_resource_trackers_clean_up_after_a_worker(own_crew: Crew, kill: str):
    before = set(os.listdir("/dev/shm"))
    worker = own_crew.talk()
    assert set(worker.ask(SHARES)) - before
    if kill == "worker":
        worker.process.kill(signal.SIGKILL)
        ended(worker.process)
    else:
        own_crew.launcher.close()
    wait_until(lambda: set(os.listdir("/dev/shm")) <= before, "/dev/shm as it was")


def test_a_closed_launcher_has_no_processes_and_starts_none(own_crew: Crew):
    worker = own_crew.talk()
    family = worker.ask(FAMILY)
    zygote = own_crew.zygote

    own_crew.launcher.close()

    assert not any(is_alive(pid) for pid in [*family, zygote])
    assert ended(worker.process) == ProcessExit(signal=9)
    assert error_of(own_crew.spawn) == InferenceError(
        ErrorCode.UNAVAILABLE, "no process is started: the server is stopping"
    )


@pytest.mark.parametrize("rounds", [5, pytest.param(20, marks=pytest.mark.large)])
def test_many_workers_leave_no_descriptor_and_no_zombie(own_crew: Crew, rounds: int):
    first = own_crew.talk()
    first.ask("1")
    zygote = psutil.Process(own_crew.zygote)
    # The zygote's own descriptors, and the first worker's status socket.
    wait_until(lambda: open_files(zygote.pid) == 7, "the zygote to close the first worker's descriptors")
    before, before_of_zygote = open_files(), open_files(zygote.pid)

    for round_ in range(rounds):
        workers = [own_crew.talk() for _ in range(5)]
        for worker in workers[:3]:
            worker.end()
        workers[3].process.kill(signal.SIGKILL)
        workers[4].say("end(1)")
        for worker in workers:
            ended(worker.process)
            worker.close()
        failed = own_crew.spawn(python="/no/such/python")
        assert ended(failed).error, round_
        failed.close()

    # The last ones may not have been reaped yet.
    wait_until(lambda: [child.pid for child in zygote.children()] == [first.process.pid], "the dead to be reaped")
    wait_until(lambda: open_files() <= before, "descriptors to be closed")
    wait_until(lambda: open_files(zygote.pid) == before_of_zygote, "the zygote to close its descriptors")


def test_workers_whose_zygote_was_killed_are_reported_and_the_next_starts(own_crew: Crew):
    workers = [own_crew.talk() for _ in range(2)]
    pids = [worker.ask("__import__('os').getpid()") for worker in workers]
    child = workers[0].ask("__import__('subprocess').Popen(['sleep', '600']).pid")
    first = own_crew.zygote

    async def scenario() -> list[ProcessExit]:
        waits = [asyncio.ensure_future(worker.process.wait()) for worker in workers]
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)

    assert asyncio.run(scenario()) == [ProcessExit(signal=9), ProcessExit(signal=9)]
    assert own_crew.talk().ask("1") == 1
    assert own_crew.zygote != first
    wait_until(lambda: not any(is_alive(pid) for pid in [*pids, child]), "the old workers to die")
    workers[0].process.kill(signal.SIGKILL)


def test_kill_does_not_block_on_a_stopped_zygote(own_crew: Crew):
    worker = own_crew.talk()
    assert worker.ask("1") == 1
    os.kill(own_crew.zygote, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        for _ in range(120):  # the socket holds about 70 commands
            worker.process.kill(signal.SIGCONT)
        assert time.monotonic() - begun < 5
    finally:
        os.kill(own_crew.zygote, signal.SIGCONT)
    assert worker.ask("2") == 2


def test_the_death_of_the_zygote_before_a_start_is_reported(own_crew: Crew):
    own_crew.talk().ask("1")
    os.kill(own_crew.zygote, signal.SIGSTOP)
    process = own_crew.spawn()

    os.kill(own_crew.zygote, signal.SIGKILL)

    text = "the process that starts workers ended before it had started this one"
    assert ended(process) == ProcessExit(error=text, is_brief=True)
    assert process.pid is None


def test_the_zygote_survives_signals_to_the_process_group(own_crew: Crew):
    worker = own_crew.talk()
    assert worker.ask("1") == 1
    zygote = own_crew.zygote

    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(zygote, number)

    assert worker.ask("2") == 2
    assert own_crew.talk().ask("3") == 3
    assert own_crew.zygote == zygote


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"python": "/no/such/python3"}, "cannot run '/no/such/python3': No such file or directory"),
        ({"python": FOLDER}, f"cannot run '{FOLDER}': Permission denied"),
        ({"working_directory": "/no/such/folder"}, "cannot enter folder '/no/such/folder': No such file or directory"),
        ({"environment": {"A=B": "c"}}, "cannot set its environment: illegal environment variable name"),
    ],
    ids=["no interpreter", "no program", "no folder", "no environment"],
)
def test_the_reason_of_a_failed_start_is_reported(crew: Crew, how: dict[str, object], text: str):
    worker = crew.talk(**how)

    exit_ = ended(worker.process)

    assert exit_ == ProcessExit(error=text)
    assert describe_exit(exit_) == exit_.error
    assert crew.talk().ask("1") == 1


def test_an_environment_that_does_not_fit_is_refused(crew: Crew):
    error = error_of(crew.spawn, environment={"LARGE": "x" * MAX_COMMAND_BYTES})

    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message.startswith("cannot start a process for 'm_0_0': its environment and paths take 131")
    assert crew.talk().ask("1") == 1


def test_a_zygote_that_cannot_be_started_is_named_with_its_program(monkeypatch: pytest.MonkeyPatch, own_crew: Crew):
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/no/such/python3")
        with pytest.raises(InferenceError) as raised:
            own_crew.spawn()

    assert raised.value.message == "cannot start a process for 'm_0_0': No such file or directory: /no/such/python3"
    assert own_crew.talk().ask("1") == 1


def test_threads_start_workers_at_the_same_time(crew: Crew):
    def scenario(number: int) -> tuple[int, ProcessExit]:
        worker = crew.talk(name=f"m_{number}_0")
        answer = worker.ask(f"6 * {number}")
        worker.say(f"end({number})")
        return answer, ended(worker.process)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(scenario, range(32)))

    assert results == [(6 * number, ProcessExit(code=number)) for number in range(32)]


def test_workers_that_die_at_any_time_are_all_reported(crew: Crew):
    chance = random.Random(1)
    for _ in range(40):
        worker = crew.spawn(entry="talkative:greet")
        time.sleep(chance.random() / 200)
        worker.kill(signal.SIGKILL)
        assert ended(worker) == ProcessExit(signal=9)
        worker.close()
