"""Plays models of sequences in processes of their own."""

import asyncio
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from halimede.backends.hosting import WorkerSpec
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.write import to_json
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.schedule.replies import ReplyChecker
from halimede.runtime.pump import Pump
from halimede.runtime.services import ModelServices
from halimede.workers.states import HeldStates
from halimede.workers.supervision.program import Program
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.worker import BatchDone, BatchItem, WorkerEvent
from support.playing import NOBODY, shared_launcher

LIMIT_S = 30.0
HEAD = "import os, time, threading\nimport numpy as np\nimport triton_python_backend_utils as pb\n\n"
PYTHON = "halimede.backends.python.runner:make_runner"
BACKEND = "halimede.workers.host.backend_runner:make_runner"


class Play:
    """A worker and its events."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.states = HeldStates(1 << 20)
        self.worker: ProcessWorker
        self.pump: Pump | None = None

    def on_event(self, event: WorkerEvent) -> None:
        self.events.append(event)
        if self.pump is not None:
            self.pump.on_event(event)

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}: {self.events}"
            await asyncio.sleep(0.005)

    def heard(self, kind: type[WorkerEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def batch(self, *items: BatchItem) -> BatchDone:
        before = len(self.heard(BatchDone))
        self.worker.execute(list(items))
        await self.until(lambda: len(self.heard(BatchDone)) > before, "the end of the batch")
        done: BatchDone = self.heard(BatchDone)[-1]
        return done


@asynccontextmanager
async def playing(folder: Path, config: ModelConfig, artifact: Path, decoupled: bool = False) -> AsyncIterator[Play]:
    runner = PYTHON if config.backend == "python" else BACKEND
    spec = WorkerSpec(
        model="m", version=1, instance="m_0_0", ordinal=0, kind="CPU", device_id=0, device_uuid="",
        backend=config.backend, runner=runner, config_json=to_json(config).decode(), repository=str(folder),
        artifact=str(artifact), decoupled=decoupled,
    )  # fmt: skip
    play = Play()
    play.worker = await ProcessWorker(
        spec,
        config,
        ReplyChecker(config, is_strict=False),
        Program(),
        shared_launcher(),
        ModelServices(CustomMetrics(), NOBODY),
        "m#1",
        play.on_event,
        asyncio.get_running_loop(),
        play.states,
    ).start()
    try:
        yield play
    finally:
        await play.worker.stop()


def python_model(folder: Path, methods: str, before: str = "") -> Path:
    file = folder / "1" / "model.py"
    file.parent.mkdir()
    code = textwrap.indent(textwrap.dedent(methods), " " * 4)
    file.write_text(f"{HEAD}{before}class TritonPythonModel:\n{code}")
    return file
