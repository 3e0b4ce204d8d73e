"""PyTorch on a real GPU. Skipped where there is none, or where the installed torch cannot use it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halimede.core.config.model_config import InstanceKind, ModelInstanceGroup
from halimede.core.types import InferenceError, Placement
from support.gpus import GPU, KIND, TORCH_DEVICE, instance_group, needs_device, needs_gpu, needs_torch
from support.server import start_server, wait_until

pytestmark = [needs_device, needs_torch]

X = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
MODULE = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)
        self.to(DEVICE)

    def forward(self, x):
        return torch.softmax(self.second(torch.relu(self.first(x))), dim=1)
"""


@pytest.fixture
def models() -> Any:
    """The support module, which imports torch."""
    from support import torch_models

    return torch_models


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "1"
    directory.mkdir()
    return directory


@contextmanager
def on_gpu(models: Any, path: Path, config: Any, kind: str = KIND) -> Iterator[Any]:
    """An instance on the device. In inference mode, which its end leaves."""
    device = GPU if kind == "GPU" else None
    group = ModelInstanceGroup("m", InstanceKind[f"KIND_{kind}"], 1, gpus=() if device is None else (device.index,))
    loaded = models.BACKEND.load(replace(config, instance_group=(group,)), models.source(path))
    instance = loaded.create_instance(Placement("m_0", 0, kind, device))
    try:
        yield instance
    finally:
        instance.close()
        loaded.close()


def run(models: Any, path: Path, config: Any, inputs: dict[str, Any], kind: str = KIND) -> Any:
    with on_gpu(models, path, config, kind) as instance:
        return instance.run(inputs, [each.name for each in config.output], models.CONTEXT)


def test_a_gpu_computes_what_a_cpu_computes(models, version):
    import torch

    network = models.Network()
    expected = network(torch.from_numpy(X.copy())).detach().numpy()
    models.script(network, version / "s.pt")
    rows = {0: torch.export.Dim("rows", min=1, max=64)}
    models.export(network, (torch.zeros(2, 8),), version / "e.pt2", dynamic=(rows,))
    (version / "net.py").write_text(MODULE.replace("DEVICE", "'cpu'"))
    torch.save(network.state_dict(), version / "net.pt")
    # Saved where it was trained.
    network.to(TORCH_DEVICE)
    models.trace(network, (torch.zeros(2, 8, device=TORCH_DEVICE),), version / "t.pt")
    models.export(network, (torch.zeros(2, 8, device=TORCH_DEVICE),), version / "g.pt2", dynamic=(rows,))
    named = models.config({"x": (models.FP32, 8)}, {"y": (models.FP32, 3)})
    by_path = models.config({"ARGS[0]": (models.FP32, 8)}, {"RESULT": (models.FP32, 3)})
    configs = {"s.pt": named, "t.pt": named, "e.pt2": by_path, "g.pt2": by_path, "net.py": named}
    for name, config in configs.items():
        path = version / name
        found = run(models, path, config, {config.input[0].name: X})
        np.testing.assert_allclose(found[config.output[0].name], expected, rtol=1e-2, atol=1e-3)


def test_a_model_of_kind_model_chooses_its_device(models, version):
    import torch

    network = models.Network()
    (version / "net.py").write_text(MODULE.replace("DEVICE", repr(TORCH_DEVICE)))
    torch.save(network.state_dict(), version / "net.pt")
    named = models.config({"x": (models.FP32, 8)}, {"y": (models.FP32, 3)})
    found = run(models, version / "net.py", named, {"x": X}, kind="MODEL")
    expected = network(torch.from_numpy(X.copy())).detach().numpy()
    np.testing.assert_allclose(found["y"], expected, rtol=1e-2, atol=1e-3)


def test_bfloat16_passes_through_a_gpu(models, version):
    from torch import Tensor, nn

    class Same(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone()

    bits = np.array([[0x3F80], [0xC000]], dtype=np.uint16)
    config = models.config({"x": (models.BF16, 1)}, {"y": (models.BF16, 1)})
    assert run(models, models.script(Same(), version / "m.pt"), config, {"x": bits})["y"].tolist() == bits.tolist()


TAKES = """
import torch

class M(torch.nn.Module):
    def forward(self, n):
        return torch.zeros(int(n.max()) << 30, dtype=torch.uint8, device=n.device)[:1].reshape(1, 1)
"""


def test_a_batch_without_enough_memory_fails_alone(models, version):
    import torch

    class Takes(torch.nn.Module):
        def forward(self, n: torch.Tensor) -> torch.Tensor:
            return torch.zeros([int(n.max().item()) << 30], dtype=torch.uint8, device=n.device)[:1].reshape(1, 1)

    (version / "net.py").write_text(TAKES)
    config = models.config({"n": (models.INT64, 1)}, {"y": (models.DataType.UINT8, 1)})
    for path in (version / "net.py", models.script(Takes(), version / "s.pt")):
        with on_gpu(models, path, config) as instance:
            with pytest.raises(InferenceError, match="out of memory" if KIND == "GPU" else "allocate"):
                instance.run({"n": np.array([[1 << 20]])}, ["y"], models.CONTEXT)
            assert instance.run({"n": np.array([[1]])}, ["y"], models.CONTEXT)["y"].tolist() == [[0]]


ROWS = """
import torch

class Rows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 2)

    def forward(self, n):
        return self.table(n).reshape(-1, 2)
"""
ROWS_CONFIG = f"""
backend: "pytorch"
runtime: "model.py"
max_batch_size: 4
input {{ name: "n" data_type: TYPE_INT64 dims: 1 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 2 }}
{instance_group()}
"""


@needs_gpu
def test_the_error_of_a_kernel_belongs_to_its_batch_and_the_process_is_replaced(tmp_path):
    directory = tmp_path / "models" / "rows" / "1"
    directory.mkdir(parents=True)
    (directory / "model.py").write_text(ROWS)
    (directory.parent / "config.pbtxt").write_text(ROWS_CONFIG)
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models"], ready=False)
    server.answer_limit_s = 80

    def ask(row: int) -> int:
        body = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1, 1], "data": [row]}]}
        return server.post("/v2/models/rows/infer", body).status

    try:
        wait_until(lambda: server.get("/v2/health/ready").status == 200, "the model", server, limit_s=300)
        assert [ask(1), ask(1000), ask(1)] == [200, 500, 200]
        assert "device-side assert" in server.log
    finally:
        server.kill()
