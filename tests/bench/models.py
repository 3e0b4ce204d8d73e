"""The models that the benchmark serves."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

HEAVY_WIDTH = 512
HEAVY_TOKENS = 160
HEAVY_LAYERS = 12
HEAVY_MAX_BATCH = 8


def heavy_onnx() -> onnx.ModelProto:
    """A model that computes for some milliseconds per row on one thread, with small tensors at both ends.

    A row of HEAVY_WIDTH values becomes HEAVY_TOKENS rows that go through HEAVY_LAYERS matrix products.
    """
    random = np.random.default_rng(0)
    width, tokens = HEAVY_WIDTH, HEAVY_TOKENS
    constants: dict[str, NDArray[Any]] = {
        "row_axis": np.array([1], dtype=np.int64),
        "spread": random.standard_normal((1, tokens, 1), dtype=np.float32),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["x", "row_axis"], ["one"]),
        helper.make_node("Mul", ["one", "spread"], ["h0"]),
    ]
    for layer in range(HEAVY_LAYERS):
        constants[f"w{layer}"] = random.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5)
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("ReduceMean", [f"h{HEAVY_LAYERS}", "row_axis"], ["y"], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "heavy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", width])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(made)
    return made


WIDE = 1024
WIDE_LAYERS = 6
FULL_BATCH = 16


@dataclass(frozen=True, slots=True)
class FullQueue:
    """A model, and a load that leaves its queue never empty: `callers` with requests of `rows` rows each.

    `wait_ms` plays an accelerator: a batch takes this time and no CPU; 0 for an ONNX model.
    """

    wait_ms: float = 0.0
    isolation: str = "thread"
    instances: int = 1
    callers: int = 48
    rows: int = 1
    batching: str = ""


FULL_QUEUE = {
    "wide": FullQueue(),
    "wide_process": FullQueue(isolation="process"),
    "wide_whole": FullQueue(callers=4, rows=FULL_BATCH),
    "waits": FullQueue(2),
    "waits_process": FullQueue(2, isolation="process"),
    "waits_two": FullQueue(2, instances=2),
    "waits_levels": FullQueue(2, batching="priority_levels: 2 default_priority_level: 2"),
    "waits_short": FullQueue(0.5, callers=4, rows=FULL_BATCH),
}
"""In `whole` and `short` one request fills a batch."""


def wide_onnx() -> onnx.ModelProto:
    """A model that computes for about 2 ms per batch of FULL_BATCH on one thread."""
    random = np.random.default_rng(0)
    nodes, constants, last = [], [], "x"
    for layer in range(WIDE_LAYERS):
        weights = random.standard_normal((WIDE, WIDE), dtype=np.float32) / np.float32(WIDE**0.5)
        constants.append(numpy_helper.from_array(weights, f"w{layer}"))
        made = "y" if layer == WIDE_LAYERS - 1 else f"h{layer}"
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [made]))
        last = made
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDE]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "wide", tensors[:1], tensors[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    return model


SLEEPER = "sleeper"
SLEEP_MS = 5
POLICIES = {
    SLEEPER: "",
    "sleeper_bounded": "default_queue_policy { max_queue_size: 100 }",
    "sleeper_levels": "priority_levels: 2 default_priority_level: 2",
}
"""Models that sleep for SLEEP_MS per batch, and their queue policies."""


def config(
    name: str,
    backend: str,
    tensors: tuple[str, str],
    dims: str,
    max_batch_size: int,
    extra: str = "",
    batching: str = "",
    instances: int = 1,
    output_dims: str = "",
) -> str:
    """`output_dims` are those of the input if they are not given."""
    given, made = tensors
    return (
        f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: {max_batch_size}\n'
        f'input [ {{ name: "{given}" data_type: TYPE_FP32 dims: [ {dims} ] }} ]\n'
        f'output [ {{ name: "{made}" data_type: TYPE_FP32 dims: [ {output_dims or dims} ] }} ]\n'
        f"instance_group [ {{ kind: KIND_CPU count: {instances} }} ]\ndynamic_batching {{ {batching} }}\n{extra}"
    )


PYTHON_IDENTITY = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN") for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each.as_numpy())]) for each in inputs]
"""


def python_identity_config(name: str, dims: str) -> str:
    return config(name, "python", ("IN", "OUT"), dims, 32)


PYTHON_SEQUENCE = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            start, end, key, given = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().item() for name in ("START", "END", "ID", "IN")
            )
            # Sums stay within INT32.
            total = self.sums[key] = (given if start else self.sums[key] + given) & 0xFFFF
            if end:
                del self.sums[key]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[total]], np.int32))]))
        return responses
"""
SEQUENCE_LENGTH = 20
SEQUENCE_CONFIG = """name: "sequence"
backend: "python"
max_batch_size: 32
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
sequence_batching {
  oldest { max_candidate_sequences: 64 }
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
"""

STEPS = 3


def chain_config(name: str, model: str) -> str:
    """An ensemble that runs a model of INPUT0 and OUTPUT0, FP32[16], STEPS times in sequence."""
    tensors = ["INPUT0", *(f"t{at}" for at in range(1, STEPS)), "OUTPUT0"]
    steps = ", ".join(
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "INPUT0" value: "{given}" }} '
        f'output_map {{ key: "OUTPUT0" value: "{made}" }} }}'
        for given, made in pairwise(tensors)
    )
    return (
        f'name: "{name}"\nplatform: "ensemble"\nmax_batch_size: 32\n'
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] } ]\n'
        f"ensemble_scheduling {{ step [ {steps} ] }}\n"
    )


def write_repository(root: Path) -> Path:
    """A repository of `ident` (FP32[16]) and `image` (600 KB), both also in Python, `chain` (an ensemble), `heavy`
    (ONNX, one thread), and the models of POLICIES and FULL_QUEUE."""
    one_thread = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
    configs = {
        "ident": config("ident", "identity", ("INPUT0", "OUTPUT0"), "16", 32),
        "image": config("image", "identity", ("INPUT0", "OUTPUT0"), "3, 224, 224", 32),
        "chain": chain_config("chain", "ident"),
        "python_ident": python_identity_config("python_ident", "16"),
        "python_image": python_identity_config("python_image", "3, 224, 224"),
        "sequence": SEQUENCE_CONFIG,
        "heavy": config("heavy", "onnxruntime", ("x", "y"), str(HEAVY_WIDTH), HEAVY_MAX_BATCH, one_thread),
    }
    sleep = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{SLEEP_MS}" }} }}\n'
    for name, policy in POLICIES.items():
        configs[name] = config(name, "identity", ("INPUT0", "OUTPUT0"), "16", 32, sleep, policy)
    for name, each in FULL_QUEUE.items():
        options = {"ISOLATION": each.isolation}
        if each.wait_ms:
            backend, tensors, dims = "identity", ("INPUT0", "OUTPUT0"), "16"
            options["execute_delay_ms"] = str(each.wait_ms)
        else:
            backend, tensors, dims = "onnxruntime", ("x", "y"), str(WIDE)
            options["intra_op_thread_count"] = "1"
        extra = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in options.items()
        )
        configs[name] = config(name, backend, tensors, dims, FULL_BATCH, extra, each.batching, each.instances)
    for name, text in configs.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(text)
    for name in ("python_ident", "python_image"):
        (root / name / "1" / "model.py").write_text(PYTHON_IDENTITY)
    (root / "sequence" / "1" / "model.py").write_text(PYTHON_SEQUENCE)
    (root / "heavy" / "1" / "model.onnx").write_bytes(heavy_onnx().SerializeToString())
    wide = wide_onnx().SerializeToString()
    for name, each in FULL_QUEUE.items():
        if not each.wait_ms:
            (root / name / "1" / "model.onnx").write_bytes(wide)
    return root


def binary_request(name: str, array: NDArray[np.float32]) -> tuple[bytes, int]:
    """An HTTP inference body with one binary input that asks for binary outputs, and the length of its JSON part."""
    tensor = {
        "name": name,
        "shape": array.shape,
        "datatype": "FP32",
        "parameters": {"binary_data_size": array.nbytes},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return header + array.tobytes(), len(header)
