"""The cost of sending a batch to a worker process and back: the CPU time of the two processes."""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvloop
from models import PYTHON_IDENTITY, python_identity_config

from halimede.backends.hosting import WorkerSpec
from halimede.core.config.read import read_config
from halimede.core.config.write import to_json
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.schedule.replies import ReplyChecker
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.types.request import form_of
from halimede.processes.launcher import Launcher
from halimede.runtime.services import ModelServices
from halimede.workers.states import HeldStates
from halimede.workers.supervision.program import Program
from halimede.workers.supervision.worker import ProcessWorker
from halimede.workers.worker import BatchDone, BatchItem, WorkerEvent

NOBODY: Any = SimpleNamespace(cancel=None, acknowledge=None)
"""The other models: the model calls none."""
ROUNDS = 5
WARM_UP = 300


def hop_us(size_bytes: int, hops: int) -> list[float]:
    """Microseconds of CPU per batch of one request with a tensor of this size, parent and child together, by round."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "1", "model.py")
        program.parent.mkdir()
        program.write_text(PYTHON_IDENTITY)
        return uvloop.run(_hops(folder, str(program), size_bytes, hops))


def _cpu_ns(pid: int) -> int:
    """CPU time of a process's main thread, in nanoseconds."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


async def _hops(folder: str, program: str, size_bytes: int, hops: int) -> list[float]:
    loop = asyncio.get_running_loop()
    config = read_config("config.pbtxt", python_identity_config("ident", "-1")).config
    answered: asyncio.Future[WorkerEvent] = loop.create_future()

    def on_event(event: WorkerEvent) -> None:
        answered.set_result(event)

    launcher = Launcher()
    spec = WorkerSpec(
        "ident",
        1,
        "ident_0",
        0,
        "CPU",
        0,
        "",
        "python",
        "halimede.backends.python.runner:make_runner",
        to_json(config).decode(),
        folder,
        program,
    )
    services = ModelServices(CustomMetrics(), NOBODY)
    worker = await ProcessWorker(
        spec,
        config,
        ReplyChecker(config, is_strict=False),
        Program(),
        launcher,
        services,
        "ident#1",
        on_event,
        loop,
        HeldStates(),
    ).start()
    data = bytes(size_bytes)
    # Front ends know the form of such requests.
    form = form_of("ident", "", (("IN", DataType.FP32, (1, size_bytes // 4)),), ())

    async def hop(key: int) -> None:
        nonlocal answered
        answered = loop.create_future()
        tensor = Tensor("IN", DataType.FP32, (1, size_bytes // 4), data)
        worker.execute([BatchItem(key, InferenceRequest.of(form, "", [tensor], {}), 1, False)])
        done = await answered
        if not isinstance(done, BatchDone) or done.failed:
            raise RuntimeError(f"the worker sent {done!r}")

    child = worker.pid
    if child is None:
        raise RuntimeError("the worker has no process")
    for key in range(WARM_UP):
        await hop(key)
    samples = [await _round(hop, hops, child) for _ in range(ROUNDS)]
    await worker.stop()
    launcher.close()
    return samples


async def _round(hop: Callable[[int], Awaitable[Any]], hops: int, child: int) -> float:
    before = _cpu_ns(os.getpid()) + _cpu_ns(child)
    for key in range(hops):
        await hop(WARM_UP + key)
    return (_cpu_ns(os.getpid()) + _cpu_ns(child) - before) / hops / 1000
