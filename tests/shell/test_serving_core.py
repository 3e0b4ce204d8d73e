"""Cores without ports: several in one process, and what is left of them after their end."""

import asyncio
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from halimede.core.types import DataType, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.tensor import tensor_from_array
from halimede.runtime.requests import STOPPING
from halimede.serving_core import ServingCore, make_core
from halimede.settings import ModelControlMode, Settings
from support.ensemble_server import until
from support.loops import in_a_loop
from support.models import add_scaled
from support.served import add_python


def ask(core: ServingCore, model: str) -> "asyncio.Future[InferenceResponse]":
    answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
    inputs = [tensor_from_array("IN", DataType.FP32, np.ones((1, 4), np.float32))]
    core.server.infer(InferenceRequest(model, inputs=inputs), answer.set_result)
    return answer


async def value(core: ServingCore, model: str) -> float:
    response = await ask(core, model)
    assert response.error is None
    return float(response.outputs[0].array().flat[0])


def threads() -> set[str]:
    """The names of the threads, without those of the loop's executor."""
    return {each.name for each in threading.enumerate() if not each.name.startswith("asyncio")}


def descriptors() -> set[str]:
    return {os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)}


@in_a_loop
async def test_two_cores_serve_side_by_side_and_leave_nothing(tmp_path: Path) -> None:
    add_scaled(tmp_path / "a", "scaled", 2)
    add_scaled(tmp_path / "b", "scaled", 3)
    add_python(tmp_path / "b", "echo")
    threads_before, descriptors_before = threads(), descriptors()
    changes: list[str] = []
    first, second = (
        make_core(
            Settings(model_repository=(tmp_path / each,)),
            on_change=lambda each=each: changes.append(each),
        )
        for each in ("a", "b")
    )
    assert [await first.start(), await second.start()] == [[], []]
    assert (first.server.is_ready(), set(changes)) == (True, {"a", "b"})
    assert [await value(first, "scaled"), await value(second, "scaled"), await value(second, "echo")] == [2, 3, 1]
    with pytest.raises(InferenceError, match="Request for unknown model: 'echo' is not found"):
        first.server.model("echo")
    await first.close()
    # The other one is not concerned.
    assert (first.server.is_ready(), second.server.is_ready()) == (False, True)
    assert [await value(second, "scaled"), await value(second, "echo")] == [3, 1]
    await second.close()
    # The memory of the models may still be returned to the system.
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()} and threads() == threads_before)
    assert descriptors() - descriptors_before == set()


@in_a_loop
async def test_a_core_answers_what_it_accepted_before_it_ends(tmp_path: Path) -> None:
    add_scaled(tmp_path, "scaled", 2)
    core = make_core(Settings(model_repository=(tmp_path,), model_control_mode=ModelControlMode.EXPLICIT))
    assert await core.start() == []
    await core.server.load_model("scaled", {})
    answer = ask(core, "scaled")
    await core.close()
    assert answer.done()
    assert answer.result().error is None


@in_a_loop
async def test_a_core_that_is_not_idle_in_time_answers_with_errors(tmp_path: Path) -> None:
    add_python(tmp_path, "slow", "import threading; threading.Event().wait(30)")
    core = make_core(Settings(model_repository=(tmp_path,)))
    assert await core.start() == []
    answer = ask(core, "slow")
    await core.close(0.1)
    assert (await answer).error == STOPPING
