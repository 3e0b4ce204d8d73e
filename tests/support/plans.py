"""Plan files for the played TensorRT, and the backend on it."""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import ModelSource, RunContext
from halimede.backends.tensorrt import TensorRtBackend
from halimede.backends.tensorrt.libraries import Libraries, join
from halimede.core.config.model_config import (
    InstanceKind,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
)
from halimede.core.types import DataType, Device, DeviceKind, InferenceError, InferenceRequest, Placement
from halimede.workers.worker import BatchItem
from support.played_gpu import cudart, trt
from support.refusals import error_of

SUPPORT = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": f"{SUPPORT / 'played_site'}:{SUPPORT.parent}"}
"""For server processes on the played runtime."""

FP32, INT32, INT64 = DataType.FP32, DataType.INT32, DataType.INT64
VERSION = (11, 4, 0, 106)
OPEN_ROWS = ([1, 1], [2, 4], [8, 64])
GPU = Device(DeviceKind.GPU, 0, "GPU-0", compute_capability=(9, 0))
ON_GPU = Placement("m_0", 0, "GPU", GPU)
CONTEXT = RunContext([""], [1], [BatchItem(1, InferenceRequest("m"), 1, cancelled=False)])
NAMES = {kind: name for name, kind in {
    "FLOAT": DataType.FP32, "HALF": DataType.FP16, "BF16": DataType.BF16, "INT8": DataType.INT8, "INT32": DataType.INT32,
    "INT64": DataType.INT64, "UINT8": DataType.UINT8, "BOOL": DataType.BOOL,
}.items()}  # fmt: skip

Range = tuple[Sequence[int], Sequence[int], Sequence[int]]


def given(
    name: str, shape: Sequence[int], *ranges: Range, dtype: str = "FLOAT", values: Sequence[Range] = (), **more: object
) -> dict:
    """An input: its ranges in each profile, or its shape alone if it has no other. With `values` a shape tensor."""
    own = [list(map(list, each)) for each in ranges] or [[list(shape)] * 3]
    tensor = {"name": name, "input": True, "dtype": dtype, "shape": list(shape), "ranges": own, "format": "LINEAR"}
    return tensor | {"host": bool(values), "values": [list(map(list, each)) for each in values]} | more


def computed(name: str, shape: Sequence[int], formula: str, *, dtype: str = "FLOAT", **more: object) -> dict:
    """An output: a numpy expression of the inputs. `open=True`: its size is known only after its computation."""
    tensor = {"name": name, "input": False, "dtype": dtype, "shape": list(shape), "formula": formula}
    return tensor | {"format": "LINEAR", "host": False, "open": False} | more


def plan(*tensors: Mapping, version: Sequence[int] = VERSION, **more: object) -> bytes:
    """A plan file."""
    profiles = max((len(each["ranges"]) for each in tensors if each["input"]), default=1)
    document = {"tensors": list(tensors), "profiles": profiles} | more
    return b"ftrt" + struct.pack("<I16x4B", 0, *version) + json.dumps(document).encode()


BATCH = ([1, 4], [4, 4], [8, 4])
DOUBLE = (given("x", [-1, 4], BATCH), computed("y", [-1, 4], "x * 2"))
"""x FP32[4] -> y FP32[4], batches of 1 to 8."""


def config(inputs: Mapping[str, tuple], outputs: Mapping[str, tuple], **fields: object) -> ModelConfig:
    """A complete configuration on one GPU; a tensor is (datatype, *dims)."""
    settings = {"name": "m", "backend": "tensorrt", "max_batch_size": 8, **fields}
    return ModelConfig(
        input=tuple(ModelInput(name, kind, dims=tuple(dims)) for name, (kind, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, kind, dims=tuple(dims)) for name, (kind, *dims) in outputs.items()),
        instance_group=(ModelInstanceGroup("m", InstanceKind.KIND_GPU, 1, gpus=(0,)),),
        **settings,  # type: ignore[arg-type]
    )


DOUBLES = config({"x": (FP32, 4)}, {"y": (FP32, 4)})


@cache
def libraries() -> Libraries:
    return join(trt, cudart)


BACKEND = TensorRtBackend(libraries)


def source(
    folder: Path, content: bytes | None, filenames: Mapping[str, str] | None = None, **options: str
) -> ModelSource:
    """A version with this plan; options have `_` instead of `-`."""
    artifact = folder / "1" / "model.plan"
    artifact.parent.mkdir(exist_ok=True)
    if content is not None:
        artifact.write_bytes(content)
    settings = {key.replace("_", "-"): value for key, value in options.items()}
    return ModelSource("m", 1, folder, artifact, settings, filenames or {})


def instance(folder: Path, content: bytes, settings: ModelConfig, placement: Placement = ON_GPU, **options: str):
    """A model and its instance; close the instance first."""
    model = BACKEND.load(settings, source(folder, content, **options))
    return model, model.create_instance(placement)


def compute(
    folder: Path,
    content: bytes,
    settings: ModelConfig,
    inputs: Mapping[str, NDArray],
    outputs: Sequence[str] = (),
    **options: str,
) -> dict[str, NDArray]:
    """One batch on a new instance, which must free everything."""
    model, made = instance(folder, content, settings, **options)
    try:
        return made.run(inputs, outputs or [each.name for each in settings.output], CONTEXT)
    finally:
        made.close()
        model.close()
        assert cudart.MACHINE.live() == {}


def floats(*rows: Sequence[float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


def refused(call: Callable[[], object]) -> InferenceError:
    """The error of the call."""
    return error_of(call)


def optimized(settings: ModelConfig, **fields: Any) -> ModelConfig:
    """The configuration with this `optimization` block."""
    return replace(settings, optimization=ModelOptimizationPolicy(**fields))
