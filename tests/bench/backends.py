"""What the server costs each CPU backend: the time of a bare loop for the batches that the server formed, over the server's.

Every model takes some milliseconds for a full batch on one thread, and CALLERS callers keep the queue full. A server window
and the bare loop of its batches alternate, and the models take turns, so that a change of the machine's speed meets all of
them. The goal of each is 0.95 of what the ONNX backend reaches with the same isolation.
"""

import json
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import perf_analyzer
from bare import Bare
from frameworks import FRAMEWORKS, Framework

from halimede.demo.process import ServerProcess

CALLERS = 16
ROUNDS = 9
SETTLING_S = 1.0
WINDOW_S = 1.5
REFERENCE = "onnx"
DATA = "inputs.json"
READY_S = 180
"""TensorFlow is imported, and all models are loaded at the same time."""


@dataclass(slots=True)
class Backend:
    """`ratios` are by round, and so is `to_onnx`: over the ratio of the ONNX backend; empty for that one itself."""

    name: str
    isolation: str
    size: int
    full: int
    """Rows of a full batch."""
    batch_ms: float
    """Of a full batch in the bare loop, when the model's size was chosen."""
    ratios: list[float] = field(default_factory=list)
    to_onnx: list[float] = field(default_factory=list)
    formed: Counter[int] = field(default_factory=Counter)

    @property
    def model(self) -> str:
        return f"{self.name}_{self.isolation}"

    @property
    def is_full(self) -> float:
        """The share of the batches that are full."""
        return self.formed[self.full] / self.formed.total()


def measured(scratch: Path) -> list[Backend]:
    """Each installed backend with its own isolation, and ONNX with both."""
    installed = {name: each for name, each in FRAMEWORKS.items() if each.is_installed()}
    repository = scratch / "backends"
    with ExitStack() as stack:
        loops: dict[str, Bare] = {}
        found: list[Backend] = []
        for name, each in installed.items():
            path = scratch / "bare" / name / each.filename
            path.parent.mkdir(parents=True)
            # One at a time: each looks for the size of its model.
            loops[name] = loop = stack.enter_context(Bare(name, path))
            (path.parent / DATA).write_text(_data(each))
            for isolation in ("thread", "process") if name == REFERENCE else (each.isolation,):
                backend = Backend(name, isolation, loop.size, each.batch, loop.batch_ms)
                _add(repository, backend, each, path)
                found.append(backend)
        server = stack.enter_context(ServerProcess([f"--model-repository={repository}"], scratch / "backends.log"))
        server.wait_ready(READY_S)
        for _ in range(ROUNDS):
            for backend in found:
                data = repository / backend.model / "1" / DATA
                _measure(server.address("http"), backend, installed[backend.name], data, loops[backend.name])
    references = {each.isolation: each.ratios for each in found if each.name == REFERENCE}
    for each in found:
        if each.name != REFERENCE:
            each.to_onnx = [own / other for own, other in zip(each.ratios, references[each.isolation], strict=True)]
    return found


def _add(repository: Path, backend: Backend, framework: Framework, path: Path) -> None:
    """The model in the repository; its version is a link to the bare loop's folder."""
    folder = repository / backend.model
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(framework.config(backend.model, backend.isolation))
    (folder / "1").symlink_to(path.parent, target_is_directory=True)


def _data(framework: Framework) -> str:
    """The rows of the bare loop, for the load generator, whose own would be random bytes."""
    rows = framework.inputs(framework.rows).tolist()
    return json.dumps({"data": [{framework.tensors[0]: row} for row in rows]})


def _measure(address: str, backend: Backend, framework: Framework, data: Path, loop: Bare) -> None:
    """One pair: a window of the server, then the bare loop of its batches."""
    with perf_analyzer.loading(backend.model, "http", address, CALLERS, framework.rows, data):
        time.sleep(SETTLING_S)
        before, start = _formed(address, backend.model), time.perf_counter()
        time.sleep(WINDOW_S)
        formed, took_s = _formed(address, backend.model) - before, time.perf_counter() - start
    backend.formed += formed
    backend.ratios.append(loop.seconds(formed) / took_s)


def _formed(address: str, model: str) -> Counter[int]:
    """Executions by batch size since the load."""
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/stats", timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    return Counter({each["batch_size"]: each["compute_infer"]["count"] for each in found["batch_stats"]})
