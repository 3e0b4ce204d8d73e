"""Small OpenVINO models, and runs of batches on them in the backend."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.openvino import OpenVinoBackend
from halimede.backends.openvino.runtime import operations, runtime
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, InferenceRequest, Placement
from halimede.workers.worker import BatchItem

FP32 = DataType.FP32
BACKEND = OpenVinoBackend()
CPU = Placement("m_0", 0, "CPU")
CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])

OPENVINO_TYPES = {
    DataType.BOOL: "boolean",
    DataType.UINT8: "u8",
    DataType.UINT16: "u16",
    DataType.UINT32: "u32",
    DataType.UINT64: "u64",
    DataType.INT8: "i8",
    DataType.INT16: "i16",
    DataType.INT32: "i32",
    DataType.INT64: "i64",
    DataType.FP16: "f16",
    DataType.FP32: "f32",
    DataType.FP64: "f64",
    DataType.BYTES: "string",
    DataType.BF16: "bf16",
}


def parameter(name: str, datatype: DataType, shape: Sequence[int] | None) -> Any:
    """An input; -1 in `shape` is any size, and None any number of dimensions."""
    ov = runtime()
    partial = ov.PartialShape.dynamic() if shape is None else ov.PartialShape(list(shape))
    made = operations().parameter(partial, getattr(ov.Type, OPENVINO_TYPES[datatype]))
    return named(made, name)


def named(node: Any, *names: str) -> Any:
    node.output(0).get_tensor().set_names(set(names))
    return node


def graph(results: Sequence[Any], parameters: Sequence[Any]) -> Any:
    return runtime().Model([operations().result(each) for each in results], list(parameters), "g")


def identity(datatype: DataType, shape: Sequence[int] | None) -> Any:
    return graph([parameter_ := parameter("x", datatype, shape)], [parameter_])


def add_sub(shape: Sequence[int] = (-1, 2)) -> Any:
    ops = operations()
    a, b = parameter("a", FP32, shape), parameter("b", FP32, shape)
    return graph([named(ops.add(a, b), "sum"), named(ops.subtract(a, b), "difference")], [a, b])


def perceptron(shape: Sequence[int] = (-1, 64), layers: int = 3) -> Any:
    """Products of matrices, whose results show the precision."""
    ops, random = operations(), np.random.default_rng(7)
    value = first = parameter("x", FP32, shape)
    for _ in range(layers):
        weights = random.standard_normal((shape[-1], shape[-1])).astype(np.float32) / np.float32(8)
        value = ops.tanh(ops.matmul(value, weights, False, False))
    return graph([named(value, "y")], [first])


def write(model: Any, path: Path) -> None:
    """Write model.xml and model.bin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runtime().serialize(model, str(path))


def config(inputs: Mapping[str, tuple], outputs: Mapping[str, tuple], parameters=None, **fields) -> ModelConfig:
    """A complete configuration; a tensor is (datatype, *dims)."""
    return ModelConfig(
        name="m",
        backend="openvino",
        input=tuple(ModelInput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in outputs.items()),
        parameters={key: ModelParameter(value) for key, value in (parameters or {}).items()},
        **{"max_batch_size": 8} | fields,
    )


ADD_SUB = config({"a": (FP32, 2), "b": (FP32, 2)}, {"sum": (FP32, 2), "difference": (FP32, 2)})


PERCEPTRON = config({"x": (FP32, 64)}, {"y": (FP32, 64)})
"""Of `perceptron`."""


def with_parameters(settings: ModelConfig, **values: str) -> ModelConfig:
    return replace(settings, parameters={key: ModelParameter(value) for key, value in values.items()})


def rows(count: int, width: int = 64) -> np.ndarray:
    """An array of normally distributed numbers, the same ones for the same shape."""
    return np.random.default_rng(3).standard_normal((count, width)).astype(np.float32)


def source(directory: Path, model: Any = None, **options: str) -> ModelSource:
    """The model's place in a repository; None leaves the files that are there."""
    artifact = directory / "1" / "model.xml"
    artifact.parent.mkdir(exist_ok=True)
    if model is not None:
        write(model, artifact)
    return ModelSource("m", 1, directory, artifact, {k.replace("_", "-"): v for k, v in options.items()})


def run(directory, model, settings: ModelConfig, inputs: dict, outputs: Sequence[str] | None = None):
    loaded = BACKEND.load(settings, source(directory, model))
    instance = loaded.create_instance(CPU)
    result = instance.run(inputs, outputs or [each.name for each in settings.output], CONTEXT)
    instance.close()
    loaded.close()
    return result


def bare(path: Path, inputs: dict[str, np.ndarray], **properties: Any) -> dict[str, np.ndarray]:
    """The outputs of the bare runtime for one batch, by their names."""
    core = runtime().Core()
    compiled = core.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"} | properties)
    return {
        port.get_any_name(): value for port, value in compiled(inputs, share_inputs=False, share_outputs=False).items()
    }
