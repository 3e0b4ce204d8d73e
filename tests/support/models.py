"""Model repositories for tests: small generated ONNX models, and configurations."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

OPSET = 20
IR_VERSION = 10

ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
    "BF16": TensorProto.BFLOAT16,
}


def save_onnx(path: Path, nodes: list[onnx.NodeProto], inputs: list, outputs: list, initializers: list = ()) -> Path:  # type: ignore[assignment,type-arg]
    """Write a model of these nodes; inputs and outputs are (name, datatype, shape)."""

    def info(name: str, datatype: str, shape: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, ONNX_TYPES[datatype], shape)

    graph = helper.make_graph(nodes, "g", [info(*i) for i in inputs], [info(*o) for o in outputs], list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def write_config(directory: Path, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.pbtxt").write_text(text)


def add_simple(repository: Path, name: str = "simple", *, version: int = 1) -> None:
    """Triton's `simple`: two INT32[16] inputs, their sum and their difference."""
    save_onnx(
        repository / name / str(version) / "model.onnx",
        [
            helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
        ],
        [("INPUT0", "INT32", ["N", 16]), ("INPUT1", "INT32", ["N", 16])],
        [("OUTPUT0", "INT32", ["N", 16]), ("OUTPUT1", "INT32", ["N", 16])],
    )
    write_config(
        repository / name,
        f"""
        name: "{name}"
        platform: "onnxruntime_onnx"
        max_batch_size: 8
        input [
          {{ name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }},
          {{ name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] }}
        ]
        output [
          {{ name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }},
          {{ name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] }}
        ]
        dynamic_batching {{ }}
        """,
    )


def add_simple_string(repository: Path, name: str = "simple_string") -> None:
    """Triton's `simple_string`: as `simple`, with decimal numbers in BYTES tensors."""
    cast = helper.make_node
    save_onnx(
        repository / name / "1" / "model.onnx",
        [
            cast("Cast", ["INPUT0"], ["a"], to=TensorProto.INT32),
            cast("Cast", ["INPUT1"], ["b"], to=TensorProto.INT32),
            cast("Add", ["a", "b"], ["sum"]),
            cast("Sub", ["a", "b"], ["difference"]),
            cast("Cast", ["sum"], ["OUTPUT0"], to=TensorProto.STRING),
            cast("Cast", ["difference"], ["OUTPUT1"], to=TensorProto.STRING),
        ],
        [("INPUT0", "BYTES", ["N", 16]), ("INPUT1", "BYTES", ["N", 16])],
        [("OUTPUT0", "BYTES", ["N", 16]), ("OUTPUT1", "BYTES", ["N", 16])],
    )
    write_config(repository / name, f'name: "{name}" backend: "onnxruntime" max_batch_size: 8 dynamic_batching {{ }}')


def add_onnx_identity(repository: Path, name: str, datatype: str, dims: list[int | str]) -> None:
    """An ONNX Identity of one datatype, without a configuration: auto-complete derives it."""
    save_onnx(
        repository / name / "1" / "model.onnx",
        [helper.make_node("Identity", ["IN"], ["OUT"])],
        [("IN", datatype, dims)],
        [("OUT", datatype, dims)],
    )


def add_identity(  # the identity backend: no file, only a configuration
    repository: Path,
    name: str,
    *,
    datatype: str = "FP32",
    dims: str = "16",
    max_batch_size: int = 32,
    extra: str = "",
    inputs: int = 1,
) -> None:
    kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"

    def tensors(prefix: str) -> str:
        names = [f"{prefix}{number}" if inputs > 1 else prefix for number in range(inputs)]
        return ", ".join(f'{{ name: "{n}" data_type: {kind} dims: [ {dims} ] }}' for n in names)

    (repository / name / "1").mkdir(parents=True, exist_ok=True)
    write_config(
        repository / name,
        f"""
        name: "{name}"
        backend: "identity"
        max_batch_size: {max_batch_size}
        input [ {tensors("IN")} ]
        output [ {tensors("OUT")} ]
        {extra}
        """,
    )


def add_scaled(repository: Path, name: str, factor: float, *, version: int = 1) -> None:
    """FP32[4] times a constant, which distinguishes versions and reloads."""
    save_onnx(
        repository / name / str(version) / "model.onnx",
        [helper.make_node("Mul", ["IN", "factor"], ["OUT"])],
        [("IN", "FP32", ["N", 4])],
        [("OUT", "FP32", ["N", 4])],
        [helper.make_tensor("factor", TensorProto.FLOAT, [], np.array([factor], np.float32))],
    )


ONE = "instance_group { kind: KIND_CPU count: 1 }"
"""Configuration text for one instance."""


def delay(milliseconds: int) -> str:
    """Configuration text of an identity model that computes for this time."""
    return f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{milliseconds}" }} }}'
