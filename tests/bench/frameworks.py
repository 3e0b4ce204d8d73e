"""The same small model in each framework: how to write it, and how to run it as the server's backend does.

A network of `size` matrix products, or a forest of `size` trees for what knows only forests. Frameworks are imported where
they are used: each has a process of its own.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

WIDTH, TOKENS = 256, 32
"""Values of a row of the network, and the rows that it becomes inside."""
FEATURES, DEPTH = 32, 8
"""Features of a row of a forest, and the depth of its trees."""
SAMPLES = 4000
SEED = 0

Call = Callable[[NDArray[np.float32]], Any]
"""Computes one batch."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A backend, the package that it needs, and its model.

    `first_size` is where the search for the right size begins, `rows` the rows of one request.
    """

    backend: str
    package: str
    isolation: str
    filename: str
    write: Callable[[int, Path], None]
    open: Callable[[Path], Call]
    first_size: int
    parameters: dict[str, str]
    rows: int = 1
    width: int = WIDTH
    outputs: int = WIDTH
    tensors: tuple[str, str] = ("x", "y")

    def is_installed(self) -> bool:
        return find_spec(self.package) is not None

    @property
    def batch(self) -> int:
        """Rows of a full batch."""
        return self.rows * REQUESTS

    def inputs(self, rows: int) -> NDArray[np.float32]:
        """The rows of one request, repeated: the load generator sends the same ones with every request."""
        request = np.random.default_rng(SEED).random((self.rows, self.width), dtype=np.float32)
        return np.resize(request, (rows, self.width))

    def config(self, name: str, isolation: str) -> str:
        """A configuration with one instance of one thread."""
        parameters = self.parameters | ({"ISOLATION": isolation} if isolation != self.isolation else {})
        extra = "".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
        )
        return models.config(
            name, self.backend, self.tensors, str(self.width), self.batch, extra, output_dims=str(self.outputs)
        )


REQUESTS = 8
"""Requests in a full batch: half of the callers, so that the next batch waits while one runs."""


def weights(layer: int) -> NDArray[np.float32]:
    """Scaled so that the values neither grow nor vanish, however many layers there are."""
    random = np.random.default_rng((SEED, layer))
    return random.standard_normal((WIDTH, WIDTH), dtype=np.float32) * np.float32((2 / WIDTH) ** 0.5)


def spread() -> NDArray[np.float32]:
    return np.random.default_rng(SEED).standard_normal((1, TOKENS, 1), dtype=np.float32)


def write_onnx(size: int, path: Path) -> None:
    constants: dict[str, NDArray[Any]] = {
        "one": np.array([1], dtype=np.int64),
        "flat": np.array([-1, WIDTH], dtype=np.int64),
        "cubic": np.array([-1, TOKENS, WIDTH], dtype=np.int64),
        "spread": spread(),
    }
    nodes = [
        helper.make_node("Unsqueeze", ["x", "one"], ["row"]),
        helper.make_node("Mul", ["row", "spread"], ["tokens"]),
        helper.make_node("Reshape", ["tokens", "flat"], ["h0"]),
    ]
    for layer in range(size):
        constants[f"w{layer}"] = weights(layer)
        nodes.append(helper.make_node("MatMul", [f"h{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"h{layer + 1}"]))
    nodes.append(helper.make_node("Reshape", [f"h{size}", "cubic"], ["last"]))
    nodes.append(helper.make_node("ReduceMean", ["last", "one"], ["y"], keepdims=0))
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", "y")]
    initializers = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "network", tensors[:1], tensors[1:], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


def open_onnx(path: Path) -> Call:
    return _session(path.read_bytes(), "x")


def _session(model: bytes, name: str) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {name: x})


def write_torch(size: int, path: Path) -> None:
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spread = torch.nn.Parameter(torch.from_numpy(spread()))
            self.layers = torch.nn.ParameterList([torch.from_numpy(weights(layer)) for layer in range(size)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = (x.unsqueeze(1) * self.spread).reshape(-1, WIDTH)
            for layer in self.layers:
                h = torch.relu(torch.matmul(h, layer))
            return h.reshape(-1, TOKENS, WIDTH).mean(dim=1)

    with warnings.catch_warnings(), torch.no_grad():
        # TorchScript is deprecated, and what Triton's users have.
        warnings.simplefilter("ignore")
        torch.jit.trace(Network().eval(), torch.ones(2, WIDTH)).save(str(path))


def open_torch(path: Path) -> Call:
    import torch

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.jit.load(str(path))

    @torch.inference_mode()
    def call(x: NDArray[np.float32]) -> Any:
        return module(torch.from_numpy(x)).numpy()

    return call


def open_openvino(path: Path) -> Call:
    # Its import sends a message to its vendor unless this module is missing.
    import sys

    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # None makes its import fail
    import openvino

    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_NUM_THREADS": 1,
        "NUM_STREAMS": 1,
    }
    request = openvino.Core().compile_model(str(path), "CPU", properties).create_infer_request()
    return lambda x: request.infer([x], share_inputs=True, share_outputs=True)


def write_tensorflow(size: int, path: Path) -> None:
    tf = _tensorflow()

    class Network(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spread = tf.Variable(spread())
            self.layers = [tf.Variable(weights(layer)) for layer in range(size)]

        @tf.function(input_signature=[tf.TensorSpec([None, WIDTH], tf.float32, name="x")])
        def __call__(self, x: Any) -> Any:
            h = tf.reshape(tf.expand_dims(x, 1) * self.spread, [-1, WIDTH])
            for layer in self.layers:
                h = tf.nn.relu(tf.matmul(h, layer))
            return {"y": tf.reduce_mean(tf.reshape(h, [-1, TOKENS, WIDTH]), axis=1)}

    network = Network()
    tf.saved_model.save(network, str(path), signatures=network.__call__)


def open_tensorflow(path: Path) -> Call:
    """A session with one thread that computes in the caller, as the backend's."""
    tf = _tensorflow()
    v1 = tf.compat.v1
    settings = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    session = v1.Session(graph=tf.Graph(), config=settings)
    with session.graph.as_default():
        signature = v1.saved_model.load(session, ["serve"], str(path)).signature_def["serving_default"]
    from tensorflow.core.protobuf.config_pb2 import CallableOptions

    options = CallableOptions(feed=[signature.inputs["x"].name], fetch=[signature.outputs["y"].name])
    options.run_options.inter_op_thread_pool = -1
    call: Call = session._make_callable_from_options(options)
    return call


def _tensorflow() -> Any:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["ENABLE_RUNTIME_UPTIME_TELEMETRY"] = "0"
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    # The threads belong to the process and are made once, for the first graph that runs in it.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def _samples() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(SEED)
    rows = random.random((SAMPLES, FEATURES), dtype=np.float32)
    return rows, (rows @ random.standard_normal(FEATURES, dtype=np.float32)).astype(np.float32)


def write_xgboost(size: int, path: Path) -> None:
    import xgboost

    rows, values = _samples()
    settings = {"max_depth": DEPTH, "nthread": 1, "tree_method": "hist", "eta": 0.05, "seed": SEED, "base_score": 0.5}
    xgboost.train(settings, xgboost.DMatrix(rows, values), size).save_model(str(path))


def open_forest(path: Path) -> Call:
    """The sums of the trees in ONNX Runtime, which is what the backend runs."""
    from halimede.backends.trees.onnx_file import INPUT, onnx_bytes
    from halimede.backends.trees.read_forest import read_forest

    return _session(onnx_bytes(read_forest(path, "xgboost_json", allow_unknown_field=False)), INPUT)


def write_sklearn(size: int, path: Path) -> None:
    import joblib
    from sklearn.ensemble import RandomForestRegressor

    rows, values = _samples()
    forest = RandomForestRegressor(size, max_depth=DEPTH, n_jobs=1, random_state=SEED, max_samples=0.25)
    joblib.dump(forest.fit(rows, values), path)


def open_sklearn(path: Path) -> Call:
    import joblib

    estimator = joblib.load(path)
    call: Call = estimator.predict
    return call


ONNX = Framework(
    "onnxruntime", "onnxruntime", "thread", "model.onnx", write_onnx, open_onnx, 20, {"intra_op_thread_count": "1"}
)
FRAMEWORKS = {
    "onnx": ONNX,
    "pytorch": Framework(
        "pytorch", "torch", "process", "model.pt", write_torch, open_torch, 20, {"INTRA_OP_THREAD_COUNT": "1"}
    ),
    "openvino": Framework(
        "openvino", "openvino", "thread", "model.onnx", write_onnx, open_openvino, 20, {"INFERENCE_NUM_THREADS": "1"}
    ),
    "tensorflow": Framework(
        "tensorflow",
        "tensorflow",
        "process",
        "model.savedmodel",
        write_tensorflow,
        open_tensorflow,
        20,
        {"TF_NUM_INTRA_THREADS": "1"},
    ),
    "fil": Framework(
        "fil",
        "xgboost",
        "thread",
        "xgboost.json",
        write_xgboost,
        open_forest,
        200,
        {"cpu_nthread": "1"},
        rows=32,
        width=FEATURES,
        outputs=1,
        tensors=("input__0", "output__0"),
    ),
    "sklearn": Framework(
        "sklearn",
        "sklearn",
        "process",
        "model.joblib",
        write_sklearn,
        open_sklearn,
        50,
        {"INTRA_OP_THREAD_COUNT": "1"},
        width=FEATURES,
        outputs=1,
    ),
}
