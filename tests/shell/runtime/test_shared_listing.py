"""Reading a repository: index requests during a reading share the next one, and see the state at their request; loads
read on few threads."""

import asyncio
import threading
from pathlib import Path

from halimede.core.inventory import Inventory
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.lifecycle.reading import MAX_READERS
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import UNWATCHED, Listing, ModelEntry, ModelRepository, ReadProgress
from support.models import add_identity
from support.playing import NOBODY


class SlowRepository(ModelRepository):
    """Reads the disk and then waits until it `may_end`."""

    def __init__(self, root: Path) -> None:
        super().__init__((root,))
        self.scans = 0
        self.may_end = threading.Event()

    def scan(self, progress: ReadProgress = UNWATCHED) -> Listing:
        self.scans += 1
        listing = super().scan(progress)
        assert self.may_end.wait(30)
        return listing

    def find(self, name: str, progress: ReadProgress = UNWATCHED) -> ModelEntry:
        assert self.may_end.wait(30)
        return super().find(name, progress)


def lifecycle_of(repository: ModelRepository) -> ModelLifecycle:
    return ModelLifecycle(repository, LoadOptions(Inventory(()), {}, autocomplete=True), 1, NOBODY)


def test_many_loads_read_their_directories_on_few_threads(tmp_path: Path) -> None:
    def reading() -> int:
        return sum(thread.name.startswith("read-") for thread in threading.enumerate())

    async def load() -> tuple[int, list[BaseException | None]]:
        repository = SlowRepository(tmp_path)
        lifecycle = lifecycle_of(repository)
        names = [f"m{number}" for number in range(3 * MAX_READERS)]
        for name in names:
            add_identity(tmp_path, name)
        loads = [asyncio.create_task(lifecycle.load(name)) for name in names]
        while reading() < MAX_READERS:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        most = reading()
        repository.may_end.set()
        results = await asyncio.gather(*loads, return_exceptions=True)
        await lifecycle.close()
        return most, results

    assert asyncio.run(load()) == (MAX_READERS, [None] * 3 * MAX_READERS)


def test_many_indexes_take_two_readings_and_the_second_is_current(tmp_path: Path) -> None:
    async def ask() -> tuple[list[list[str]], int]:
        repository = SlowRepository(tmp_path)
        lifecycle = lifecycle_of(repository)

        async def names() -> list[str]:
            return [entry.name for entry in await lifecycle.index(ready_only=False)]

        add_identity(tmp_path, "old")
        first = asyncio.create_task(names())
        while not repository.scans:
            await asyncio.sleep(0.001)
        add_identity(tmp_path, "new")
        late = [asyncio.create_task(names()) for _ in range(50)]
        late[0].cancel()
        await asyncio.sleep(0.01)
        repository.may_end.set()
        return await asyncio.gather(first, *late[1:]), repository.scans

    answers, scans = asyncio.run(ask())
    assert answers[1:] == [["new", "old"]] * 49
    assert scans == 2
