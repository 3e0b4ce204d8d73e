"""Loads that are retried, and loads that an unload ends: in one process, with a fixed order."""

import asyncio
import inspect
import logging
import threading
from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.core.types import ErrorCode, InferenceError
from halimede.fetch.store_repository import StoreRepository
from halimede.runtime.core_server import STOPPING
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.lifecycle.left_behind import MAX_LEFT_BEHIND, LeftBehind
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from support.ensemble_server import BareServer, until, value_of
from support.loops import in_a_loop
from support.models import add_scaled, write_config
from support.playing import NOBODY
from support.plugin import FaultyBackend

OPTIONS = LoadOptions(Inventory(()), {}, autocomplete=True)
UNLOAD_WAIT_SECS = 0.3
CLOSE_TIMEOUT_SECS = 0.3
UNLOADED = InferenceError(ErrorCode.INTERNAL, "failed to load 'hung', no version is available")


def lifecycle_of(
    repository: Path,
    *,
    load_threads: int = 4,
    retry_count: int = 0,
    unload_wait_secs: float = UNLOAD_WAIT_SECS,
    slot_wait_secs: float = 5.0,
) -> ModelLifecycle:
    return ModelLifecycle(
        ModelRepository((repository,)),
        OPTIONS,
        load_threads,
        NOBODY,
        retry_count=retry_count,
        unload_wait_secs=unload_wait_secs,
        slot_wait_secs=slot_wait_secs,
    )


def test_default_time_limits() -> None:
    parameters = inspect.signature(ModelLifecycle).parameters
    limits = {name: parameter.default for name, parameter in parameters.items() if name.endswith("_secs")}
    assert limits == {
        "unload_wait_secs": 60.0,
        "slot_wait_secs": 5.0,
        "close_timeout_secs": 7.0,
        "read_limit_secs": 30.0,
    }
    assert inspect.signature(StoreRepository).parameters["limit_secs"].default == 30.0


def break_model(repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    (repository / "scaled" / "1" / "model.onnx").write_bytes(b"broken")


async def states(lifecycle: ModelLifecycle) -> list[tuple[str, str]]:
    return [(entry.state.value if entry.state else "", entry.reason) for entry in await lifecycle.index(False)]


@in_a_loop
async def test_repository_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(InferenceError, match=f"repository path is not a valid directory: {missing}"):
        await lifecycle_of(missing).load_all(None)


@in_a_loop
async def test_folder_that_is_no_model_does_not_prevent_readiness(repository: Path) -> None:
    add_scaled(repository, "scaled", 2)
    (repository / "notes" / "1").mkdir(parents=True)
    server = BareServer(repository)
    assert await server.core.start(None) == ["notes"]
    assert server.core.is_ready()
    state, reason = (await server.states())["notes"]
    assert state == "UNAVAILABLE"
    assert reason.startswith("Invalid model name: Could not determine backend for model 'notes' with no backend")
    with pytest.raises(InferenceError, match="Request for unknown model: 'notes' is not found"):
        server.core.model("notes")
    with pytest.raises(InferenceError, match="Request for unknown model: 'notes' is not found"):
        await server.core.is_model_ready("notes")
    await server.core.close()
    # With a configuration, even an empty one, it is a model that should serve.
    (repository / "notes" / "config.pbtxt").touch()
    server = BareServer(repository)
    assert await server.core.start(None) == ["notes"]
    assert not server.core.is_ready()
    await server.core.close()


@in_a_loop
async def test_failed_load_is_retried_and_logged(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    break_model(repository)
    lifecycle = lifecycle_of(repository, retry_count=5)
    loading = asyncio.create_task(lifecycle.load("scaled"))
    await until(lambda: "load attempt 1 of 6 failed" in caplog.text)
    assert [state for state, _ in await states(lifecycle)] == ["UNAVAILABLE"]
    add_scaled(repository, "scaled", 2)
    await loading
    assert await states(lifecycle) == [("READY", "")]
    await lifecycle.close()


@in_a_loop
async def test_retries_are_counted(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    break_model(repository)
    with pytest.raises(InferenceError, match="load failed for model 'scaled': version 1 is at UNAVAILABLE state"):
        await lifecycle_of(repository, retry_count=2).load("scaled")
    assert caplog.text.count("load attempt") == 2
    assert "load attempt 2 of 3 failed, the next one in 0.5 s: onnx runtime error 7" in caplog.text


@in_a_loop
async def test_nothing_is_retried_by_default(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    break_model(repository)
    with pytest.raises(InferenceError):
        await lifecycle_of(repository).load("scaled")
    assert "load attempt" not in caplog.text


@in_a_loop
async def test_load_with_an_invalid_configuration_is_not_retried(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_config(repository / "wrong", "nonsense: 1")
    lifecycle = lifecycle_of(repository, retry_count=1000)
    for name in ("wrong", "missing"):
        with pytest.raises(InferenceError, match="failed to poll from model repository"):
            await lifecycle.load(name)
    assert "load attempt" not in caplog.text


@in_a_loop
async def test_unload_ends_the_retries(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    break_model(repository)
    lifecycle = lifecycle_of(repository, retry_count=1000)
    loading = asyncio.create_task(lifecycle.load("scaled"))
    await until(lambda: "load attempt 4 of" in caplog.text)  # the pause is 2 s now
    async with asyncio.timeout(1.5):
        await lifecycle.unload("scaled")
        with pytest.raises(InferenceError, match="load failed for model 'scaled'"):
            await loading


@in_a_loop
async def test_stop_ends_the_retries(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    break_model(repository)
    lifecycle = lifecycle_of(repository, retry_count=1000)
    loading = asyncio.create_task(lifecycle.load("scaled"))
    await until(lambda: "load attempt 4 of" in caplog.text)
    loading.cancel()
    async with asyncio.timeout(1.5):
        with pytest.raises(asyncio.CancelledError):
            await loading
        await lifecycle.close()


@in_a_loop
async def test_an_unload_ends_the_loads_before_it_and_none_after_it(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "hung", faults={"load": "hang"})
    wait_secs = 2.0
    lifecycle = lifecycle_of(repository, unload_wait_secs=wait_secs)
    before = [asyncio.create_task(lifecycle.load("hung")) for _ in range(3)]
    await until(lambda: faulty.events("hung") == ["load hung"])
    unloading = [asyncio.create_task(lifecycle.unload("hung")) for _ in range(2)]
    await asyncio.sleep(0)
    after = asyncio.create_task(lifecycle.load("hung"))
    async with asyncio.timeout(3 * wait_secs):  # not one wait for each load
        results = await asyncio.gather(*before, *unloading, return_exceptions=True)
    assert results == [UNLOADED] * 3 + [None] * 2
    assert not after.done()
    faulty.release("hung")
    await after
    assert await states(lifecycle) == [("READY", "")]
    await until(lambda: faulty.events("hung").count("closed_model hung") == 1)
    await lifecycle.close()


@in_a_loop
async def test_a_reload_that_is_left_behind_is_closed_and_nothing_serves(
    repository: Path, faulty: FaultyBackend
) -> None:
    faulty.add_model(repository, "hung")
    lifecycle = lifecycle_of(repository)
    await lifecycle.load("hung")
    faulty.add_model(repository, "hung", faults={"create": "hang"})
    reloading = asyncio.create_task(lifecycle.load("hung"))
    await until(lambda: faulty.events("hung").count("create hung_0_0") == 2)
    assert (await states(lifecycle), lifecycle.all_ready()) == ([("READY", "")], True)
    await lifecycle.unload("hung")
    with pytest.raises(InferenceError, match="no version is available"):
        await reloading
    await until(lambda: faulty.events("hung").count("closed_model hung") == 1)
    assert await states(lifecycle) == [("UNAVAILABLE", "unloaded")]
    faulty.release("hung")
    await until(lambda: faulty.events("hung").count("closed_model hung") == 2)


@in_a_loop
async def test_a_load_that_waits_for_a_slot_can_be_unloaded(repository: Path, faulty: FaultyBackend) -> None:
    for name in ("hung", "waiting"):
        faulty.add_model(repository, name, faults={"load": "hang"} if name == "hung" else {})
    lifecycle = lifecycle_of(repository, load_threads=1)
    hung = asyncio.create_task(lifecycle.load("hung"))
    await until(lambda: faulty.events("hung") == ["load hung"])
    waiting = asyncio.create_task(lifecycle.load("waiting"))
    await asyncio.gather(lifecycle.unload("waiting"), lifecycle.unload("hung"))
    results = await asyncio.gather(hung, waiting, return_exceptions=True)
    assert [isinstance(result, InferenceError) for result in results] == [True, True]
    await lifecycle.load("waiting")
    faulty.release("hung")
    await until(lambda: "closed_model hung" in faulty.events("hung"))
    await lifecycle.close()


@in_a_loop
async def test_unload_waits_long_for_a_load_but_not_for_its_slot(repository: Path, faulty: FaultyBackend) -> None:
    for name in ("loading", "waiting"):
        faulty.add_model(repository, name, faults={"load": "hang"})
    lifecycle = lifecycle_of(repository, load_threads=1, unload_wait_secs=60, slot_wait_secs=0.1)
    loads = {"loading": asyncio.create_task(lifecycle.load("loading"))}
    await until(lambda: faulty.events("loading") == ["load loading"])
    loads["waiting"] = asyncio.create_task(lifecycle.load("waiting"))
    await until(lambda: "waiting" in lifecycle.records and lifecycle.records["waiting"].loading)
    unloading = asyncio.create_task(lifecycle.unload("loading"))
    async with asyncio.timeout(20):
        await lifecycle.unload("waiting")
        with pytest.raises(InferenceError, match="no version is available"):
            await loads["waiting"]
        assert not loads["loading"].done()
        faulty.release("loading")
        assert await asyncio.gather(loads["loading"], unloading) == [None, None]
    await lifecycle.close()
    assert ("UNAVAILABLE", "unloaded") in await states(lifecycle)


@in_a_loop
async def test_stop_ends_a_load_and_the_unload_that_waits_for_it(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "hung", faults={"load": "hang"})
    server = BareServer(repository)
    calls = [asyncio.create_task(server.load("hung"))]
    await until(lambda: faulty.events("hung") == ["load hung"])
    calls.append(asyncio.create_task(server.unload("hung")))
    await until(lambda: server.lifecycle.records["hung"].unloads.count == 1)
    server.core.begin_drain()
    async with asyncio.timeout(20):
        assert await asyncio.gather(*calls, return_exceptions=True) == [STOPPING, STOPPING]
    faulty.release("hung")
    await until(lambda: "closed_model hung" in faulty.events("hung"))


@in_a_loop
async def test_failure_of_work_that_was_left_behind_is_no_problem(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise InferenceError(ErrorCode.UNAVAILABLE, "its process has ended")

    caplog.set_level(logging.DEBUG)
    LeftBehind().leave("hung", asyncio.create_task(fail()))
    await until(lambda: "a load that was left behind has failed: its process has ended" in caplog.text)
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


@in_a_loop
async def test_abandoned_loads_are_counted_and_bounded(repository: Path, faulty: FaultyBackend) -> None:
    names = [f"hung{number}" for number in range(MAX_LEFT_BEHIND)]
    for name in names:
        faulty.add_model(repository, name, faults={"load": "hang"})
    add_scaled(repository, "scaled", 2)
    lifecycle = lifecycle_of(repository, load_threads=MAX_LEFT_BEHIND)
    loading = [asyncio.create_task(lifecycle.load(name)) for name in names]
    await until(lambda: all(faulty.events(name) for name in names))
    await asyncio.gather(*(lifecycle.unload(name) for name in names))
    await asyncio.gather(*loading, return_exceptions=True)
    with pytest.raises(InferenceError, match="64 loads or unloads of models never ended, the server must be restarted"):
        await lifecycle.load("scaled")
    for name in names:
        faulty.release(name)
    await until(lambda: all("closed_model " + name in faulty.events(name) for name in names))

    async def can_load() -> bool:
        """A model is closed shortly before its load has ended."""
        try:
            await lifecycle.load("scaled")
        except InferenceError:
            return False
        return True

    for _ in range(200):
        if await can_load():
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the loads never ended")
    await lifecycle.close()


@in_a_loop
async def test_an_unload_abandons_a_close_that_hangs(
    repository: Path, faulty: FaultyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    steps = ("close", "close_model")
    for step in steps:
        faulty.add_model(repository, step, faults={step: "hang"}, instances=2, instance=f"{step}_0_0")
    server = BareServer(repository, close_timeout_secs=CLOSE_TIMEOUT_SECS)
    await server.load(*steps)
    for step in steps:
        await server.unload(step)
    for step in steps:
        await until(lambda step=step: caplog.text.count(f"successfully unloaded '{step}' version 1") == 1)
        assert (await server.states())[step] == ("UNAVAILABLE", "unloaded")
        assert f"closed {step}_0_1" in faulty.events(step)
        assert caplog.text.count(f"model '{step}' version 1 does not close: it is left behind after 0.3 s") == 1
        await server.load(step)
        assert await server.value(step, 3.0) == 3.0
    # The instances of the second load hang, too.
    await server.lifecycle.close()
    for step in steps:
        assert caplog.text.count(f"model '{step}' version 1 does not close") == 2
        faulty.release(step)
    await until(lambda: all(faulty.events(step).count(f"closed_model {step}") == 2 for step in steps))


@in_a_loop
async def test_an_unload_waits_for_its_requests_without_a_limit(
    repository: Path, faulty: FaultyBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than the time limit of a close."""
    caplog.set_level("INFO")
    faulty.add_model(repository, "long", faults={"run": "hang"})
    server = BareServer(repository, close_timeout_secs=CLOSE_TIMEOUT_SECS)
    await server.load("long")
    answers = [server.ask("long", value) for value in (1.0, 2.0)]
    await until(lambda: "run long_0_0" in faulty.events("long"))
    await server.unload("long")
    await asyncio.sleep(3 * CLOSE_TIMEOUT_SECS)  # longer than the limit
    assert await server.states() == {"long": ("UNLOADING", "")}
    assert not any(answer.done() for answer in answers)
    faulty.release("long")
    assert [value_of(await answer) for answer in answers] == [1.0, 2.0]
    await until(lambda: "successfully unloaded 'long' version 1" in caplog.text)
    assert await server.states() == {"long": ("UNAVAILABLE", "unloaded")}
    assert "does not close" not in caplog.text


@in_a_loop
async def test_many_indexes_take_one_thread(repository: Path) -> None:
    for number in range(500):  # so that a reading takes a while
        (repository / f"model{number}" / "1").mkdir(parents=True)
    lifecycle = lifecycle_of(repository)
    looks = [asyncio.create_task(lifecycle.index(False)) for _ in range(60)]
    most = 0
    while not all(look.done() for look in looks):
        most = max(most, sum(thread.name == "list-repository" for thread in threading.enumerate()))
        await asyncio.sleep(0)
    assert most == 1
    assert {len(await look) for look in looks} == {500}
