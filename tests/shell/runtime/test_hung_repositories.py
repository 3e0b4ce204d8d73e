"""A repository whose file system gives no answer fails loads and the index in time, and delays no other model."""

import asyncio
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.core.types import ErrorCode, InferenceError
from halimede.fetch.store_repository import StoreRepository
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.lifecycle.reading import MAX_READERS
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import UNWATCHED, Listing, ModelEntry, ModelRepository, ReadProgress
from halimede_spec.uri import parse_uri
from support.loops import in_a_loop
from support.models import add_identity
from support.playing import NOBODY

LIMIT_S = 0.4
SILENCE = f"has not answered for {LIMIT_S} s"


class HungRepository(ModelRepository):
    """Its file system gives no answer, for models named `hung…` and for listings, until it `may_answer`. It answers for
    the model `slow` bit by bit."""

    def __init__(self, root: Path) -> None:
        super().__init__((root,))
        self.root = root
        self.may_answer = threading.Event()
        self.scans = 0

    def unreadable(self, progress: ReadProgress = UNWATCHED) -> dict[Path, str]:
        progress.begin(self.root)
        self.scans += 1
        assert self.may_answer.wait(30)
        return super().unreadable(progress)

    def find(self, name: str, progress: ReadProgress = UNWATCHED) -> ModelEntry:
        progress.begin(self.root)
        if name.startswith("hung"):
            assert self.may_answer.wait(30)
        for _ in range(6 if name == "slow" else 0):
            self.may_answer.wait(LIMIT_S / 2)
            progress.steps += 1
        return super().find(name, progress)


@asynccontextmanager
async def lifecycle_of(repository: ModelRepository) -> AsyncIterator[ModelLifecycle]:
    options = LoadOptions(Inventory(()), {}, autocomplete=True)
    lifecycle = ModelLifecycle(repository, options, 1, NOBODY, read_limit_secs=LIMIT_S)
    yield lifecycle
    await lifecycle.close()


@pytest.fixture
def repository(tmp_path: Path) -> HungRepository:
    for name in ("quick", "slow"):
        add_identity(tmp_path, name)
    return HungRepository(tmp_path)


@in_a_loop
async def test_loads_that_hang_fail_with_the_repository_and_hold_up_no_other(repository: HungRepository) -> None:
    async with lifecycle_of(repository) as lifecycle:
        hung = [asyncio.create_task(lifecycle.load(f"hung{number}")) for number in range(MAX_READERS)]
        for load in hung:
            with pytest.raises(InferenceError, match=f"repository '{repository.root}' {SILENCE}"):
                await load
        await lifecycle.load("quick")
        assert lifecycle.all_ready()
        repository.may_answer.set()


@in_a_loop
async def test_a_long_read_that_makes_progress_does_not_fail(repository: HungRepository) -> None:
    async with lifecycle_of(repository) as lifecycle:
        await lifecycle.load("slow")


def test_indexes_of_a_hung_repository_fail_and_take_one_thread(repository: HungRepository) -> None:
    async def scenario() -> list[str]:
        async with lifecycle_of(repository) as lifecycle:
            for _ in range(2):
                with pytest.raises(InferenceError, match=f"repository '{repository.root}' {SILENCE}") as failed:
                    await lifecycle.index(ready_only=False)
                assert failed.value.code is ErrorCode.UNAVAILABLE
            assert repository.scans == 1
            repository.may_answer.set()
            return [entry.name for entry in await lifecycle.index(ready_only=False)]

    assert asyncio.run(scenario()) == ["quick", "slow"]


@in_a_loop
async def test_a_start_on_a_hung_repository_fails(repository: HungRepository) -> None:
    async with lifecycle_of(repository) as lifecycle:
        with pytest.raises(InferenceError, match=f"repository '{repository.root}' {SILENCE}"):
            await lifecycle.load_all(None)
        repository.may_answer.set()


def test_each_file_of_a_read_is_a_step(tmp_path: Path) -> None:
    add_identity(tmp_path, "m")
    for number in range(50):
        (tmp_path / "m" / "1" / str(number)).touch()
    progress = ReadProgress()
    repository = ModelRepository((tmp_path,))
    repository.find("m", progress)
    assert (progress.steps > 50, progress.repository) == (True, str(tmp_path))
    before = progress.steps
    assert repository.scan(progress) == Listing(("m",))
    assert progress.steps > before


@pytest.mark.parametrize("is_gone", [False, True], ids=["hangs", "is gone"])
def test_a_store_that_fails_fails_a_load_within_its_own_limit(is_gone: bool) -> None:
    """That of other reads, which is shorter here, does not count."""

    async def load(store: str) -> str:
        repository = StoreRepository((), (parse_uri(store),), "", {}, limit_secs=2 * LIMIT_S)
        try:
            async with lifecycle_of(repository) as lifecycle, asyncio.timeout(10):
                with pytest.raises(InferenceError) as failed:
                    await lifecycle.load("m")
                return failed.value.message
        finally:
            repository.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        store = f"s3://http://127.0.0.1:{server.getsockname()[1]}/bucket"
        if is_gone:
            server.close()
        text = asyncio.run(load(store))
    assert re.search(
        rf"{store}/m/: the store .* cannot be reached: {'connection refused' if is_gone else 'no answer'}", text
    )
