"""TensorRT models in a real server, on a played TensorRT and CUDA, and with real clients."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from support.calls import load, unload
from support.models import write_config
from support.plans import BATCH, DOUBLE, DOUBLES, ENVIRONMENT, compute, computed, given, plan
from support.processes import holding_no_more
from support.served import parameter, workers
from support.server import RunningServer, serving, wait_until

GPUS = [
    {"kind": "GPU", "index": 0, "uuid": "GPU-0", "compute_capability": "9.0"},
    {"kind": "GPU", "index": 1, "uuid": "GPU-1", "compute_capability": "8.9"},
]
ON_FIRST = "instance_group { kind: KIND_GPU gpus: 0 }\n"
ON_SECOND = "instance_group { kind: KIND_GPU gpus: 1 }\n"
PROCESS = parameter("ISOLATION", "process")
SINES = (given("x", [-1, 4], BATCH), computed("y", [-1, 4], "np.sin(x) * 3"))
STATE = """
sequence_batching {
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: 4 }
}
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
max_batch_size: 8
"""
RAGGED = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
batch_input {
  kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_FP32 source_input: "x"
}
output { name: "y" data_type: TYPE_FP32 dims: 1 reshape { } }
dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 2 }
"""
RESIZED = """
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: 4 },
  { name: "to" data_type: TYPE_INT32 dims: 1 is_shape_tensor: true }
]
output { name: "y" data_type: TYPE_FP32 dims: -1 }
dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 3 }
"""


def add(repository: Path, name: str, content: bytes, config: str = ON_FIRST, filename: str = "model.plan") -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / filename).write_bytes(content)
    write_config(folder.parent, config)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = tmp_path_factory.mktemp("models")
    (models / "bare" / "1").mkdir(parents=True)
    (models / "bare" / "1" / "model.plan").write_bytes(plan(*SINES))
    add(models, "apart", plan(*SINES), ON_FIRST + PROCESS)
    graphs = "optimization { cuda { graphs: true graph_spec { batch_size: 3 } } priority: PRIORITY_MAX }"
    add(models, "graphs", plan(*SINES), f'{ON_FIRST} platform: "tensorrt_plan" {graphs}')
    add(models, "crash", plan(*DOUBLE, fault="exit", fault_size=12), ON_FIRST + PROCESS)
    add(models, "illegal", plan(*DOUBLE, fault="illegal", fault_size=12), ON_FIRST + PROCESS)
    files = 'cc_model_filenames { key: "8.9" value: "ada.plan" }\n'
    for name, group in (("first", ON_FIRST), ("second", ON_SECOND), ("secondp", ON_SECOND + PROCESS)):
        add(models, name, plan(*DOUBLE), group + files)
        triple = given("x", [-1, 4], BATCH), computed("y", [-1, 4], "x * 3")
        add(models, name, plan(*triple, device=1), group + files, "ada.plan")
    one = ([1, 1], [4, 1], [8, 1])
    state = (
        given("x", [-1, 4], BATCH), given("before", [-1, 4], BATCH), given("START", [-1, 1], one),
        computed("y", [-1, 4], "before * (1 - START) + x"), computed("after", [-1, 4], "before * (1 - START) + x"),
    )  # fmt: skip
    add(models, "state", plan(*state), ON_FIRST + STATE)
    ragged = (
        given("x", [-1], ([1], [4], [64])), given("counts", [-1], ([1], [2], [8])),
        computed("y", [-1], "np.add.reduceat(x, np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(int))"),
    )  # fmt: skip
    add(models, "ragged", plan(*ragged), ON_FIRST + RAGGED)
    resized = (
        given("x", [-1, 4], BATCH),
        given("to", [2], dtype="INT32", values=[([1, 1], [4, 2], [8, 8])]),
        computed("y", [-1, -1], "np.resize(x, to)"),
    )
    add(models, "resized", plan(*resized), ON_FIRST + RESIZED)
    return models


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("log")
    devices = log / "devices.json"
    devices.write_text(json.dumps(GPUS))
    environment = {**ENVIRONMENT, "HALIMEDE_DEVICE_LIST": str(devices), "PLAYED_GPUS": "2"}
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=bare"]
    with serving(log, arguments, environment=environment) as running:
        yield running


def ask(server: RunningServer, model: str, array: np.ndarray, **options: object) -> np.ndarray:
    """The output y over gRPC."""
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("x", list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        found = client.infer(model, [tensor], **options).as_numpy("y")
        assert found is not None
        return found


def test_numbers_are_the_same_outside_on_threads_in_processes_and_from_graphs(
    server: RunningServer, tmp_path: Path
) -> None:
    for model in ("apart", "graphs"):
        assert load(server, model) == (200, "")
    for rows in (1, 3, 8):
        array = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        outside = compute(tmp_path, plan(*SINES), DOUBLES, {"x": array})["y"]
        for model in ("bare", "apart", "graphs"):
            assert ask(server, model, array).tobytes() == outside.tobytes(), model
        with httpclient.InferenceServerClient(server.http_url) as client:
            tensor = httpclient.InferInput("x", [rows, 4], "FP32")
            tensor.set_data_from_numpy(array)
            assert client.infer("bare", [tensor]).as_numpy("y").tobytes() == outside.tobytes()
    assert (len(workers(server, "bare")), len(workers(server, "apart"))) == (0, 1)


def test_a_plan_alone_is_completed_from_the_engine(server: RunningServer) -> None:
    config = server.get("/v2/models/bare/config").json
    chosen = {key: config[key] for key in ("platform", "backend", "max_batch_size", "input", "instance_group")}  # type: ignore[index]
    assert (chosen["platform"], chosen["backend"], chosen["max_batch_size"]) == ("tensorrt_plan", "tensorrt", 8)
    assert [(each["name"], each["data_type"], each["dims"]) for each in chosen["input"]] == [("x", "TYPE_FP32", [4])]
    assert [(each["kind"], each["count"], each["gpus"]) for each in chosen["instance_group"]] == [
        ("KIND_GPU", 1, [0, 1])
    ]
    assert server.get("/v2/models/bare").json["platform"] == "tensorrt_plan"  # type: ignore[index]


def test_settings_that_are_honoured_give_no_notes(server: RunningServer) -> None:
    assert load(server, "graphs") == (200, "")
    assert "model 'graphs'" not in server.log


def test_instances_load_the_file_of_their_gpu(server: RunningServer) -> None:
    ones = np.ones((1, 4), np.float32)
    found = {}
    for model in ("first", "second", "secondp"):
        assert load(server, model) == (200, "")
        found[model] = ask(server, model, ones)[0, 0]
    assert found == {"first": 2, "second": 3, "secondp": 3}


@pytest.mark.parametrize("model", ["crash", "illegal"])
def test_a_fatal_error_costs_one_batch_and_the_process_is_restarted(server: RunningServer, model: str) -> None:
    assert load(server, model) == (200, "")
    (before,) = workers(server, model)
    answer = server.post(
        f"/v2/models/{model}/infer",
        {"inputs": [{"name": "x", "shape": [3, 4], "datatype": "FP32", "data": [1.0] * 12}]},
    )
    assert answer.status == 500
    assert ("illegal" in answer.error.lower()) == (model == "illegal"), answer.error
    wait_until(lambda: [each.pid for each in workers(server, model)] not in ([], [before.pid]), "a new process", server)
    assert ask(server, model, np.ones((1, 4), np.float32)).tolist() == [[2, 2, 2, 2]]


def test_implicit_state_stays_with_its_sequence(server: RunningServer) -> None:
    assert load(server, "state") == (200, "")
    one = np.ones((1, 4), np.float32)
    sums = [
        ask(server, "state", one * factor, sequence_id=number, sequence_start=start)[0, 0]
        for number, factor, start in ((1, 1, True), (2, 10, True), (1, 1, False), (2, 10, False), (1, 1, False))
    ]
    assert sums == [1, 10, 2, 20, 3]


def test_ragged_requests_share_a_batch(server: RunningServer) -> None:
    assert load(server, "ragged") == (200, "")
    with httpclient.InferenceServerClient(server.http_url, concurrency=2) as client:
        pending = []
        for numbers in ([1, 2, 3], [4, 5]):
            tensor = httpclient.InferInput("x", [1, len(numbers)], "FP32")
            tensor.set_data_from_numpy(np.array([numbers], np.float32))
            pending.append(client.async_infer("ragged", [tensor]))
        assert [each.get_result().as_numpy("y").tolist() for each in pending] == [[[6]], [[9]]]
    stats = server.get("/v2/models/ragged/stats").json["model_stats"][0]  # type: ignore[index]
    assert (stats["inference_count"], stats["execution_count"]) == (2, 1)


def test_requests_with_equal_values_of_a_shape_tensor_share_a_batch(server: RunningServer) -> None:
    assert load(server, "resized") == (200, "")
    with httpclient.InferenceServerClient(server.http_url, concurrency=2) as client:
        pending = []
        for rows in (1, 2):
            x, to = httpclient.InferInput("x", [rows, 4], "FP32"), httpclient.InferInput("to", [2], "INT32")
            x.set_data_from_numpy(np.full((rows, 4), rows, np.float32))
            to.set_data_from_numpy(np.array([rows, 4], np.int32))
            pending.append(client.async_infer("resized", [x, to]))
        assert [each.get_result().as_numpy("y").tolist() for each in pending] == [[[1] * 4], [[2] * 4] * 2]
    stats = server.get("/v2/models/resized/stats").json["model_stats"][0]  # type: ignore[index]
    assert (stats["inference_count"], stats["execution_count"]) == (3, 1)


@pytest.mark.parametrize(
    ("content", "config", "part"),
    [
        (plan(*DOUBLE)[:-9], ON_FIRST, "the plan is damaged; the file was made by TensorRT 11.4.0.106"),
        (b"\x08\x08" + bytes(60), ON_FIRST, "is not a TensorRT plan"),
        (plan(*DOUBLE), "instance_group { kind: KIND_CPU }", "TensorRT backend supports only GPU device"),
        (plan(*DOUBLE), ON_FIRST + parameter("enable_multi_device", "true"), "'enable_multi_device' is not supported"),
        (plan(*DOUBLE), 'instance_group { kind: KIND_GPU profile: "1" }', "profile '1' does not exist"),
        (plan(*DOUBLE), ON_FIRST + "max_batch_size: 9", "TensorRT engine only supports max-batch 8"),
        (
            plan(*DOUBLE),
            ON_FIRST + 'input { name: "x" data_type: TYPE_FP32 dims: 4 is_non_linear_format_io: true }',
            "'input[0].is_non_linear_format_io' is not supported yet",
        ),
    ],
    ids=["truncated", "onnx", "cpu", "multi-device", "profile", "batch", "vectorised"],
)
def test_a_wrong_model_is_one_clear_error(
    server: RunningServer, repository: Path, content: bytes, config: str, part: str
) -> None:
    add(repository, "wrong", content, config)
    answer = server.post("/v2/repository/models/wrong/load")
    assert (answer.status >= 400, part in answer.error) == (True, True), answer.body


@pytest.mark.parametrize(
    "cycles", [5, pytest.param(20, marks=pytest.mark.large), pytest.param(100, marks=pytest.mark.load)]
)
def test_loads_and_unloads_leave_no_threads_files_or_processes(server: RunningServer, cycles: int) -> None:
    def cycle() -> None:
        assert load(server, "graphs") == (200, "")
        ask(server, "graphs", np.ones((3, 4), np.float32))
        unload(server, "graphs")

    cycle()
    wait_until(lambda: server.get("/v2/models/graphs/ready").status != 200, "the unload", server)
    before = len(workers(server))
    with holding_no_more(server.process.pid, threads=0):
        for _ in range(cycles):
            cycle()
    wait_until(lambda: len(workers(server)) <= before, f"{before} processes", server)


def test_the_configuration_is_explained_and_checked_without_a_server(
    server: RunningServer, repository: Path, tmp_path: Path
) -> None:
    import os
    import subprocess
    import sys

    devices = tmp_path / "devices.json"
    devices.write_text(json.dumps(GPUS))
    done = subprocess.run(
        [sys.executable, "-m", "halimede", "explain-config", str(repository / "graphs")],
        env={**os.environ, **ENVIRONMENT, "HALIMEDE_DEVICE_LIST": str(devices)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "max_batch_size: 8" in done.stdout
    assert "no effect" not in done.stdout + done.stderr
