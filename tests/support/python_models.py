"""A worker process within the test process: a host that records its calls, and models of a few lines."""

import asyncio
import json
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.hosting import Answer, BatchReply, HostedRequest, Reply, Runner, WorkerSpec
from halimede.backends.python.runner import PythonRunner, make_runner
from halimede.backends.service_calls import NewMetric, NewMetricFamily, ServiceCall
from halimede.core.types import DataType, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.workers.frames.services import decode_service_call, encode_service_call
from halimede.workers.states import HeldStates

HEAD = "import threading\nimport numpy as np\nimport triton_python_backend_utils as pb\n"


@dataclass(slots=True)
class Hosted:
    key: int
    request: InferenceRequest
    rows: int = 1
    sequence_slot: int = 0


class FakeCall:
    """An inference that returns its answers in sequence; a generator is read lazily."""

    def __init__(self, request: InferenceRequest, answers: Iterable[InferenceResponse]) -> None:
        self.request = request
        self.cancelled = False
        self.is_read_on = False
        self._answers = iter(answers)
        self._lock = threading.Lock()

    def receive(self) -> InferenceResponse | None:
        with self._lock:
            return next(self._answers, None)

    async def receive_async(self) -> InferenceResponse | None:
        await asyncio.sleep(0)
        return self.receive()

    def cancel(self, *, reads_on: bool = False) -> None:
        self.cancelled = True
        self.is_read_on = reads_on


@dataclass
class FakeHost:
    """Records logs, answers by key, calls, updates and inferences. Calls return `results`; errors in it are raised.

    `infers` answers inferences. The model keeps only the call: `inferred` has the requests.
    """

    cancelled: set[int] = field(default_factory=set)
    logs: list[tuple[str, str]] = field(default_factory=list)
    answers: list[tuple[int, Reply, bool]] = field(default_factory=list)
    calls: list[ServiceCall[Any]] = field(default_factory=list)
    updates: list[tuple[int, str, float]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    refuses: InferenceError | None = None
    ended: str = ""
    infers: Callable[[InferenceRequest], Iterable[InferenceResponse]] | None = None
    inferred: deque[InferenceRequest] = field(default_factory=deque)
    states: HeldStates = field(default_factory=HeldStates)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = 0

    def is_cancelled(self, request: HostedRequest) -> bool:
        return request.key in self.cancelled

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        if self.refuses is not None:
            raise self.refuses
        with self._lock:
            self.answers.append((request.key, reply, final))

    def log(self, level: str, message: str, origin: str = "") -> None:
        self.logs.append((level, message))

    def call(self, call: ServiceCall[Any]) -> Any:
        # As the server receives it.
        self.calls.append(decode_service_call(bytes(4) + encode_service_call(call))[1])
        if call.NAME in self.results:
            result = self.results[call.NAME]
            if isinstance(result, InferenceError):
                raise result
            return result
        if not isinstance(call, NewMetricFamily | NewMetric):
            return None
        self._numbers += 1
        return self._numbers

    def infer(self, request: InferenceRequest) -> FakeCall:
        self.inferred.append(request)
        assert self.infers is not None, "this test does not answer inferences"
        return FakeCall(request, self.infers(request))

    def end(self, why: str) -> None:
        self.ended = why

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        self.updates.append((metric, operation, value))


def write(folder: Path, code: str, name: str = "m", file: str = "model.py", **config: Any) -> WorkerSpec:
    """A repository with one model of one version, and the `WorkerSpec` of it. `code` is dedented."""
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / file).write_text(HEAD + textwrap.dedent(code))
    return spec_of(folder, version / file, name, **config)


def spec_of(folder: Path, artifact: Path, name: str = "m", *, decoupled: bool = False, **config: Any) -> WorkerSpec:
    whole = {
        "name": name,
        "max_batch_size": 8,
        "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]}, {"name": "MORE"}],
        **config,
    }
    return WorkerSpec(
        model=name,
        version=1,
        instance=f"{name}_0",
        ordinal=0,
        kind="CPU",
        device_id=0,
        device_uuid="",
        backend="python",
        runner="halimede.backends.python.runner:make_runner",
        config_json=json.dumps(whole, separators=(",", ":")),
        repository=str(folder / name),
        artifact=str(artifact),
        decoupled=decoupled,
    )


def runner_of(folder: Path, code: str, host: FakeHost | None = None, **config: Any) -> PythonRunner:
    runner = make_runner(write(folder, code, **config), host or FakeHost())
    assert isinstance(runner, PythonRunner)
    return runner


def sequence_runner_of(folder: Path, code: str, config: dict[str, Any], host: FakeHost, **how: Any) -> Runner:
    """The runner of a model with this complete configuration."""
    return make_runner(write(folder, code, **{**config, **how}), host)


def body(code: str, how: str = "def") -> str:
    """The source of a model with this code as its `execute`."""
    lines = textwrap.indent(textwrap.dedent(code).strip(), " " * 8)
    return f"class TritonPythonModel:\n    {how} execute(self, requests):\n{lines}\n"


def asked(key: int = 0, *inputs: Tensor, **fields: Any) -> Hosted:
    """A request for model m; by default with an input IN, FP32 [1, key]."""
    return Hosted(key, InferenceRequest("m", inputs=list(inputs) or [fp32("IN", [[1.0, float(key)]])], **fields))


def fp32(name: str, values: Sequence[Any]) -> Tensor:
    return tensor_from_array(name, DataType.FP32, np.array(values, np.float32))


def values(reply: BatchReply) -> dict[str, Any]:
    """The outputs of an answer as lists."""
    assert isinstance(reply, Answer), reply
    return {tensor.name: tensor.array().tolist() for tensor in reply.outputs}
