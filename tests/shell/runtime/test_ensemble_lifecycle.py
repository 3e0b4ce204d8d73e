"""Ensembles that are loaded and withdrawn with the models of their steps: in one process, with a fixed order."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.caller import Caller, RunningBatch
from halimede.core.types.tensor import tensor_from_array
from support.ensemble_models import Step, Tensors, add_ensemble, chain
from support.ensemble_server import BareServer, unknown, until, until_rest, value_of
from support.loops import in_a_loop
from support.models import add_identity, add_scaled
from support.plugin import FaultyBackend

UNLOADED = ("UNAVAILABLE", "unloaded")


READY = ("READY", "")


@in_a_loop
async def test_loading_an_ensemble_loads_its_steps_and_what_they_need(repository: Path) -> None:
    add_scaled(repository, "two", 2)
    add_scaled(repository, "three", 3)
    add_ensemble(repository, "e", chain("two", "three"))
    add_ensemble(repository, "outer", chain("e", "two"))
    bench = BareServer(repository)
    await bench.load("outer")
    assert await bench.states() == dict.fromkeys(["e", "outer", "three", "two"], READY)
    assert (await bench.value("e"), await bench.value("outer")) == (6, 12)
    await bench.core.close()


@in_a_loop
async def test_a_start_loads_ensembles_and_models_with_one_load_thread(repository: Path) -> None:
    for number in range(3):
        add_scaled(repository, f"m{number}", 2)
    for name in ("a_first", "z_last"):
        add_ensemble(repository, name, chain("m0", "m1", "m2"))
    add_ensemble(repository, "outer", chain("z_last", "a_first"))
    bench = BareServer(repository, load_threads=1)
    assert await bench.core.start(None) == []
    assert bench.core.is_ready()
    assert await bench.value("outer") == 64
    await bench.core.close()


@in_a_loop
async def test_a_loaded_step_is_not_loaded_again(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "step")
    add_ensemble(repository, "e", chain("step", "step"))
    add_ensemble(repository, "other", chain("step"))
    bench = BareServer(repository)
    await bench.load("step", "e", "other")
    assert faulty.events("step").count("load step") == 1
    await bench.core.close()


@in_a_loop
async def test_the_error_of_a_load_names_the_problems_of_the_steps(repository: Path, faulty: FaultyBackend) -> None:
    add_scaled(repository, "fine", 2)
    faulty.add_model(repository, "broken", faults={"load": "ValueError"})
    add_ensemble(repository, "lost", chain("fine", "nowhere"))
    add_ensemble(repository, "weak", chain("fine", "broken"))
    add_ensemble(repository, "future", [Step("fine", {"IN": "IN"}, {"OUT": "OUT"}, version=7)])
    add_ensemble(repository, "misfit", [Step("fine", {"IN": "IN"}, {"OTHER": "OUT"})])
    bench = BareServer(repository)
    assert await bench.refused("lost") == ("ensemble lost contains models that are not available or ambiguous: nowhere")
    assert (await bench.refused("weak")).startswith(
        "ensemble 'weak' depends on 'broken' which has no loaded version. Model 'broken' loading failed with error: "
        "version 1 is at UNAVAILABLE state: Internal: ValueError: as the test wants it"
    )
    assert (
        await bench.refused("future") == "ensemble 'future' depends on 'fine' whose required version 7 is not loaded."
    )
    assert "OTHER" in await bench.refused("misfit")
    assert {name: state for name, (state, _) in (await bench.states()).items()} == {
        "broken": "UNAVAILABLE",
        "fine": "READY",
    }
    assert bench.lifecycle.all_ready()  # a failed call does not make the server unready
    await bench.core.close()


@in_a_loop
async def test_a_failed_start_names_the_failed_models_and_tries_each_once(
    repository: Path, faulty: FaultyBackend
) -> None:
    faulty.add_model(repository, "broken", faults={"load": "ValueError"})
    add_ensemble(repository, "a_first", chain("broken"))
    add_ensemble(repository, "z_last", chain("broken"))
    bench = BareServer(repository)
    assert sorted(await bench.core.start(None)) == ["a_first", "broken", "z_last"]
    # A second load request for a model waits for the load under way and gets its result.
    assert faulty.events("broken").count("load broken") <= 2


@in_a_loop
async def test_the_error_of_a_configuration_names_the_place(repository: Path) -> None:
    add_scaled(repository, "fine", 2)
    add_ensemble(repository, "e", [Step("fine", {"IN": "IN"}, {"OUT": "elsewhere"})])
    bench = BareServer(repository)
    with pytest.raises(InferenceError) as error:
        await bench.load("e")
    assert "e/config.pbtxt:4:" in error.value.message
    assert "fine" not in await bench.states()


@pytest.mark.parametrize("at_once", [False, True])
@in_a_loop
async def test_a_cycle_of_ensembles_is_an_error_that_shows_the_cycle(repository: Path, at_once: bool) -> None:
    for name, step in (("c1", "c2"), ("c2", "c3"), ("c3", "c1"), ("own", "own")):
        add_ensemble(repository, name, chain(step))
    bench = BareServer(repository, load_threads=1)
    if at_once:
        assert sorted(await bench.core.start(None)) == ["c1", "c2", "c3", "own"]
    else:
        circle = "circular dependency between ensembles: "
        assert await bench.refused("c1") == f"{circle}c1 -> c2 -> c3 -> c1"
        assert await bench.refused("c3") == f"{circle}c3 -> c1 -> c2 -> c3"
        assert await bench.refused("own") == f"{circle}own -> own"


@in_a_loop
async def test_a_reload_that_would_make_a_cycle_changes_nothing(repository: Path) -> None:
    add_scaled(repository, "two", 2)
    add_ensemble(repository, "inner", chain("two"))
    add_ensemble(repository, "outer", chain("inner"))
    bench = BareServer(repository)
    await bench.load("outer")
    add_ensemble(repository, "inner", chain("outer"), extra="# changed")
    assert await bench.refused("inner") == "circular dependency between ensembles: inner -> outer -> inner"
    assert await bench.value("outer") == 2
    await bench.core.close()


@in_a_loop
async def test_an_ensemble_is_unavailable_while_its_step_is_unloaded(repository: Path) -> None:
    add_scaled(repository, "two", 2)
    add_scaled(repository, "three", 3)
    add_ensemble(repository, "e", chain("two", "three"))
    add_ensemble(repository, "outer", chain("e"))
    bench = BareServer(repository)
    await bench.load("outer")
    await bench.unload("three")
    assert (await bench.value("e"), await bench.value("outer")) == (unknown("e"), unknown("outer"))
    await until_rest(bench)
    assert await bench.states() == {"e": UNLOADED, "outer": UNLOADED, "three": UNLOADED, "two": READY}
    assert bench.lifecycle.all_ready()
    await bench.load("three")
    assert await bench.states() == dict.fromkeys(["e", "outer", "three", "two"], READY)
    assert await bench.value("outer") == 6
    await bench.core.close()


@in_a_loop
async def test_an_unloaded_ensemble_stays_unloaded_when_its_step_is_loaded(repository: Path) -> None:
    add_scaled(repository, "two", 2)
    add_ensemble(repository, "e", chain("two"))
    bench = BareServer(repository)
    await bench.load("e")
    await bench.unload("two")
    await bench.unload("e")
    await bench.load("two")
    assert (await bench.states())["e"] == UNLOADED
    await bench.load("e")
    assert await bench.value() == 2
    await bench.core.close()


@in_a_loop
async def test_an_ensemble_follows_a_step_whose_configuration_has_changed(repository: Path) -> None:
    add_identity(repository, "step", dims="4")
    add_ensemble(repository, "e", chain("step"))
    add_ensemble(repository, "outer", chain("e"))
    bench = BareServer(repository)
    await bench.load("outer")
    before = bench.core.model("e")
    add_identity(repository, "step", dims="-1", max_batch_size=16)
    await bench.load("step")
    assert bench.core.model("e") is not before
    assert await bench.value("outer") == 1
    add_identity(repository, "step", dims="5")
    await bench.load("step")
    assert await bench.value("outer") == unknown("outer")
    await until_rest(bench)
    states = await bench.states()
    assert (states["step"], states["outer"]) == (READY, UNLOADED)
    assert states["e"][0] == "UNAVAILABLE"
    assert states["e"][1].startswith("Invalid argument: ")
    assert not bench.lifecycle.all_ready()
    add_identity(repository, "step", dims="4")
    await bench.load("step")
    assert await bench.value("outer") == 1
    assert bench.lifecycle.all_ready()
    await bench.core.close()


@in_a_loop
async def test_reload_without_changes_for_the_ensemble_leaves_it_unchanged(repository: Path) -> None:
    add_scaled(repository, "step", 2)
    add_ensemble(repository, "e", chain("step"))
    bench = BareServer(repository)
    await bench.load("e")
    await bench.value()
    add_scaled(repository, "step", 5)
    await bench.load("step")
    assert await bench.value() == 5
    assert (await bench.core.statistics("e"))[0].inference_count == 2
    await bench.core.close()


@in_a_loop
async def test_a_running_request_finishes_when_its_next_step_is_unloaded(
    repository: Path, faulty: FaultyBackend
) -> None:
    faulty.add_model(repository, "slow", faults={"run": "hang"})
    faulty.add_model(repository, "next")
    add_ensemble(repository, "e", chain("slow", "next"))
    add_ensemble(repository, "outer", chain("e", "next"))
    bench = BareServer(repository)
    await bench.load("outer")
    answer = bench.ask("outer")
    await until(lambda: "run slow_0_0" in faulty.events("slow"))
    await bench.unload("next")
    assert await bench.value("next") == unknown("next")
    assert await bench.value("outer") == unknown("outer")
    assert "close_model next" not in faulty.events("next")
    faulty.release("slow")
    assert value_of(await answer) == 1
    await until(lambda: "closed_model next" in faulty.events("next"))
    await until_rest(bench)
    assert await bench.states() == {"e": UNLOADED, "next": UNLOADED, "outer": UNLOADED, "slow": READY}
    await bench.core.close()


@in_a_loop
async def test_a_stop_waits_for_all_steps_of_accepted_requests(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "slow", faults={"run": "hang"})
    for name in ("a_next", "z_next"):
        faulty.add_model(repository, name)
    add_ensemble(repository, "e", chain("slow", "a_next", "z_next"))
    bench = BareServer(repository)
    await bench.load("a_next", "e")
    answer = bench.ask()
    await until(lambda: "run slow_0_0" in faulty.events("slow"))
    bench.core.begin_drain()
    closing = asyncio.create_task(bench.core.close())
    assert await asyncio.wait((closing,), timeout=0.05) == (set(), {closing})
    faulty.release("slow")
    assert value_of(await answer) == 1
    await closing
    assert "closed_model z_next" in faulty.events("z_next")


@in_a_loop
async def test_a_stop_that_times_out_answers_each_request_once(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "slow", faults={"run": "hang"})
    add_ensemble(repository, "e", chain("slow", "slow"))
    add_ensemble(repository, "outer", chain("e"))
    bench = BareServer(repository)
    await bench.load("outer")
    answers = [bench.ask(name) for name in ("e", "outer") for _ in range(3)]
    await until(lambda: "run slow_0_0" in faulty.events("slow"))
    bench.core.abort()
    errors = {value_of(await answer) for answer in answers}
    assert {type(error) for error in errors} == {InferenceError}
    assert all("Server is stopping" in str(error) for error in errors)
    assert bench.lifecycle.busy()[0] == 0
    faulty.release("slow")


@in_a_loop
async def test_an_unload_with_dependents_unloads_unused_steps(repository: Path) -> None:
    for name in ("alone", "asked", "shared"):
        add_scaled(repository, name, 2)
    add_ensemble(repository, "inner", chain("alone"))
    add_ensemble(repository, "e", chain("inner", "asked", "shared"))
    add_ensemble(repository, "other", chain("shared"))
    bench = BareServer(repository)
    await bench.load("asked", "e", "other")
    await bench.unload("e", dependents=True)
    await until_rest(bench)
    assert await bench.states() == {
        "alone": UNLOADED,
        "asked": READY,
        "e": UNLOADED,
        "inner": UNLOADED,
        "other": READY,
        "shared": READY,
    }
    await bench.unload("other")
    await until_rest(bench)
    assert (await bench.states())["shared"] == READY
    await bench.core.close()


@in_a_loop
async def test_an_unload_ends_a_load_that_waits_for_a_step(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "hung", faults={"load": "hang"})
    add_ensemble(repository, "e", chain("hung"))
    bench = BareServer(repository, unload_wait_secs=0.3)
    loading = asyncio.create_task(bench.load("e"))
    await until(lambda: faulty.events("hung") == ["load hung"])
    async with asyncio.timeout(20):
        await bench.unload("e")
        with pytest.raises(InferenceError, match="failed to load 'e', no version is available"):
            await loading
    faulty.release("hung")


@in_a_loop
async def test_an_ensemble_is_ready_when_its_steps_are_ready(repository: Path) -> None:
    add_scaled(repository, "two", 2)
    add_ensemble(repository, "e", chain("two"))
    bench = BareServer(repository)
    await bench.load("e")
    assert await bench.core.is_model_ready("e")
    await bench.unload("two")
    assert not await bench.core.is_model_ready("e")
    await bench.core.close()


@in_a_loop
async def test_labels_come_from_the_step_or_from_the_ensemble(repository: Path) -> None:
    for name in ("step", "other"):
        add_identity(repository, name, dims="4", max_batch_size=4)
        config = (repository / name / "config.pbtxt").read_text()
        (repository / name / "config.pbtxt").write_text(
            config.replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"')
        )
        (repository / name / "labels.txt").write_text(f"{name}0\n{name}1\n")
    outputs = Tensors(["OUT", "OWN"], extra={"OWN": 'label_filename: "own.txt"'})
    steps = [Step("step", {"IN": "IN"}, {"OUT": "OUT"}), Step("other", {"IN": "IN"}, {"OUT": "OWN"})]
    add_ensemble(repository, "e", steps, outputs=outputs)
    add_ensemble(repository, "outer", chain("e"))
    (repository / "e" / "own.txt").write_text("mine\n")
    bench = BareServer(repository)
    await bench.load("outer")
    assert bench.core.model("e").labels == {"OUT": ("step0", "step1"), "OWN": ("mine",)}
    assert bench.core.model("outer").labels == {"OUT": ("step0", "step1")}
    await bench.core.close()


@in_a_loop
async def test_ensembles_and_steps_have_versions_of_their_own(repository: Path) -> None:
    add_scaled(repository, "scaled", 2, version=1)
    add_scaled(repository, "scaled", 3, version=2)
    (repository / "scaled" / "config.pbtxt").write_text("version_policy { all { } }")
    first = Step("scaled", {"IN": "IN"}, {"OUT": "OUT"}, version=1)
    add_ensemble(repository, "e", [first], extra="version_policy { all { } }")
    (repository / "e" / "4").mkdir()
    add_ensemble(repository, "latest", chain("scaled"))
    bench = BareServer(repository)
    await bench.load("e", "latest")
    response = await bench.ask("e")
    assert (response.model_name, response.model_version, value_of(response)) == ("e", "4", 2)
    assert await bench.value("latest") == 3
    assert bench.core.model("e").versions == ("1", "4")
    (repository / "scaled" / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }")
    await bench.load("scaled")
    assert (await bench.value("e"), await bench.value("latest")) == (unknown("e"), 3)
    await bench.core.close()


@in_a_loop
async def test_the_depth_of_nested_calls_is_bounded(repository: Path) -> None:
    add_scaled(repository, "two", 1)
    names = ["two", *(f"e{number:02}" for number in range(33))]
    for step, name in pairwise(names):
        add_ensemble(repository, name, chain(step))
    bench = BareServer(repository)
    way = " -> ".join(reversed(names))
    deep = f"nests ensembles 33 deep: calls within one another are at most 32: {way}"
    assert (await bench.refused("e32")).endswith(f"ensemble 'e32' {deep}")
    assert await bench.value("e31") == 1
    await bench.core.close()


@in_a_loop
async def test_a_reload_that_nests_an_ensemble_too_deep_makes_it_unavailable(repository: Path) -> None:
    add_scaled(repository, "two", 1)
    names = ["two", *(f"e{number:02}" for number in range(32))]
    for step, name in pairwise(names):
        add_ensemble(repository, name, chain(step))
    bench = BareServer(repository)
    await bench.load("e31")
    add_ensemble(repository, "between", chain("two"))
    add_ensemble(repository, "e00", chain("between"))
    await bench.load("e00")
    state, reason = (await bench.states())["e31"]
    assert (state, "nests ensembles 33 deep" in reason) == ("UNAVAILABLE", True)
    assert await bench.value("e30") == 1
    await bench.core.close()


@in_a_loop
async def test_a_call_that_needs_the_instance_of_its_caller_fails_at_once(
    repository: Path, faulty: FaultyBackend
) -> None:
    faulty.add_model(repository, "busy", faults={"run": "hang"})
    add_scaled(repository, "two", 2)
    add_ensemble(repository, "e", chain("two", "busy"))
    add_ensemble(repository, "outer", chain("e"))
    bench = BareServer(repository)
    await bench.load("outer")
    caller = bench.ask("busy")
    await until(lambda: "run busy_0_0" in faulty.events("busy"))
    answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
    inputs = [tensor_from_array("IN", DataType.FP32, np.ones((1, 4), np.float32))]
    # As the busy model's own code would call it from within that batch.
    (first,) = bench.lifecycle.table.by_ticket
    batch = RunningBatch("busy", "1", first)
    bench.core.infer(InferenceRequest("outer", inputs=inputs), answer.set_result, Caller(1, batch))
    error = (await answer).error
    assert error is not None
    assert error.message.startswith("in ensemble 'outer', in ensemble 'e', ")
    assert "model 'busy' is not called: all its instances wait for the answer" in error.message
    faulty.release("busy")
    assert value_of(await caller) == 1
    await bench.core.close()


@in_a_loop
async def test_a_step_that_a_model_calls_fails_after_its_queue_timeout(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "busy", faults={"run": "hang"})
    add_scaled(repository, "two", 2)
    add_ensemble(repository, "e", chain("two", "busy"))
    bench = BareServer(repository)
    await bench.load("e")
    first = bench.ask("busy")
    await until(lambda: "run busy_0_0" in faulty.events("busy"))
    answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
    inputs = [tensor_from_array("IN", DataType.FP32, np.ones((1, 4), np.float32))]
    caller = Caller(1, "a batch", None, "other", 50_000_000)
    bench.core.infer(InferenceRequest("e", inputs=inputs), answer.set_result, caller)
    error = (await answer).error
    assert error is not None
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.message.startswith("in ensemble 'e', ")
    assert "model 'busy' is not called: the call of model 'other' was queued for " in error.message
    faulty.release("busy")
    assert value_of(await first) == 1
    await bench.core.close()


@in_a_loop
async def test_a_call_queued_at_an_unloaded_model_ends_too(repository: Path, faulty: FaultyBackend) -> None:
    faulty.add_model(repository, "busy", faults={"run": "hang"})
    bench = BareServer(repository)
    await bench.load("busy")
    first = bench.ask("busy")
    await until(lambda: "run busy_0_0" in faulty.events("busy"))
    answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
    inputs = [tensor_from_array("IN", DataType.FP32, np.ones((1, 4), np.float32))]
    caller = Caller(1, "a batch", None, "other", 50_000_000)
    bench.core.infer(InferenceRequest("busy", inputs=inputs), answer.set_result, caller)
    await bench.unload("busy")
    error = (await answer).error
    assert error is not None
    assert "model 'busy' is not called: the call of model 'other' was queued for " in error.message
    faulty.release("busy")
    assert value_of(await first) == 1
    await bench.core.close()
