"""The states of sequences count against one bound of the server, wherever the instances run."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.api import RunContext
from halimede.backends.service_calls import TakeState
from halimede.channel.frames import encode_frame
from halimede.core.schedule.sequences.policy import sequence_policy
from halimede.core.schedule.sequences.scheduler import SequenceScheduler
from halimede.core.types import Placement
from halimede.workers.frames.kinds import STATE_FREED, WorkerFrame
from halimede.workers.frames.services import decode_service_result, encode_service_call, service_call_frame
from halimede.workers.states import HeldStates
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import WorkerDown, WorkerUp
from support.channel import stage
from support.loops import in_a_loop
from support.pumping import Bench
from support.sequence_playing import LIMIT_S, Play, playing, python_model
from support.sequences import config_of, item

CONFIG = """
oldest { max_candidate_sequences: 8 } max_sequence_idle_microseconds: %d
state { input_name: "in" output_name: "out" data_type: TYPE_FP32 dims: [ -1 ] }
"""
LONG, SHORT = 3_600_000_000, 30_000
STEP = 64 << 10
STEP_ELEMENTS = STEP // 4
# The new state has as many elements as x says.
GROW = """
def execute(self, requests):
    replies = []
    for request in requests:
        named = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        state = np.zeros((1, int(named["x"][0, 0])), np.float32)
        replies.append(pb.InferenceResponse([pb.Tensor("y", named["x"]), pb.Tensor("out", state)]))
    return replies
"""


class Grow:
    """A TensorInstance that does the same, and a model that has it."""

    def create_instance(self, placement: Placement) -> "Grow":
        return self

    def run(self, inputs: Mapping[str, Any], outputs: object, context: RunContext) -> dict[str, Any]:
        return {"y": inputs["x"], "out": np.zeros((len(inputs["x"]), int(inputs["x"][0, 0])), np.float32)}

    def close(self) -> None:
        """Nothing to free."""


class Sequences:
    """Requests of sequences through a pump."""

    def __init__(self, bench: Bench, states: HeldStates) -> None:
        self.bench = bench
        self.states = states
        self._key = 0

    async def run(self, sequence: int, elements: int, *, start: bool = False, end: bool = False) -> str:
        """Have the state of the sequence get so many elements. Returns the error of the request."""
        self._key += 1
        key = self._key
        inputs = item(key, 0, float(elements)).request.inputs
        self.bench.submit(key, inputs=inputs, sequence_id=sequence, sequence_start=start, sequence_end=end)
        await until(lambda: self.bench.requests.find(key) is None, "the answer")
        error = next(each.error for number, each in self.bench.responses if number == key)
        return "" if error is None else f"{error.code.name} {error.message}"

    async def empty(self) -> None:
        await until(lambda: self.states.account.held_bytes == 0, "the end of all states")


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        await asyncio.sleep(0.002)


@asynccontextmanager
async def in_process(folder: Path, idle_us: int = LONG) -> AsyncIterator[tuple[Sequences, Play]]:
    config = config_of(CONFIG % idle_us, backend="python")
    assert config.sequence_batching is not None
    async with playing(folder, config, python_model(folder, GROW)) as play:
        scheduler = SequenceScheduler(sequence_policy(config, config.sequence_batching))
        bench = Bench(workers=0, scheduler=scheduler)
        play.pump = bench.pump
        bench.pump.add_worker(play.worker)
        yield Sequences(bench, play.states), play


@asynccontextmanager
async def on_thread(idle_us: int = LONG) -> AsyncIterator[Sequences]:
    config = config_of(CONFIG % idle_us)
    assert config.sequence_batching is not None
    states = HeldStates(1 << 20)
    scheduler = SequenceScheduler(sequence_policy(config, config.sequence_batching))
    bench, model, loop = Bench(workers=0, scheduler=scheduler), Grow(), asyncio.get_running_loop()
    placement = Placement("m_0", 0, "CPU")
    worker = await ThreadWorker(placement, model, config, bench.pump.on_event, loop, states=states).start()
    bench.pump.add_worker(worker)
    yield Sequences(bench, states)
    await bench.pump.close()


async def outgrow(sequences: Sequences) -> None:
    """A state that doubles with each request ends its sequence at the bound. Another one is not concerned."""
    assert await sequences.run(8, 10, start=True) == ""
    assert await sequences.run(7, 1, start=True) == ""
    elements, error = 1, ""
    while not error:
        assert sequences.states.account.held_bytes <= 1 << 20
        elements *= 2
        error = await sequences.run(7, elements)
    assert elements == 1 << 18, "two times 512 KiB, and the other sequence, are more than 1 MiB"
    size = 4 * elements
    assert error == (
        f"UNAVAILABLE sequence 7 for model 'm' has ended: its new state of {size} bytes would exceed the memory that "
        "the server has for the states of sequences; begin the sequence again with the START flag"
    )
    assert "must specify the START flag" in await sequences.run(7, 1)
    assert await sequences.run(8, 20) == ""
    assert await sequences.run(7, 1, start=True) == ""
    for sequence in (7, 8):
        assert await sequences.run(sequence, 1, end=True) == ""
    await sequences.empty()


@in_a_loop
async def test_a_state_that_grows_in_a_process_ends_its_sequence_at_the_bound(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (sequences, _):
        await outgrow(sequences)


@in_a_loop
async def test_a_state_that_grows_on_a_thread_ends_its_sequence_at_the_bound() -> None:
    async with on_thread() as sequences:
        await outgrow(sequences)


@in_a_loop
async def test_a_process_gets_what_is_left_of_the_bound_if_a_step_is_not(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (sequences, _):
        assert sequences.states.try_take((1 << 20) - 100)
        assert await sequences.run(7, 25, start=True) == ""
        assert sequences.states.account.held_bytes == 1 << 20
        assert "has ended" in await sequences.run(8, 1, start=True)
        sequences.states.give_back((1 << 20) - 100)
        assert await sequences.run(7, 25, end=True) == ""
        await sequences.empty()


@in_a_loop
async def test_idle_sequences_return_their_states(tmp_path: Path) -> None:
    async with in_process(tmp_path, SHORT) as (sequences, _):
        assert await sequences.run(7, STEP_ELEMENTS, start=True) == ""
        assert sequences.states.account.held_bytes == STEP
        await sequences.empty()
    async with on_thread(SHORT) as sequences:
        assert await sequences.run(7, STEP_ELEMENTS, start=True) == ""
        await sequences.empty()


@in_a_loop
async def test_the_states_of_a_process_that_was_killed_are_returned(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (sequences, play):
        for sequence in (7, 8):
            assert await sequences.run(sequence, 3 * STEP_ELEMENTS, start=True) == ""
        assert sequences.states.account.held_bytes == 6 * STEP
        os.kill(play.worker.pid or 0, signal.SIGKILL)
        await until(lambda: play.heard(WorkerDown), "the end of the process")
        assert sequences.states.account.held_bytes == 0
        await until(lambda: play.heard(WorkerUp), "the next process")
        assert "has lost its state" in await sequences.run(7, 1)
        assert await sequences.run(7, 1, start=True, end=True) == ""
        await sequences.empty()


@in_a_loop
async def test_an_instance_that_is_closed_returns_the_states_of_open_sequences(tmp_path: Path) -> None:
    async with in_process(tmp_path) as (sequences, _):
        assert await sequences.run(7, 1, start=True) == ""
    assert sequences.states.account.held_bytes == 0
    async with on_thread() as sequences:
        assert await sequences.run(7, 1, start=True) == ""
        assert sequences.states.account.held_bytes == 4
    assert sequences.states.account.held_bytes == 0


@in_a_loop
async def test_a_process_that_frees_more_than_it_has_is_lost() -> None:
    async with stage() as each:
        await each.send(service_call_frame(1, encode_service_call(TakeState(100))))
        assert decode_service_result((await each.receive())[1]) == (1, True)
        assert each.states.account.held_bytes == 100
        await each.send(encode_frame(WorkerFrame.STATE_FREED, STATE_FREED.pack(101)))
        assert await each.until_lost() == "it sent garbage: 101 bytes of states given back, of 100 that it has"
        assert each.states.account.held_bytes == 0
