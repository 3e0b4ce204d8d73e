"""A worker with a process of its own, started by a real launcher, that runs a small python model."""

import asyncio
import atexit
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from halimede.backends.hosting import WorkerSpec
from halimede.core.config.read import read_config
from halimede.core.config.write import to_json
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.processes.launcher import Launcher
from halimede.runtime.services import ModelServices
from halimede.workers.states import HeldStates
from halimede.workers.supervision.program import Program
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.worker import BatchItem, WorkerEvent

NOBODY: Any = SimpleNamespace(cancel=None, acknowledge=None)
"""The other models, for a model that calls none."""
LIMIT_S = 30.0
UNLIMITED = Program()
CONFIG = """
name: "m" backend: "python" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
HEAD = "import os, struct, time\nimport numpy as np\nimport triton_python_backend_utils as pb\n\n"
ECHO = """
def execute(self, requests):
    return [pb.InferenceResponse([pb.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@cache
def shared_launcher() -> Launcher:
    """The launcher of all such workers: its process that forks them starts once."""
    made = Launcher()
    atexit.register(made.close)
    return made


class Play:
    """A worker and its events."""

    def __init__(self) -> None:
        self.events: list[WorkerEvent] = []
        self.worker: ProcessWorker | None = None

    def ask(self, key: int, elements: int = 1) -> BatchItem:
        """A batch of one request, whose input has so many elements with the value of its key."""
        assert self.worker is not None
        values = np.full(elements, key, np.float32)
        tensor = Tensor("IN", DataType.FP32, (1, elements), values.tobytes())
        item = BatchItem(key, InferenceRequest("m", inputs=[tensor]), 1, cancelled=False)
        self.worker.execute([item])
        return item

    async def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}: {self.events}"
            await asyncio.sleep(0.005)

    def heard(self, kind: type[WorkerEvent]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def playing(
    folder: Path,
    methods: str,
    program: Program = UNLIMITED,
    models: Any = None,
    decoupled: bool = False,
    imports: str = "",
    on_start: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[Play, ProcessWorker]]:
    file = folder / "1" / "model.py"
    file.parent.mkdir()
    file.write_text(f"{HEAD}{imports}class TritonPythonModel:\n{textwrap.indent(textwrap.dedent(methods), ' ' * 4)}")
    config = read_config("config.pbtxt", CONFIG).config
    spec = WorkerSpec(
        model="m", version=1, instance="m_0_0", ordinal=0, kind="CPU", device_id=0, device_uuid="", backend="python",
        runner="halimede.backends.python.runner:make_runner", config_json=to_json(config).decode(),
        repository=str(folder), artifact=str(file), decoupled=decoupled,
    )  # fmt: skip
    play = Play()
    services, loop = ModelServices(CustomMetrics(), models or NOBODY), asyncio.get_running_loop()
    on_start()
    play.worker = worker = await ProcessWorker(
        spec,
        config,
        ReplyChecker(config, is_strict=False),
        program,
        shared_launcher(),
        services,
        "m#1",
        play.events.append,
        loop,
        HeldStates(),
    ).start()
    try:
        yield play, worker
    finally:
        await worker.stop()
