"""A server without front ends, whose models and ensembles the test loads and unloads."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.types.tensor import tensor_from_array
from halimede.runtime.core_server import CoreServer
from halimede.runtime.lifecycle import CLOSE_TIMEOUT_SECS, ModelLifecycle
from halimede.serving_core import ServingCore, make_core
from halimede.settings import ModelControlMode, Settings


@dataclass
class BareServer:
    """A server without front ends, with a repository for one test."""

    repository: Path
    load_threads: int = 4
    unload_wait_secs: float = 60.0
    close_timeout_secs: float = CLOSE_TIMEOUT_SECS
    whole: ServingCore = field(init=False)
    core: CoreServer = field(init=False)
    lifecycle: ModelLifecycle = field(init=False)

    def __post_init__(self) -> None:
        settings = Settings(
            model_repository=(self.repository,),
            model_control_mode=ModelControlMode.EXPLICIT,
            model_load_thread_count=self.load_threads,
            unload_wait_secs=self.unload_wait_secs,
        )
        self.whole = make_core(settings, close_timeout_secs=self.close_timeout_secs)
        self.core = self.whole.server
        self.lifecycle = self.core.lifecycle

    async def load(self, *names: str) -> None:
        for name in names:
            await self.core.load_model(name, {})

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        await self.core.unload_model(name, dependents)

    async def refused(self, name: str) -> str:
        """The error of a load that fails."""
        with pytest.raises(InferenceError) as error:
            await self.load(name)
        assert error.value.code is ErrorCode.INVALID_ARG
        return error.value.message.removeprefix(f"load failed for model '{name}': ")

    async def states(self) -> dict[str, tuple[str, str]]:
        """State and reason by model name, for every model that was loaded."""
        index = await self.core.repository_index(False)
        return {entry.name: (entry.state.value, entry.reason) for entry in index if entry.state is not None}

    def ask(self, name: str = "e", value: float = 1.0) -> "asyncio.Future[InferenceResponse]":
        answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        inputs = [tensor_from_array("IN", DataType.FP32, np.full((1, 4), value, np.float32))]
        self.core.infer(InferenceRequest(name, inputs=inputs), answer.set_result)
        return answer

    async def value(self, name: str = "e", value: float = 1.0) -> float | InferenceError:
        return value_of(await self.ask(name, value))


def value_of(response: InferenceResponse) -> float | InferenceError:
    return response.error or float(response.outputs[0].array().flat[0])


async def until(condition: Callable[[], bool]) -> None:
    """Poll every few milliseconds; fails at a time limit."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def until_rest(server: BareServer) -> None:
    await until(lambda: server.lifecycle.busy()[1] == sum(len(r.versions) for r in server.lifecycle.records.values()))


def unknown(name: str) -> InferenceError:
    return InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' has no available versions")
