"""The cost of a model's call of another model: CPU time of the main threads of server, caller and target."""

import asyncio
import os
import tempfile
from pathlib import Path

import numpy as np
import uvloop
from models import PYTHON_IDENTITY, config, python_identity_config

from halimede.core.types import DataType, InferenceRequest, InferenceResponse, Tensor
from halimede.serving_core import make_core
from halimede.settings import Settings

ROUNDS = 5
WARM_UP = 300

CALLER = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        size, calls = requests[0].inputs()[0].as_numpy()[0]
        data = np.zeros((1, size // 4), np.float32)
        for _ in range(calls):
            request = pb_utils.InferenceRequest(
                model_name="target", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", data)]
            )
            answer = request.exec()
            if answer.has_error():
                raise RuntimeError(answer.error().message())
            pb_utils.get_output_tensor_by_name(answer, "OUT").as_numpy()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((1, 1), np.float32))])]
"""


def bls_us(size_bytes: int, calls: int, target: str = "python") -> list[float]:
    """Microseconds of CPU per call with a tensor of this size, for calls in sequence, over all processes, by round.

    `target` is the backend that returns its input.
    """
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        made = {
            "caller": config("caller", "python", ("IN", "OUT"), "2", 1).replace("TYPE_FP32", "TYPE_INT32", 1),
            "target": python_identity_config("target", "-1").replace('"python"', f'"{target}"'),
        }
        for name, text in made.items():
            version = repository / name / "1"
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(text)
        (repository / "caller" / "1" / "model.py").write_text(CALLER)
        if target == "python":
            (repository / "target" / "1" / "model.py").write_text(PYTHON_IDENTITY)
        return uvloop.run(_rounds(repository, size_bytes, calls))


def _cpu_ns() -> int:
    """CPU time of the main threads of this process and its descendants, in nanoseconds; threads of models count too."""
    processes, found = [os.getpid()], []
    while processes:
        pid = processes.pop()
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            processes += map(int, children.read_text().split())
    return sum(
        int(task.read_text().split()[0]) for pid in found for task in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


async def _rounds(repository: Path, size_bytes: int, calls: int) -> list[float]:
    core = make_core(Settings(model_repository=(repository,), allow_cpu_metrics=False))
    if failed := await core.start():
        raise RuntimeError(f"{failed} did not load")

    async def play(count: int) -> None:
        answered: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        asked = Tensor("IN", DataType.INT32, (1, 2), np.array([size_bytes, count], np.int32).tobytes())
        core.server.infer(InferenceRequest("caller", inputs=[asked]), answered.set_result)
        if (error := (await answered).error) is not None:
            raise error

    await play(WARM_UP)
    samples = []
    for _ in range(ROUNDS):
        before = _cpu_ns()
        await play(calls)
        samples.append((_cpu_ns() - before) / calls / 1000)
    await core.close()
    return samples
