"""Workers on machines that lack what most have: a working directory, /proc."""

import os
from pathlib import Path

import pytest

from halimede.workers.supervision.program import Program
from support.loops import in_a_loop
from support.playing import ECHO, playing
from support.workers import FOLDER, Crew


def test_a_worker_starts_although_the_working_directory_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, model = tmp_path / "gone", tmp_path / "model"
    gone.mkdir()
    model.mkdir()

    async def scenario() -> None:
        # What is loaded before gives it a process of its own to be forked from, in this directory.
        async with playing(model, ECHO, Program(preload="gc:collect")) as (_, worker):
            assert await worker.is_ready()

    monkeypatch.chdir(gone)
    gone.rmdir()
    in_a_loop(scenario)()


# CLONE_NEWNS; MS_REC and MS_PRIVATE; MNT_DETACH.
NO_PROC = """
import ctypes
def load():
    libc = ctypes.CDLL(None)
    if libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0:
        libc.umount2(b"/proc", 2)
"""
OPEN = """
import os
answer = []
for number in range(3, 2000):
    try:
        os.fstat(number)
        answer.append(number)
    except OSError:
        pass
"""


def test_a_worker_without_proc_starts_with_no_descriptor_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_proc.py").write_text(NO_PROC)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, str(tmp_path)]))
    with Crew() as crew:
        others = [crew.talk(preload="no_proc:load") for _ in range(2)]
        worker = crew.talk(preload="no_proc:load")
        if worker.ask("__import__('os').path.exists('/proc/self')"):
            pytest.skip("this needs the right to unmount /proc in a namespace")
        assert [each.ask("1") for each in others] == [1, 1]
        assert worker.ask(OPEN) == [worker.ask("channel.fileno()")]
