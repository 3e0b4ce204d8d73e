"""Small ONNX models, and runs of batches on them in the backend."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)
from halimede.core.types import DataType, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem
from support.refusals import error_of

FP32 = DataType.FP32
BACKEND = OnnxRuntimeBackend()


CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])


CPU = Placement("m_0", 0, "CPU")


ONNX_TYPES = {
    DataType.BOOL: TensorProto.BOOL,
    DataType.UINT8: TensorProto.UINT8,
    DataType.UINT16: TensorProto.UINT16,
    DataType.UINT32: TensorProto.UINT32,
    DataType.UINT64: TensorProto.UINT64,
    DataType.INT8: TensorProto.INT8,
    DataType.INT16: TensorProto.INT16,
    DataType.INT32: TensorProto.INT32,
    DataType.INT64: TensorProto.INT64,
    DataType.FP16: TensorProto.FLOAT16,
    DataType.FP32: TensorProto.FLOAT,
    DataType.FP64: TensorProto.DOUBLE,
    DataType.BYTES: TensorProto.STRING,
    DataType.BF16: TensorProto.BFLOAT16,
}


def tensor(name: str, datatype: DataType, shape: Sequence[int | str | None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_TYPES[datatype], shape)


def model(nodes, inputs, outputs, initializers=(), opset=17) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def identity(datatype: DataType, shape: Sequence[int | str | None]) -> onnx.ModelProto:
    return model(
        [helper.make_node("Identity", ["x"], ["y"])], [tensor("x", datatype, shape)], [tensor("y", datatype, shape)]
    )


def add_sub(shape: Sequence[int | str | None] = ("n", 2)) -> onnx.ModelProto:
    return model(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])],
        [tensor("a", FP32, shape), tensor("b", FP32, shape)],
        [tensor("sum", FP32, shape), tensor("difference", FP32, shape)],
    )


def config(inputs: dict[str, tuple], outputs: dict[str, tuple], **fields) -> ModelConfig:
    """A complete configuration; a tensor is (datatype, *dims)."""
    return ModelConfig(
        name="m",
        backend="onnxruntime",
        input=tuple(ModelInput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in outputs.items()),
        **{"max_batch_size": 8} | fields,
    )


ADD_SUB = config({"a": (FP32, 2), "b": (FP32, 2)}, {"sum": (FP32, 2), "difference": (FP32, 2)})


def source(directory: Path, proto: onnx.ModelProto | None, **options: str) -> ModelSource:
    version = directory / "1"
    version.mkdir(exist_ok=True)
    if proto is not None:
        onnx.save(proto, version / "model.onnx")
    return ModelSource("m", 1, directory, version / "model.onnx", {k.replace("_", "-"): v for k, v in options.items()})


def run(directory, proto, config: ModelConfig, inputs: dict, outputs: Sequence[str] | None = None, **options: str):
    loaded = BACKEND.load(config, source(directory, proto, **options))
    instance = loaded.create_instance(CPU)
    result = instance.run(inputs, outputs or [each.name for each in config.output], CONTEXT)
    instance.close()
    loaded.close()
    return result


def floats(*rows) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def refused(work) -> InferenceError:
    return error_of(work)


def group(kind: InstanceKind, count: int, gpus: tuple[int, ...] = ()) -> tuple[ModelInstanceGroup, ...]:
    return (ModelInstanceGroup("m", kind, count, gpus=gpus),)
