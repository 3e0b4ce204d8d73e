"""Who asks for the index while the repository is read shares the next reading, and sees what was there when asking."""

import asyncio
import threading
from pathlib import Path

from halimede.core.inventory import Inventory
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import Listing, ModelRepository
from support.models import add_identity


class SlowRepository(ModelRepository):
    """Reads the disk and then waits until it `may_end`."""

    def __init__(self, root: Path) -> None:
        super().__init__((root,))
        self.scans = 0
        self.may_end = threading.Event()

    def scan(self) -> Listing:
        self.scans += 1
        listing = super().scan()
        assert self.may_end.wait(30)
        return listing


def test_many_indexes_are_two_readings_and_the_later_see_what_is_new(tmp_path: Path) -> None:
    async def ask() -> tuple[list[list[str]], int]:
        repository = SlowRepository(tmp_path)
        lifecycle = ModelLifecycle(repository, LoadOptions(Inventory(()), {}, autocomplete=True), 1, retry_count=0)

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
