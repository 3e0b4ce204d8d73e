"""OpenVINO models through a real server and Triton's clients: on its threads, and in processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from onnx import helper

from halimede.core.types import DataType
from support.calls import index, load, unload
from support.forked import start_python
from support.models import save_onnx, write_config
from support.onnx_models import add_sub as onnx_add_sub
from support.openvino_models import add_sub, bare, identity, perceptron, write
from support.probe import built, provided
from support.processes import holding_no_more
from support.server import RunningServer, serving, wait_until

COMPILE = ["cc", "-std=c11", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", "{out}/extension.so", "extension.c"]
THREADS = {"thread": "", "process": 'parameters { key: "ISOLATION" value { string_value: "process" } }'}


WIDTH = 256
SUMS = """
backend: "openvino"
max_batch_size: 8
output { name: "SUM" data_type: TYPE_FP32 dims: 1 }
sequence_batching {
  oldest { max_candidate_sequences: 8 }
  state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: 1 }
}
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


@pytest.fixture(scope="module")
def extension(pytestconfig: pytest.Config) -> Path:
    """A library of custom operations."""
    return provided(pytestconfig, lambda: built("openvino_extension", COMPILE, needs="cc")) / "extension.so"


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The processes that have opened the library, one a line."""
    return tmp_path_factory.mktemp("marker") / "processes"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, extension: Path) -> Path:
    root = tmp_path_factory.mktemp("models")
    for isolation, settings in THREADS.items():
        write(perceptron((-1, WIDTH)), root / isolation / "1" / "model.xml")
        write_config(root / isolation, settings + "instance_group { count: 1 }")
    write(identity(DataType.BYTES, (-1, 2)), root / "text" / "1" / "model.xml")
    (root / "onnx" / "1").mkdir(parents=True)
    onnx.save(onnx_add_sub(), root / "onnx" / "1" / "model.onnx")
    write_config(root / "onnx", 'backend: "openvino"')
    save_onnx(
        root / "sums" / "1" / "model.onnx",
        [helper.make_node("Add", ["X", "SUM_IN"], ["SUM"]), helper.make_node("Identity", ["SUM"], ["SUM_OUT"])],
        [("X", "FP32", ["N", 1]), ("SUM_IN", "FP32", ["N", 1])],
        [("SUM", "FP32", ["N", 1]), ("SUM_OUT", "FP32", ["N", 1])],
    )
    write_config(root / "sums", SUMS)
    for name, settings in (("custom", THREADS["process"]), ("custom_thread", "")):
        write(add_sub(), root / name / "1" / "model.xml")
        given = settings + parameter("CPU_EXTENSION_PATH", str(extension))
        write_config(root / name, given + "instance_group { count: 1 }")
    write(perceptron(), root / "truncated" / "1" / "model.xml")
    (root / "truncated" / "1" / "model.bin").write_bytes(b"")
    return root


@pytest.fixture(scope="module")
def server(repository: Path, marker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=thread"]
    environment = {"EXTENSION_MARKER": str(marker)}
    with serving(tmp_path_factory.mktemp("log"), arguments, environment=environment) as running:
        yield running


def infer(client, module, model: str, values: np.ndarray) -> np.ndarray:
    tensor = module.InferInput("x", values.shape, "FP32")
    tensor.set_data_from_numpy(values)
    return client.infer(model, [tensor]).as_numpy("y")


@pytest.mark.parametrize("isolation", THREADS)
def test_clients_get_the_numbers_of_the_bare_runtime(server, repository, isolation) -> None:
    assert load(server, isolation) == (200, "")
    values = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)
    expected = bare(repository / isolation / "1" / "model.xml", {"x": values})["y"]
    with httpclient.InferenceServerClient(server.http_url) as client:
        assert infer(client, httpclient, isolation, values).tobytes() == expected.tobytes()
        shown = client.get_model_config(isolation)
        assert (shown["backend"], shown["max_batch_size"], shown["default_model_filename"]) == (
            "openvino",
            4,
            "model.xml",
        )
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert infer(client, grpcclient, isolation, values).tobytes() == expected.tobytes()


def test_strings_go_through_a_server(server) -> None:
    assert load(server, "text") == (200, "")
    texts = np.array([[b"a", b""], ["ü".encode(), b"long" * 100]], object)
    with httpclient.InferenceServerClient(server.http_url) as client:
        tensor = httpclient.InferInput("x", [2, 2], "BYTES")
        tensor.set_data_from_numpy(texts)
        assert client.infer("text", [tensor]).as_numpy("x").tolist() == texts.tolist()


def test_an_onnx_file_is_served_by_openvino_if_the_configuration_says_so(server) -> None:
    assert load(server, "onnx") == (200, "")
    inputs = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [3, 4]} for name in ("a", "b")]
    answer = server.post("/v2/models/onnx/infer", {"inputs": inputs})
    assert {each["name"]: each["data"] for each in answer.json["outputs"]} == {"sum": [6, 8], "difference": [0, 0]}
    assert server.get("/v2/models/onnx/config").json["backend"] == "openvino"


def test_the_server_keeps_the_states_of_sequences(server) -> None:
    """OpenVINO removes the Identity: the state and the sum are outputs of one tensor."""
    assert load(server, "sums") == (200, "")

    def add(sequence: int, number: float, **flags: bool) -> list[float]:
        tensor = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [number]}
        answer = server.post(
            "/v2/models/sums/infer", {"inputs": [tensor], "parameters": {"sequence_id": sequence, **flags}}
        )
        return [each["data"] for each in answer.json["outputs"]]

    assert [add(1, 3, sequence_start=True), add(2, 5, sequence_start=True)] == [[[3]], [[5]]]
    assert [add(1, 4), add(2, 6)] == [[[7]], [[11]]]
    assert [add(1, 1, sequence_end=True), add(2, 1, sequence_end=True)] == [[[8]], [[12]]]


def test_a_library_of_operations_is_opened_in_the_models_processes_alone(server, repository, marker) -> None:
    assert load(server, "custom_thread")[0] == 400
    reason = index(server)["custom_thread", "1"][1]
    assert reason.endswith("set parameter 'ISOLATION' to 'process', so that the model's own processes load it"), reason
    command = ["-m", "halimede", "explain-config", repository / "custom"]
    variables = {**os.environ, "EXTENSION_MARKER": str(marker)}
    with open(os.devnull, "wb") as nothing:
        explaining = start_python(*command, stdout=nothing, stderr=nothing, environment=variables)
    assert explaining.wait(60) == 0
    assert load(server, "custom") == (200, "")
    assert {server.process.pid, explaining.pid}.isdisjoint(opened(marker))
    assert len(opened(marker)) >= 2
    # And a crash of such a process is not the end of the model.
    os.kill(opened(marker)[-1], signal.SIGSEGV)
    inputs = [{"name": name, "shape": [1, 2], "datatype": "FP32", "data": [3, 4]} for name in ("a", "b")]
    wait_until(lambda: server.post("/v2/models/custom/infer", {"inputs": inputs}).status == 200, "the model", server)


def opened(marker: Path) -> list[int]:
    return [int(line) for line in marker.read_text().split()]


def test_a_wrong_file_is_one_clear_error(server, repository) -> None:
    assert load(server, "truncated")[0] >= 400
    state, reason = index(server)["truncated", "1"]
    assert (state, reason) == (
        "UNAVAILABLE",
        f"Internal: openvino error in '{repository}/truncated/1/model.xml': Incorrect weights in bin file!",
    )


@pytest.mark.parametrize(
    "cycles",
    [
        5,
        pytest.param(20, marks=pytest.mark.large),
        pytest.param(100, marks=[pytest.mark.load, pytest.mark.timeout(600)]),
    ],
)
def test_loads_and_unloads_leave_nothing_behind(server, cycles) -> None:
    values = np.ones((2, WIDTH), np.float32)

    def cycle(client) -> None:
        assert load(server, "thread") == (200, "")
        infer(client, httpclient, "thread", values)
        assert unload(server, "thread") == 200
        wait_until(lambda: index(server)["thread", "1"][0] == "UNAVAILABLE", "the unload", server)

    with httpclient.InferenceServerClient(server.http_url) as client:
        for _ in range(5):
            cycle(client)
        # Each load has weights of 768 KB, and code for them.
        with holding_no_more(server.process.pid, threads=2, growth_bytes=2 << 20):
            for _ in range(cycles):
                cycle(client)
