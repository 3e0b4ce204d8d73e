"""A server whose models run on a real GPU: where they run, the memory that they take and give back, how long they start."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from halimede.core.types import Device
from support.calls import load, unload
from support.gpus import GPU, KIND, TORCH_DEVICE, instance_group, needs_device, needs_gpu, needs_torch
from support.served import add_python, body, infer, workers
from support.server import RunningServer, start_server, wait_until

pytestmark = needs_device

MIB = 1 << 20
Record = Callable[[str, object], None]

DRIVER = """
def initialize(self, args):
    self.cuda = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    assert self.cuda.cuInit(0) == 0
    assert self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert self.cuda.cuCtxSetCurrent(context) == 0
"""
"""CUDA's driver interface, because no library for GPUs may be installed."""

WHERE = """
import uuid
count, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert self.cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
assert self.cuda.cuDeviceGetUuid_v2(identity, 0) == 0
text = f"{os.environ['CUDA_VISIBLE_DEVICES']} {count.value} GPU-{uuid.UUID(bytes=bytes(identity))}"
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[text]], object))]) for _ in requests]
"""

# The process that replaces a killed one takes nothing, so that what the killed one held is seen to be free.
TAKES_ONCE = f"""
{DRIVER}
    if not os.path.exists(NOTES):
        note("taken")
        memory = ctypes.c_uint64()
        assert self.cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(2048 << 20)) == 0
"""

NETWORK = """
import torch

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def forward(self, IN):
        return torch.relu(self.layers(IN))
"""

TAKES = """
import torch

class Takes(torch.nn.Module):
    def forward(self, IN):
        return torch.zeros(int(IN.max()) << 20, dtype=torch.uint8, device=IN.device)[:1].reshape(1, 1).float()
"""


HUGE = f"""
import torch

class Huge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.empty(1 << 50, dtype=torch.uint8, device="{TORCH_DEVICE}"))

    def forward(self, IN):
        return IN
"""
NO_MEMORY = "out of memory" if KIND == "GPU" else "allocate"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@contextmanager
def serving(repository: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[RunningServer]:
    """A server that loads no model by itself."""
    arguments = (f"--model-repository={repository}", "--model-control-mode=explicit", *arguments)
    server = start_server(repository.parent, arguments, environment=environment)
    # The first load of PyTorch reads gigabytes of libraries.
    server.answer_limit_s = 80
    try:
        yield server
    finally:
        server.kill()


def add_on_gpu(repository: Path, name: str, execute: str, **how: Any) -> None:
    """A python model with an instance on the GPU."""
    add_python(repository, name, execute, **how)
    config = repository / name / "config.pbtxt"
    group = instance_group()
    config.write_text(re.sub(r"instance_group \[.*\]\n", lambda _: f"{group}\n", config.read_text()))


def add_torch(repository: Path, name: str, code: str, dims: int = 1, count: int = 1) -> None:
    """A PyTorch model in Python, from IN to OUT. Its weights are those of its constructor."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(f"""
        backend: "pytorch"
        runtime: "model.py"
        max_batch_size: 64
        input {{ name: "IN" data_type: TYPE_FP32 dims: {dims} }}
        output {{ name: "OUT" data_type: TYPE_FP32 dims: {dims} }}
        {instance_group(count)}
    """)


def used_bytes(server: RunningServer) -> float:
    found = re.search(r"^nv_gpu_memory_used_bytes\{[^}]*\} (\S+)", server.metrics(), re.MULTILINE)
    assert found is not None, "no memory of a GPU in the metrics"
    return float(found[1])


def loaded(server: RunningServer, name: str) -> float:
    """Load a model; the seconds that it took."""
    begun = time.monotonic()
    assert load(server, name) == (200, "")
    return time.monotonic() - begun


@needs_gpu
def test_an_instance_runs_on_the_gpu_whose_uuid_is_visible(repository: Path) -> None:
    assert isinstance(GPU, Device)
    add_on_gpu(repository, "where", WHERE, methods=DRIVER, datatype="BYTES", dims="1")
    question = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": ["?"]}]}
    with serving(repository, environment={"CUDA_VISIBLE_DEVICES": GPU.uuid}) as server:
        # With one visible GPU its number is 0, whatever the driver's number is.
        config = repository / "where" / "config.pbtxt"
        config.write_text(re.sub(r"gpus: \[ \d+ \]", "gpus: [ 0 ]", config.read_text()))
        loaded(server, "where")
        answer = server.post("/v2/models/where/infer", question)
        assert answer.json["outputs"][0]["data"] == [f"{GPU.uuid} 1 {GPU.uuid}"]  # type: ignore[index]
        devices = server.get("/v2/halimede/devices").json["devices"]  # type: ignore[index]
        assert [each["uuid"] for each in devices] == [GPU.uuid]


@needs_gpu
def test_a_gpu_that_is_not_visible_is_not_used(repository: Path) -> None:
    add_on_gpu(repository, "where", WHERE, methods=DRIVER, datatype="BYTES", dims="1")
    with serving(repository, environment={"CUDA_VISIBLE_DEVICES": "GPU-none"}) as server:
        assert load(server, "where")[0] == 400
        assert "nv_gpu_memory_used_bytes{" not in server.metrics()


@needs_gpu
def test_the_memory_of_a_killed_worker_is_given_back(repository: Path, record_property: Record) -> None:
    add_on_gpu(repository, "taker", "return [answer(request) for request in requests]", methods=TAKES_ONCE)
    with serving(repository, "--metrics-interval-ms=100") as server:
        before = used_bytes(server)
        loaded(server, "taker")
        wait_until(lambda: used_bytes(server) - before >= 2048 * MIB, "the memory of the model", server)
        record_property("taken MiB", round((used_bytes(server) - before) / MIB))
        (worker,) = workers(server, "taker")
        os.kill(worker.pid, signal.SIGKILL)
        begun = time.monotonic()
        # The process that replaces it has a context, of some hundred MiB.
        wait_until(lambda: used_bytes(server) - before < 1536 * MIB, "the memory to be free", server, limit_s=30)
        record_property("free after s", round(time.monotonic() - begun, 1))
        wait_until(lambda: infer(server, "taker", 7.0) == (200, [7.0]), "the process that replaces it", server)
        assert unload(server, "taker") == 200
        wait_until(lambda: used_bytes(server) - before < 64 * MIB, "the memory of the context to be free", server)
        # The driver decides which others there are.
        names = re.findall(r"^(nv_gpu_\w+|nv_energy\w+)\{", server.metrics(), re.MULTILINE)
        record_property("metrics", " ".join(names))


@needs_torch
def test_a_request_beyond_the_memory_fails_and_the_next_is_answered(repository: Path) -> None:
    add_torch(repository, "takes", TAKES)
    with serving(repository) as server:
        loaded(server, "takes")
        (worker,) = workers(server, "takes")
        assert infer(server, "takes", 1.0) == (200, [0.0])
        # A TiB.
        status, error = infer(server, "takes", float(1 << 20))
        assert (status, str(error).partition(", message")[0]) == (
            500,
            "Failed to process the request(s) for model instance 'takes_0_0'",
        )
        assert NO_MEMORY in str(error)
        assert infer(server, "takes", 1.0) == (200, [0.0])
        assert workers(server, "takes") == [worker]


@needs_torch
def test_a_model_that_does_not_fit_is_refused_and_another_is_loaded(repository: Path) -> None:
    add_torch(repository, "huge", HUGE)
    add_torch(repository, "takes", TAKES)
    with serving(repository) as server:
        status, error = load(server, "huge")
        assert (status, NO_MEMORY in error) == (400, True), error
        loaded(server, "takes")
        assert infer(server, "takes", 1.0) == (200, [0.0])


@needs_torch
def test_the_start_of_models_is_measured(repository: Path, record_property: Record) -> None:
    code = NETWORK.replace("WIDTH", "1024").replace("DEPTH", "16")
    for name in ("first", "second"):
        add_torch(repository, name, code, dims=1024)
    begun = time.monotonic()
    with serving(repository) as server:
        record_property("server s", round(time.monotonic() - begun, 2))
        for name in ("first", "second"):
            record_property(f"{name} model s", round(loaded(server, name), 2))
            answer = server.post(f"/v2/models/{name}/infer", body(*[1.0] * 1024))
            assert answer.status == 200
            assert len(answer.json["outputs"][0]["data"]) == 1024  # type: ignore[index]
