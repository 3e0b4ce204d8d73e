"""A process that gets its next batch while one runs: it begins without the loop, or is taken back."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.worker import BatchDone, WorkerDown
from support.loops import in_a_loop
from support.playing import LIMIT_S, Play, playing

LARGE = COPIED_ON_LOOP_BYTES // 4 + 1

NOTING = """
def execute(self, requests):
    values = [int(r.inputs()[0].as_numpy()[0, 0]) for r in requests]
    note(f"begin {values[0]}")
    while not os.path.exists(path("end%d" % values[0])):
        time.sleep(0.002)
    note(f"end {values[0]}")
    return [pb.InferenceResponse([pb.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
ASYNC = NOTING.replace("def execute", "async def execute").replace("time.sleep", "await asyncio.sleep")


class Noted:
    """The model notes what it does in a file, and ends a batch when the test lets it."""

    def __init__(self, folder: Path, play: Play, worker: ProcessWorker) -> None:
        self.folder, self.play, self.worker = folder, play, worker

    def let_end(self, key: int) -> None:
        (self.folder / f"end{key}").touch()

    @property
    def notes(self) -> list[str]:
        file = self.folder / "notes"
        return file.read_text().splitlines() if file.exists() else []

    def wait_blocking(self, note: str) -> None:
        """Wait without a turn of the loop."""
        deadline = time.monotonic() + LIMIT_S
        while note not in self.notes:
            assert time.monotonic() < deadline, (note, self.notes)
            time.sleep(0.002)

    async def wait(self, note: str) -> None:
        await self.play.until(lambda: note in self.notes, f"{note}: {self.notes}")

    async def done(self, *keys: int) -> None:
        """Wait until the batches of exactly these requests have ended, in this order."""
        await self.play.until(lambda: len(self.play.heard(BatchDone)) >= len(keys), f"the batches {keys}")
        assert [[item.key for item in each.items] for each in self.play.heard(BatchDone)] == [[key] for key in keys]


@asynccontextmanager
async def noting(folder: Path, methods: str = NOTING) -> AsyncIterator[Noted]:
    helpers = f"""
def path(name):
    return os.path.join({str(folder)!r}, name)

def note(text):
    with open(path("notes"), "a") as file:
        file.write(text + chr(10))
"""
    file = folder / "helpers.py"
    file.write_text("import os\n" + helpers)
    imports = f"import asyncio, sys\nsys.path.insert(0, {str(folder)!r})\nfrom helpers import note, path\n"
    async with playing(folder, methods, imports=imports) as (play, worker):
        yield Noted(folder, play, worker)


@pytest.mark.parametrize("methods", [NOTING, ASYNC], ids=["sync", "async"])
@in_a_loop
async def test_the_next_batch_begins_while_the_loop_is_busy(tmp_path: Path, methods: str) -> None:
    async with noting(tmp_path, methods) as noted:
        noted.play.ask(1)
        noted.play.ask(2)
        await noted.wait("begin 1")
        assert noted.notes == ["begin 1"], "one batch at a time"
        noted.let_end(1)
        noted.wait_blocking("begin 2")
        assert noted.notes == ["begin 1", "end 1", "begin 2"]
        noted.let_end(2)
        await noted.done(1, 2)
        first, second = noted.play.heard(BatchDone)
        assert first.times.output_start <= second.times.start <= second.times.input_end


@pytest.mark.parametrize("methods", [NOTING, ASYNC], ids=["sync", "async"])
@in_a_loop
async def test_a_batch_that_has_not_begun_is_taken_back(tmp_path: Path, methods: str) -> None:
    async with noting(tmp_path, methods) as noted:
        noted.play.ask(1)
        assert not noted.worker.take_back(0), "it has no other batch"
        noted.play.ask(2)
        await noted.wait("begin 1")
        assert noted.worker.take_back(0)
        assert not noted.worker.take_back(0)
        noted.play.ask(3)
        for key in (1, 3):
            noted.let_end(key)
        await noted.done(1, 3)
        assert noted.notes == ["begin 1", "end 1", "begin 3", "end 3"]


@in_a_loop
async def test_a_batch_that_has_begun_is_not_taken_back(tmp_path: Path) -> None:
    async with noting(tmp_path) as noted:
        noted.play.ask(1)
        noted.play.ask(2)
        noted.let_end(1)
        noted.wait_blocking("begin 2")
        assert not noted.worker.take_back(0), "it has begun, although the loop has not heard of the first one's end"
        noted.let_end(2)
        await noted.done(1, 2)


@in_a_loop
async def test_a_batch_is_taken_back_while_it_is_copied(tmp_path: Path) -> None:
    async with noting(tmp_path) as noted:
        noted.play.ask(1)
        noted.play.ask(2, LARGE)
        assert noted.worker.take_back(0)
        noted.play.ask(3)
        for key in (1, 3):
            noted.let_end(key)
        await noted.done(1, 3)
        connection = noted.worker._life.connection
        await noted.play.until(lambda: " 0 blocks" in repr(connection), f"free memory: {connection}")
        assert "begin 2" not in noted.notes


@in_a_loop
async def test_a_small_batch_does_not_overtake_one_that_is_copied(tmp_path: Path) -> None:
    async with noting(tmp_path) as noted:
        for key, elements in ((1, 1), (2, LARGE), (3, 1)):
            noted.let_end(key)
            noted.play.ask(key, elements)
        await noted.done(1, 2, 3)


@in_a_loop
async def test_the_numbers_of_batches_start_again_without_0(tmp_path: Path) -> None:
    """0 would be no token: the process would take such a batch for one that was taken back."""
    async with noting(tmp_path) as noted:
        noted.worker._life.connection.batches._next = 0xFFFFFFFF
        for key in (1, 2):
            noted.let_end(key)
            noted.play.ask(key)
        await noted.done(1, 2)


@in_a_loop
async def test_a_batch_that_has_not_begun_survives_its_process(tmp_path: Path) -> None:
    async with noting(tmp_path) as noted:
        noted.play.ask(1)
        noted.play.ask(2)
        await noted.wait("begin 1")
        os.kill(noted.worker.pid or 0, signal.SIGKILL)
        await noted.play.until(lambda: noted.play.heard(WorkerDown), "the death")
        [down] = noted.play.heard(WorkerDown)
        assert down.unread == {2}
        await noted.done(1)
        [failed] = noted.play.heard(BatchDone)
        assert failed.failed


@in_a_loop
async def test_a_batch_of_a_process_that_has_ended_is_not_taken_back(tmp_path: Path) -> None:
    """Another instance may end a batch, and ask for this one, before the end of the process is known."""
    async with noting(tmp_path) as noted:
        noted.play.ask(1)
        noted.play.ask(2)
        await noted.wait("begin 1")
        life = noted.worker._life
        assert life is not None
        os.kill(noted.worker.pid or 0, signal.SIGKILL)
        while not life.connection.channel.is_closed:
            await asyncio.sleep(0)
        assert not noted.play.heard(WorkerDown)
        assert not noted.worker.take_back(0)
        await noted.play.until(lambda: noted.play.heard(WorkerDown), "the death")
        [down] = noted.play.heard(WorkerDown)
        assert down.unread == {2}


@in_a_loop
async def test_a_time_limit_begins_with_the_execution(tmp_path: Path) -> None:
    async with noting(tmp_path) as noted:
        limits = noted.worker._limits
        limits._limit_ms = 3_600_000
        noted.play.ask(1)
        noted.play.ask(2)
        assert list(limits._timers) == [1]
        noted.let_end(1)
        await noted.done(1)
        assert list(limits._timers) == [2]
        noted.let_end(2)
        await noted.done(1, 2)
        await asyncio.sleep(0)
        assert limits._timers == {}
