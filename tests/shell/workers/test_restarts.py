"""Restarts of a worker's process after deaths of the model and after faults of the machine, with a real launcher."""

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest

from halimede.core.restarts import ProcessExit, StartFaultError
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.abandon import Abandon
from halimede.workers.supervision.completion import complete_config
from halimede.workers.supervision.program import Program
from halimede.workers.worker import WorkerDown, WorkerUp
from support.channel import SPEC
from support.loops import in_a_loop
from support.playing import ECHO, playing
from support.workers import Crew, ended


@in_a_loop
async def test_a_worker_waits_for_a_repository_that_is_gone_and_is_not_parked(tmp_path: Path) -> None:
    repository, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    (repository / "m").mkdir(parents=True)
    async with playing(repository / "m", ECHO) as (play, worker):
        repository.rename(elsewhere)
        os.kill(worker.pid or 0, signal.SIGKILL)
        # As many ends of a model would have parked it.
        await play.until(lambda: len(play.heard(WorkerDown)) == 6, "five starts")
        elsewhere.rename(repository)
        await play.until(lambda: play.heard(WorkerUp), "the next process")
        gone = "worker cannot be started: the repository of model 'm' cannot be read: No such file or directory"
        downs = play.heard(WorkerDown)
        assert [down.reason for down in downs] == ["worker exited: signal 9", *[gone] * 5]
        assert not any(down.parked or down.is_unstartable for down in downs)
        assert await worker.is_ready()


@in_a_loop
async def test_a_parked_worker_is_started_again_when_its_time_has_come(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    initialize = f"def initialize(self, args):\n    if os.path.exists({str(broken)!r}): os._exit(3)\n"
    async with playing(tmp_path, initialize + ECHO, Program(first_retry_ns=200_000_000)) as (play, worker):
        broken.touch()
        os.kill(worker.pid or 0, signal.SIGKILL)
        await play.until(lambda: len(play.heard(WorkerDown)) == 3, "a start after it was parked")
        broken.unlink()
        await play.until(lambda: play.heard(WorkerUp), "the next start")
        cause = "Stub process 'm_0_0' is not healthy: it ended by exit code 3 while it started"
        assert [(down.parked, down.reason) for down in play.heard(WorkerDown)][1:3] == [
            (True, f"worker exited {times} times (last: {cause})") for times in (5, 6)
        ]
        assert await worker.is_ready()


def test_a_first_start_waits_for_descriptors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def restore() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    async def scenario() -> None:
        # The model's file is written before the process starts, and needs descriptors.
        async with playing(tmp_path, ECHO, on_start=begin_lack) as (_, worker):
            assert await worker.is_ready()

    def begin_lack() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        asyncio.get_running_loop().call_later(0.05, restore)

    try:
        in_a_loop(scenario)()
    finally:
        restore()
    assert "cannot start a process for 'm_0_0': Too many open files; the next try in 0.1 s" in caplog.text


# For root, the limit has no effect.
NO_PROCESSES = """
import os, resource
def load():
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    os.setuid(os.getuid() or 65534)
"""
CANNOT_FORK = "cannot fork: Resource temporarily unavailable"


def test_a_load_fails_when_forks_fail_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_crew: Crew, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "no_processes.py").write_text(NO_PROCESSES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    program = Program(preload="no_processes:load")
    with pytest.raises(StartFaultError) as raised:
        complete_config(SPEC, program, own_crew.launcher, Abandon())
    text = f"cannot start a process for '{SPEC.instance}': {CANNOT_FORK}"
    assert (raised.value, raised.value.is_brief) == (InferenceError(ErrorCode.UNAVAILABLE, text), True)
    assert [record.getMessage() for record in caplog.records] == [
        f"{text}; the next try in {secs} s" for secs in (0.1, 0.2, 0.4, 0.8)
    ]
    assert ended(own_crew.spawn(preload=program.preload)) == ProcessExit(error=CANNOT_FORK, is_brief=True)
