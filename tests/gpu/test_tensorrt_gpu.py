"""TensorRT on a real GPU. Skipped where there is none, or where TensorRT is not installed. Engines are built here."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.tensorrt import TensorRtBackend
from halimede.core.config.model_config import (
    CudaGraphLowerBound,
    CudaGraphSpec,
    ModelConfig,
    ModelOptimizationPolicy,
    ModelParameter,
    OptimizationCuda,
    PinnedMemoryBuffer,
)
from halimede.core.types import DataType, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem
from support.gpus import GPUS, needs_gpu
from support.plans import config
from support.server import start_server

trt = pytest.importorskip("tensorrt", reason="TensorRT is not installed here")
pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed here")

pytestmark = needs_gpu

FP32, INT32 = DataType.FP32, DataType.INT32
BACKEND = TensorRtBackend()
CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])
SETTINGS = config({"x": (FP32, 4)}, {"y": (FP32, 4)})
Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def built(
    inputs: dict[str, tuple[Any, tuple[int, ...]]],
    outputs: Callable[[Any, dict[str, Any]], dict[str, Any]],
    *profiles: dict[str, Range],
    values: dict[str, Range] | None = None,
) -> bytes:
    """A plan. `outputs` adds layers to a network and returns the tensors to mark."""
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network()
    tensors = {name: network.add_input(name, kind, shape) for name, (kind, shape) in inputs.items()}
    for name, tensor in outputs(network, tensors).items():
        tensor.name = name
        network.mark_output(tensor)
    settings = builder.create_builder_config()
    for ranges in profiles:
        profile = builder.create_optimization_profile()
        for name, three in ranges.items():
            profile.set_shape(name, *three)
        for name, three in (values or {}).items():
            profile.set_shape_input(name, *three)
        settings.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, settings))


def twice(network: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    x = tensors["x"]
    return {"y": network.add_elementwise(x, x, trt.ElementWiseOperation.SUM).get_output(0)}


BATCH: Range = ((1, 4), (4, 4), (8, 4))


@pytest.fixture(scope="module")
def doubling() -> bytes:
    return built({"x": (trt.float32, (-1, 4))}, twice, {"x": BATCH})


def source(folder: Path, content: bytes, **options: str) -> ModelSource:
    artifact = folder / "1" / "model.plan"
    artifact.parent.mkdir(exist_ok=True)
    artifact.write_bytes(content)
    return ModelSource("m", 1, folder, artifact, options)


def on_gpu(*profile: str) -> Placement:
    return Placement("m_0", 0, "GPU", GPUS[0], profile)


def runs(
    folder: Path, content: bytes, settings: ModelConfig, batches: list[dict[str, np.ndarray]], *profile: str
) -> list[dict[str, np.ndarray]]:
    model = BACKEND.load(settings, source(folder, content))
    instance = model.create_instance(on_gpu(*profile))
    try:
        return [instance.run(each, [output.name for output in settings.output], CONTEXT) for each in batches]
    finally:
        instance.close()
        model.close()


def numbers(*rows: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)} for n in rows]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("graphs", [False, True])
def test_all_batches_are_computed_with_and_without_graphs_and_pinned_memory(tmp_path, doubling, pinned, graphs):
    specs = (CudaGraphSpec(2), CudaGraphSpec(6, graph_lower_bound=CudaGraphLowerBound(4)))
    optimization = ModelOptimizationPolicy(
        cuda=OptimizationCuda(graphs=graphs, graph_spec=specs),
        input_pinned_memory=PinnedMemoryBuffer(enable=pinned),
        output_pinned_memory=PinnedMemoryBuffer(enable=pinned),
    )
    batches = numbers(1, 2, 3, 6, 8, 4, 2, 5)
    results = runs(tmp_path, doubling, replace(SETTINGS, optimization=optimization), batches)
    for batch, result in zip(batches, results, strict=True):
        assert result["y"].tobytes() == (batch["x"] + batch["x"]).tobytes()


def test_the_profile_follows_the_shapes_with_either_allocation_strategy(tmp_path):
    wide: Range = ((1, 4), (8, 64), (8, 64))
    content = built({"x": (trt.float32, (-1, -1))}, twice, {"x": BATCH}, {"x": wide})
    for strategy in ("STATIC", "ON_PROFILE_CHANGE"):
        parameters = {"execution_context_allocation_strategy": ModelParameter(strategy)}
        settings = replace(config({"x": (FP32, -1)}, {"y": (FP32, -1)}), parameters=parameters)
        batches = [{"x": np.ones((rows, width), np.float32)} for rows, width in ((1, 4), (8, 64), (8, 4), (3, 5))]
        results = runs(tmp_path, content, settings, batches, "0", "1")
        assert [(each["y"] == 2).all() for each in results] == [True] * 4


def test_shape_tensors_give_the_shape_of_the_output(tmp_path):
    def reshaped(network: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        layer = network.add_shuffle(tensors["x"])
        layer.set_input(1, tensors["to"])
        return {"y": layer.get_output(0)}

    inputs = {"x": (trt.float32, (-1,)), "to": (trt.int32, (2,))}
    values: dict[str, Range] = {"to": ((1, 1), (2, 3), (16, 16))}
    content = built(inputs, reshaped, {"x": ((1,), (6,), (16,))}, values=values)
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, content))
    assert (completed.max_batch_size, completed.input[1].is_shape_tensor) == (0, True)
    completed = replace(completed, instance_group=SETTINGS.instance_group)
    x = np.arange(6, dtype=np.float32)
    batches = [{"x": x, "to": np.array(to, np.int32)} for to in ((2, 3), (3, 2), (1, 6), (2, 3))]
    results = runs(tmp_path, content, completed, batches)
    assert [each["y"].tolist() for each in results] == [
        x.reshape(to).tolist() for to in ((2, 3), (3, 2), (1, 6), (2, 3))
    ]


def test_outputs_of_open_size_have_the_size_of_the_result(tmp_path):
    def places(network: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"y": network.add_non_zero(tensors["x"]).get_output(0)}

    content = built({"x": (trt.float32, (-1,))}, places, {"x": ((1,), (4,), (400,))})
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, content))
    completed = replace(completed, instance_group=SETTINGS.instance_group)
    batches = [{"x": np.array(each, np.float32)} for each in ([1, 0, 2], [0], [*range(400)], [3])]
    results = runs(tmp_path, content, completed, batches)
    assert [each["y"].reshape(-1).tolist() for each in results] == [[0, 2], [], [*range(1, 400)], [0]]


def test_scalars_and_other_datatypes(tmp_path):
    def sums(network: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        total = network.add_reduce(tensors["n"], trt.ReduceOperation.SUM, 1, False).get_output(0)
        return {"total": total, "half": network.add_identity(tensors["h"]).get_output(0)}

    content = built({"n": (trt.int32, (3,)), "h": (trt.float16, (2,))}, sums)
    outputs = {"total": (INT32, 1), "half": (DataType.FP16, 2)}
    settings = config({"n": (INT32, 3), "h": (DataType.FP16, 2)}, outputs, max_batch_size=0)
    (result,) = runs(
        tmp_path, content, settings, [{"n": np.array([1, 2, 3], np.int32), "h": np.array([0.5, -2], np.float16)}]
    )
    assert (result["total"].tolist(), result["half"].tolist()) == ([6], [0.5, -2])


def test_completion_reads_the_profiles(tmp_path, doubling):
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, doubling))
    assert completed.max_batch_size == 8
    assert [(each.name, each.data_type, each.dims) for each in completed.input] == [("x", FP32, (4,))]


def test_a_damaged_plan_and_a_device_that_is_not_there_are_errors(tmp_path, doubling):
    model = BACKEND.load(SETTINGS, source(tmp_path, doubling[: len(doubling) // 2]))
    with pytest.raises(InferenceError, match=f"the file was made by TensorRT {trt.__version__}"):
        model.create_instance(on_gpu())
    model = BACKEND.load(SETTINGS, source(tmp_path, doubling))
    with pytest.raises(InferenceError, match="cudaErrorInvalidDevice"):
        model.create_instance(replace(on_gpu(), device=replace(GPUS[0], index=4095)))


def test_loads_in_cycles_return_the_device_memory(tmp_path, doubling):
    import pynvml

    def used() -> int:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(GPUS[0].uuid)).used)

    runs(tmp_path, doubling, SETTINGS, numbers(3))
    before = used()
    for _ in range(20):
        runs(tmp_path, doubling, SETTINGS, numbers(3))
    assert used() - before < 32 << 20


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_server_answers_like_the_instance(tmp_path, doubling, isolation):
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.plan").write_bytes(doubling)
    setting = f'parameters {{ key: "ISOLATION" value {{ string_value: "{isolation}" }} }}'
    (folder / "config.pbtxt").write_text(f"instance_group {{ kind: KIND_GPU gpus: {GPUS[0].index} }}\n{setting}")
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models"])
    try:
        body = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
        answer = server.post("/v2/models/m/infer", body)
        assert answer.json["outputs"][0]["data"] == [2, 4, 6, 8]  # type: ignore[index]
    finally:
        server.kill()
