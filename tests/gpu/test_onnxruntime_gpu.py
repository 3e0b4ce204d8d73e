"""ONNX Runtime on a real GPU. Skipped where there is none, or where the installed onnxruntime cannot use it."""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelParameter,
)
from halimede.core.types import DataType, Device, DeviceKind, InferenceError, InferenceRequest, Placement
from halimede.core.types.tensor import tensor_from_array
from halimede.workers.states import HeldStates
from halimede.workers.thread import ThreadWorker
from halimede.workers.worker import BatchDone, BatchItem
from support.gpus import GPU, KIND, ON_CPU, needs_device, needs_gpu

BACKEND = OnnxRuntimeBackend()

pytestmark = [
    needs_device,
    pytest.mark.skipif(
        not (ON_CPU or BACKEND.supports_gpu()), reason="the onnxruntime here has no CUDAExecutionProvider"
    ),
]

ON_DEVICE = InstanceKind[f"KIND_{KIND}"]
RNG = np.random.default_rng(7)
IMAGES = RNG.standard_normal((5, 3, 16, 16)).astype(np.float32)
CONTEXT = RunContext([""], [5], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])


def small_network() -> onnx.ModelProto:
    """Convolution, ReLU, pooling and a matrix product, and a string that only the CPU can carry."""
    weights = [
        numpy_helper.from_array(RNG.standard_normal((8, 3, 3, 3)).astype(np.float32), "kernel"),
        numpy_helper.from_array(RNG.standard_normal((8, 4)).astype(np.float32), "matrix"),
    ]
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "matrix"], ["scores"]),
        helper.make_node("Identity", ["label"], ["echo"]),
    ]
    inputs = [
        helper.make_tensor_value_info("image", TensorProto.FLOAT, ("n", 3, 16, 16)),
        helper.make_tensor_value_info("label", TensorProto.STRING, ("n", 1)),
    ]
    outputs = [
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, ("n", 4)),
        helper.make_tensor_value_info("echo", TensorProto.STRING, ("n", 1)),
    ]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def config(kind: InstanceKind, count: int = 1, **parameters: str) -> ModelConfig:
    gpus = (GPU.index,) if kind is InstanceKind.KIND_GPU and GPU is not None else ()
    return ModelConfig(
        name="m",
        max_batch_size=8,
        input=(
            ModelInput("image", DataType.FP32, dims=(3, 16, 16)),
            ModelInput("label", DataType.BYTES, dims=(1,)),
        ),
        output=(ModelOutput("scores", DataType.FP32, dims=(4,)), ModelOutput("echo", DataType.BYTES, dims=(1,))),
        instance_group=(ModelInstanceGroup("m", kind, count, gpus=gpus),),
        parameters={key: ModelParameter(value) for key, value in parameters.items()},
    )


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    artifact = tmp_path / "1" / "model.onnx"
    artifact.parent.mkdir()
    onnx.save(small_network(), artifact)
    return ModelSource("m", 1, tmp_path, artifact)


def compute(settings: ModelConfig, source: ModelSource, placement: Placement) -> dict[str, np.ndarray]:
    loaded = BACKEND.load(settings, source)
    instance = loaded.create_instance(placement)
    labels = np.array([[b"a"]] * 5, dtype=object)
    result = instance.run({"image": IMAGES, "label": labels}, ("scores", "echo"), CONTEXT)
    instance.close()
    loaded.close()
    return result


def on_gpu(name: str = "m_0", ordinal: int = 0) -> Placement:
    return Placement(name, ordinal, KIND, GPU)


def test_a_gpu_computes_what_a_cpu_computes(source):
    cpu = compute(config(InstanceKind.KIND_CPU), source, Placement("m_0", 0, "CPU"))
    tuned = {"cudnn_conv_algo_search": "1", "gpu_mem_limit": str(1 << 30), "arena_extend_strategy": "1"}
    for parameters in ({}, tuned):
        gpu = compute(config(ON_DEVICE, **parameters), source, on_gpu())
        np.testing.assert_allclose(gpu["scores"], cpu["scores"], rtol=1e-2, atol=1e-3)
        assert gpu["echo"].tolist() == cpu["echo"].tolist() == [["a"]] * 5


@needs_gpu
def test_a_device_that_is_not_there_is_an_error_and_not_the_cpu(source):
    loaded = BACKEND.load(config(InstanceKind.KIND_GPU), source)
    with pytest.raises((InferenceError, RuntimeError)):
        loaded.create_instance(Placement("m_0", 0, "GPU", Device(DeviceKind.GPU, 4095, "GPU-none")))


def test_two_instances_answer_side_by_side_on_one_gpu(source):
    settings = config(ON_DEVICE, 2)
    cpu = compute(config(InstanceKind.KIND_CPU), source, Placement("m_0", 0, "CPU"))["scores"]

    async def main() -> list[BatchDone]:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[BatchDone] = asyncio.Queue()
        loaded = BACKEND.load(settings, source)
        workers = [
            await ThreadWorker(
                on_gpu(f"m_{i}", i), loaded, settings, events.put_nowait, loop, states=HeldStates()
            ).start()
            for i in range(2)
        ]
        inputs = [
            tensor_from_array("image", DataType.FP32, IMAGES),
            tensor_from_array("label", DataType.BYTES, np.array([["a"]] * 5, dtype=object)),
        ]
        for worker in workers:
            worker.execute([BatchItem(1, InferenceRequest("m", inputs=inputs), 5, cancelled=False)])
        done = [await asyncio.wait_for(events.get(), 60) for _ in workers]
        for worker in workers:
            await worker.stop()
        return done

    for each in asyncio.run(main()):
        scores, echo = each.replies[0]
        np.testing.assert_allclose(scores.array(), cpu, rtol=1e-2, atol=1e-3)
        assert echo.array().tolist() == [[b"a"]] * 5
