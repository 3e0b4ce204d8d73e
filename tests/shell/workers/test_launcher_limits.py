"""Workers with low limits of files or memory, and workers whose server is killed."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.supervision.completion import NO_OWNERS
from halimede.workers.supervision.life import ENTRY, Life
from support.channel import SPEC
from support.family import FAMILY
from support.memory_group import memory_group
from support.server import wait_until
from support.workers import FOLDER, Crew, is_alive

FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from support.workers import Crew
with Crew() as crew:
    print(crew.talk().ask("channel.fileno()"))
"""


def test_a_worker_starts_with_a_low_limit_of_open_files():
    path = os.pathsep.join([FOLDER, str(Path(FOLDER).parent)])

    number = subprocess.check_output([sys.executable, "-c", FEW_FILES], env={**os.environ, "PYTHONPATH": path})

    assert 2 < int(number) < 200


SERVER = f"""
import sys, time
from support.workers import Crew
from test_launcher_family import FAMILY
crew = Crew()
workers = [crew.talk() for _ in range(2)] + [crew.talk(python=sys.executable)]
pids = [crew.zygote]
for worker in workers:
    pids += [worker.ask("__import__('os').getpid()"), *worker.ask(FAMILY)]
workers[0].process.kill({signal.SIGSTOP.value})
print(*pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["alone", "with its group"])
def test_no_process_is_left_when_the_server_is_killed(tmp_path: Path, kill: Callable[[int, int], None]):
    (tmp_path / "test_launcher_family.py").write_text(f"FAMILY = {FAMILY!r}")
    path = os.pathsep.join([FOLDER, str(Path(FOLDER).parent), str(tmp_path)])
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 13
        assert all(is_alive(pid) for pid in pids)

        kill(server.pid, signal.SIGKILL)
        server.wait()

        # The goal is 1 s.
        wait_until(lambda: not any(is_alive(pid) for pid in pids), "all processes of the server to die", limit_s=5)


EATER = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from halimede.core.restarts import describe_exit
from support.workers import Crew, ended
crew = Crew()
killed, eater, bystander = crew.talk(), crew.talk(), crew.talk()
killed.process.kill(9)
print(describe_exit(ended(killed.process)))
eater.say("x = b'x' * (1 << 30)")
print(describe_exit(ended(eater.process)))
bystander.process.kill(11)
print(describe_exit(ended(bystander.process)))
print(crew.talk().ask("1 + 1"))
crew.launcher.close()
"""


def test_a_worker_that_was_killed_out_of_memory_is_reported_as_such():
    path = os.pathsep.join([FOLDER, str(Path(FOLDER).parent)])
    with memory_group(200 << 20) as group:
        reported = subprocess.check_output(
            [sys.executable, "-c", EATER, str(group)], env={**os.environ, "PYTHONPATH": path}, timeout=60, text=True
        )
        assert reported.splitlines() == ["signal 9", "signal 9 (possibly out of memory)", "signal 11", "2"]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no file."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)


def test_a_process_that_gets_no_descriptors_is_ended():
    async def main(crew: Crew) -> int:
        process = crew.spawn(entry=ENTRY)
        wait_until(lambda: process.pid is not None, "the report of the start")
        with no_descriptors(), pytest.raises(InferenceError, match="no file descriptor") as caught:
            Life(process, SPEC, (), NO_OWNERS, asyncio.get_running_loop())
        assert caught.value.code is ErrorCode.UNAVAILABLE
        assert process.pid is not None
        return process.pid

    with Crew() as crew:
        pid = asyncio.run(main(crew))
        wait_until(lambda: not is_alive(pid), "the end of the process")
