"""Each variant of the server's image: built, run, a model of its framework asked, and its size. `make images` runs them.

joblib = Lazily("joblib")
linear_model = Lazily("sklearn.linear_model")
xgboost = Lazily("xgboost")

CUDA's libraries are several gigabytes: building all variants takes half an hour. Each is removed before the next.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from support.image import Container, built_image, check_serves_with, documented_mb
from support.lazily import Lazily
from support.models import add_simple, write_config
from support.openvino_models import add_sub, write
from support.server import LOOPBACK, RunningServer
from support.tensorflow_models import ROWS, built_models, expected
from support.torch_models import AddSub, script
from support.tree_models import rows, targets

joblib = Lazily("joblib")
linear_model = Lazily("sklearn.linear_model")
xgboost = Lazily("xgboost")

pytestmark = [pytest.mark.images, pytest.mark.timeout(5400)]

X = rows(20, missing=0.0)
FLOATS = """
max_batch_size: 4
input [ { name: "a" data_type: TYPE_FP32 dims: 2 }, { name: "b" data_type: TYPE_FP32 dims: 2 } ]
output [ { name: "sum" data_type: TYPE_FP32 dims: 2 }, { name: "difference" data_type: TYPE_FP32 dims: 2 } ]
"""


@dataclass(frozen=True)
class Asked:
    """A model that a variant serves, one request, and its answer."""

    model: str
    inputs: dict[str, np.ndarray]
    output: str
    expected: np.ndarray


def add_onnx(models: Path) -> list[Asked]:
    add_simple(models)
    one = np.arange(16, dtype=np.int32)[None]
    return [Asked("simple", {"INPUT0": one, "INPUT1": one}, "OUTPUT0", 2 * one)]


def add_torch(models: Path) -> list[Asked]:
    (models / "traced/1").mkdir(parents=True)
    script(AddSub(), models / "traced/1/model.pt")
    write_config(models / "traced", FLOATS)
    return [_sum_of("traced")]


def add_openvino(models: Path) -> list[Asked]:
    write(add_sub(), models / "ir/1/model.xml")
    return [_sum_of("ir")]


def add_tensorflow(models: Path) -> list[Asked]:
    shutil.copytree(built_models() / "network", models / "network/1/model.savedmodel")
    return [Asked("network", {"x": ROWS[:4]}, "scores", expected("scores")[:4])]


def add_trees(models: Path) -> list[Asked]:
    """A model of XGBoost, and an estimator, which runs in a process of its own."""
    for name in ("booster", "estimator"):
        (models / name / "1").mkdir(parents=True)
    booster = xgboost.train({"objective": "binary:logistic"}, xgboost.DMatrix(X, label=targets(X)), 3)
    booster.save_model(models / "booster/1/xgboost.json")
    estimator = linear_model.LogisticRegression().fit(X, targets(X))
    joblib.dump(estimator, models / "estimator/1/model.joblib")
    scores = booster.predict(xgboost.DMatrix(X))
    return [
        Asked("booster", {"input__0": X}, "output__0", scores),
        Asked("estimator", {"input": X[:4].astype(np.float64)}, "label", estimator.predict(X[:4])),
    ]


def _sum_of(model: str) -> Asked:
    a = np.float32([[1, 2]])
    return Asked(model, {"a": a, "b": a}, "sum", 2 * a)


# The smallest first.
VARIANTS: dict[str, Callable[[Path], list[Asked]]] = {
    "cpu": add_onnx,
    "openvino": add_openvino,
    "trees": add_trees,
    "tensorflow": add_tensorflow,
    "gpu": add_onnx,
    "torch": add_torch,
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_serves_its_framework_and_has_the_documented_size(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    requests = VARIANTS[variant](models)
    with built_image(variant, kept=False) as image:
        container = Container(image, tmp_path, models)
        try:
            if variant == "gpu":
                check_cuda(container)
            server = container.start("--model-repository=/models", "--model-control-mode=explicit", *LOOPBACK)
            for request in requests:
                check_answer(server, request)
            assert server.stop() == 0, server.log
        finally:
            container.remove()
        size_mb = image.compressed_bytes() / 1e6
    with capsys.disabled():
        print(f"\n{variant}: {size_mb:,.0f} MB compressed")
    assert size_mb == pytest.approx(documented_mb()[variant], rel=0.05)


def check_answer(server: RunningServer, asked: Asked) -> None:
    """Load the model and compare its answer. An import of TensorFlow takes seconds of the load."""
    tensors = []
    for name, array in asked.inputs.items():
        tensors.append(httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    with httpclient.InferenceServerClient(server.http_url, network_timeout=300, connection_timeout=300) as client:
        client.load_model(asked.model)
        answer = client.infer(asked.model, tensors).as_numpy(asked.output)
    assert np.allclose(answer.reshape(asked.expected.shape), asked.expected, atol=1e-5)


def check_cuda(container: Container) -> None:
    """Without a GPU, CUDA's libraries can be loaded but not used."""
    program = "import onnxruntime as o; o.preload_dlls(); print(o.get_available_providers())"
    done = container.run("python", "-c", program)
    assert "CUDAExecutionProvider" in done.stdout
    assert "Failed to load" not in done.stdout + done.stderr


# The wheels of PyTorch and CUDA, several gigabytes: ten minutes to fetch and build.
@pytest.mark.parametrize("image", ["torch"], indirect=True)
def test_a_dockerfile_adds_pytorch(container: Container) -> None:
    check_serves_with(container, "import torch", """
        tensor = torch.from_dlpack(pb_utils.get_input_tensor_by_name(requests[0], "IN").to_dlpack())
        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", 2 * tensor + 1)])]
    """)  # fmt: skip
