"""Models of TensorFlow in a real server, against what TensorFlow itself answers for them."""

import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from support.calls import index, unload
from support.probe import provided
from support.processes import holding_no_more
from support.served import parameter, workers, zygotes
from support.server import RunningServer, serving, wait_until
from support.tensorflow_models import LIBRARY, ONE, ROWS, add_model, built_models, expected

MIXED = """
input [
  { name: "text" data_type: TYPE_STRING dims: [ -1, -1 ] }, { name: "brain" data_type: TYPE_BF16 dims: -1 },
  { name: "scalar" data_type: TYPE_FP32 dims: 1 }, { name: "whole" data_type: TYPE_INT64 dims: [ -1, 2 ] }
]
output [
  { name: "twice" data_type: TYPE_STRING dims: [ -1, -1 ] }, { name: "joined" data_type: TYPE_STRING dims: 1 },
  { name: "double" data_type: TYPE_BF16 dims: -1 }, { name: "next" data_type: TYPE_FP32 dims: 1 },
  { name: "negative" data_type: TYPE_INT64 dims: [ -1, 2 ] }
]
"""
SUMMING = """
max_batch_size: 4
sequence_batching {
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: 8192 }
}
"""
SPECIAL_TENSORS = """
platform: "tensorflow_graphdef"
max_batch_size: 8
input [
  { name: "x" data_type: TYPE_FP32 dims: 2 },
  { name: "digits" data_type: TYPE_STRING dims: 1 reshape { } },
  { name: "limit" data_type: TYPE_FP32 dims: 1 optional: true }
]
output [ { name: "y" data_type: TYPE_FP32 dims: 2 }, { name: "number" data_type: TYPE_FP32 dims: 1 reshape { } } ]
"""
RAGGED = """
platform: "tensorflow_graphdef"
max_batch_size: 8
dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 10000000 }
input { name: "values" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
batch_input {
  kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "values"
}
output { name: "sums" data_type: TYPE_FP32 dims: 1 }
"""
INIT_OPS = parameter("TF_INIT_OPS_FILE", "init_ops.json")
OPERATIONS = f'model_operations {{ op_library_filename: "{LIBRARY}" }}'
BATCH_OF_8 = "max_batch_size: 8\n"


# TensorFlow's import takes seconds, and the models are built before the first test.
pytestmark = pytest.mark.timeout(600)
LOAD_LIMIT_S = 300


@pytest.fixture(scope="module")
def repository(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = provided(request.config, built_models)
    path = tmp_path_factory.mktemp("models")
    add_model(path, "network", "network", ONE + BATCH_OF_8)
    add_model(path, "plain", "plain.graphdef", ONE)
    add_model(path, "mixed", "mixed", ONE + MIXED)
    add_model(path, "summing", "summing", ONE + 'platform: "tensorflow_savedmodel"' + SUMMING)
    add_model(path, "remembering", "remembering")
    add_model(path, "ragged", "ragged.graphdef", ONE + RAGGED)
    special = add_model(path, "special", "special.graphdef", ONE + SPECIAL_TENSORS + OPERATIONS + INIT_OPS)
    shutil.copy(built / LIBRARY, special.parent)
    (path / "special" / "init_ops.json").write_text('{"init_ops": ["init"]}')
    return path


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    loads = [f"--load-model={each.name}" for each in repository.iterdir()]
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", *loads]
    with serving(tmp_path_factory.mktemp("log"), arguments, ready=False) as running:
        wait_until(lambda: "Started HTTPService" in running.log, "the end of all loads", running, LOAD_LIMIT_S)
        yield running


def test_workers_share_the_memory_of_tensorflow(server: RunningServer) -> None:
    (forks,) = zygotes(server)
    # A fork of a process with several threads may hang.
    assert forks.num_threads() == 1
    own_mib = {each.name(): each.memory_full_info().uss >> 20 for each in workers(server)}
    # A process that imports TensorFlow itself has 400 MiB.
    assert max(own_mib.values()) < 160, own_mib


def infer(server: RunningServer, model: str, *outputs: str, protocol: str = "http", **inputs: np.ndarray):  # type: ignore[no-untyped-def]
    """The outputs as a dictionary of arrays."""
    client = httpclient if protocol == "http" else grpcclient
    tensors = []
    for name, array in inputs.items():
        datatypes = {"f": f"FP{array.itemsize * 8}", "i": f"INT{array.itemsize * 8}", "O": "BYTES"}
        datatype = "BF16" if array.dtype == ml_dtypes.bfloat16 else datatypes[array.dtype.kind]
        tensors.append(client.InferInput(name, list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    with client.InferenceServerClient(server.http_url if protocol == "http" else server.grpc_url) as caller:
        asked = [client.InferRequestedOutput(name) for name in outputs]
        result = caller.infer(model, tensors, outputs=asked or None)
    return {name: result.as_numpy(name) for name in outputs}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_answers_are_those_of_tensorflow_bit_for_bit(server, protocol):
    answer = infer(server, "network", "scores", "same", protocol=protocol, x=ROWS)
    assert answer["scores"].tobytes() == expected("scores").tobytes()
    assert answer["same"].tobytes() == ROWS.tobytes()
    only = infer(server, "network", "scores", protocol=protocol, x=ROWS)
    assert only["scores"].tobytes() == expected("scores").tobytes()


def test_frozen_graph_needs_no_configuration_of_its_tensors(server):
    config = server.get("/v2/models/plain/config").json
    assert (config["platform"], config["default_model_filename"], config["max_batch_size"]) == (
        "tensorflow_graphdef",
        "model.graphdef",
        4,
    )
    assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"] + config["output"]] == [
        ("x", "TYPE_FP32", [16]),
        ("y", "TYPE_FP32", [3]),
    ]
    # TensorFlow answered for five rows; each row of a product is the same in any batch of this size here.
    assert infer(server, "plain", "y", x=ROWS[:4])["y"].tolist() == pytest.approx(expected("y")[:4], rel=1e-6)


def test_strings_bfloat16_scalars_and_any_rank(server):
    text = np.array([[b"\xff\0a", b""], ["ü".encode(), b"y"]], object)
    brain = np.array([1, -2, 0.5], ml_dtypes.bfloat16)
    whole = np.array([[1, 2], [3, 4]], np.int64)
    outputs = ("twice", "joined", "double", "next", "negative")
    answer = infer(server, "mixed", *outputs, text=text, brain=brain, scalar=np.ones(1, np.float32), whole=whole)
    assert {name: array.tolist() for name, array in answer.items()} == {
        "twice": [[b"\xff\0a\xff\0a", b""], ["üü".encode(), b"yy"]],
        "joined": [b"\xff\0a" + "üy".encode()],
        "double": [2, -4, 1],
        "next": [2],
        "negative": [[-1, -2], [-3, -4]],
    }


def test_implicit_state_is_kept_between_the_requests_of_a_sequence(server):
    sums = []
    with httpclient.InferenceServerClient(server.http_url) as caller:
        for sequence, value in ((1, 1), (2, 10), (1, 2), (2, 20), (1, 3)):
            tensor = httpclient.InferInput("x", [1, 8192], "FP32")
            tensor.set_data_from_numpy(np.full((1, 8192), value, np.float32))
            start = value in (1, 10)
            result = caller.infer("summing", [tensor], sequence_id=sequence, sequence_start=start)
            sums += set(result.as_numpy("sum").flat)
    assert sums == [1, 10, 3, 30, 5]


def test_graph_that_keeps_an_input_keeps_its_values(server):
    """TensorFlow reads inputs of this size in place, and their memory is used again for the next request."""
    found = []
    for value in range(5):
        answer = infer(server, "remembering", "before", "calls", x=np.full(8192, value, np.float32))
        found.append((*set(answer["before"].tolist()), answer["calls"].item()))
    # No run at load has changed the state.
    assert found == [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5)]


def test_ragged_requests_are_one_batch(server):
    requests = [np.array([values], np.float32) for values in ([1, 2], [3], [4, 5, 6])]
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda values: infer(server, "ragged", "sums", values=values)["sums"], requests))
    assert [answer.tolist() for answer in answers] == [[[3]], [[3]], [[15]]]
    (stats,) = server.get("/v2/models/ragged/stats").json["model_stats"]
    assert [each["batch_size"] for each in stats["batch_stats"]] == [3]


def special(server: RunningServer, x: list[list[float]], digits: bytes = b"7", **more: np.ndarray) -> dict[str, list]:  # type: ignore[type-arg]
    texts = np.full((len(x), 1), digits, object)
    answer = infer(server, "special", "y", "number", x=np.array(x, np.float32), digits=texts, **more)
    return {name: array.tolist() for name, array in answer.items()}


def test_library_variable_and_inputs_with_defaults_of_a_graph(server):
    assert special(server, [[1, 2], [3, 4]]) == {"y": [[0.75, 1.25], [1.75, 2.25]], "number": [[7], [7]]}
    limit = np.array([[1], [0.5]], np.float32)
    assert special(server, [[1, 4], [3, 4]], limit=limit)["y"] == [[0.75, 1.25], [0.75, 0.75]]


def test_model_that_refuses_zeros_is_served(server):
    """At load the graph runs once with zeros, here with an empty text in place of a number."""
    assert "model 'special': the first run, with zeros, failed: INVALID_ARGUMENT: StringToNumberOp" in server.log


def test_failing_operation_is_an_error_in_tensorflow_s_words(server):
    with pytest.raises(InferenceServerException) as caught:
        special(server, [[1, 2]], digits=b"seven")
    text = caught.value.message()
    assert text.startswith(
        "TensorFlow error INVALID_ARGUMENT: StringToNumberOp could not correctly convert string: seven"
    )
    assert "\n" not in text


def test_crash_of_an_operation_costs_one_batch(server):
    with pytest.raises(InferenceServerException, match=f"It ended by signal {int(signal.SIGABRT)}"):
        special(server, [[-1, 2]])
    # The next request waits for the next process.
    assert special(server, [[1, 2]])["y"] == [[0.75, 1.25]]


def test_log_has_nothing_of_what_tensorflow_tells_itself(server):
    noise = [line for line in server.log.splitlines() if "oneDNN" in line or "absl" in line or "deprecated" in line]
    assert noise == []


def load(server: RunningServer, name: str) -> tuple[str, str]:
    """The status and text of the error, both empty for none. Waits long: a load may import TensorFlow."""
    with httpclient.InferenceServerClient(server.http_url, network_timeout=LOAD_LIMIT_S) as caller:
        try:
            caller.load_model(name)
        except InferenceServerException as error:
            return error.status(), error.message()
    return "", ""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def spoil(repository: Path, name: str) -> None:
    """Add a model that cannot be loaded."""
    match name:
        case "features":  # no mistake: the second signature of the same file
            add_model(repository, name, "network", ONE + BATCH_OF_8 + parameter("TF_SIGNATURE_DEF", "features"))
        case "cut":
            cut(add_model(repository, name, "network") / "saved_model.pb")
        case "weights":
            cut(add_model(repository, name, "network") / "variables" / "variables.data-00000-of-00001")
        case "operation":
            add_model(repository, name, "special.graphdef", ONE + SPECIAL_TENSORS)
        case "library":
            add_model(repository, name, "special.graphdef", ONE + SPECIAL_TENSORS + OPERATIONS)
        case "init":
            special = add_model(repository, name, "special.graphdef", ONE + SPECIAL_TENSORS + OPERATIONS + INIT_OPS)
            shutil.copy(built_models() / LIBRARY, special.parent)
            (special.parent / "init_ops.json").write_text('{"init": []}')
        case "output":
            tensors = (
                'input { name: "x" data_type: TYPE_FP32 dims: 16 } output { name: "y" data_type: TYPE_INT32 dims: 4 }'
            )
            add_model(repository, name, "plain.graphdef", ONE + BATCH_OF_8 + tensors)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("cut", ["is not a SavedModel, or is cut off"]),
        ("weights", ["cannot be loaded: OUT_OF_RANGE: "]),
        ("operation", ["has no operation 'HalimedeHalf'; name the library", "op_library_filename"]),
        ("library", [f"there is no operation library '{LIBRARY}': looked for '"]),
        ("init", ['must be JSON like {"init_ops": ["init"]}: KeyError(\'init_ops\')']),
        (
            "output",
            [
                "TYPE_INT32 for output 'y', model provides TYPE_FP32",
                "tensor 'y': the model expects 2 dimensions (shape [-1,3])",
            ],
        ),
    ],
)
def test_wrong_model_is_one_error_that_says_what_is_wrong(server, repository, name, texts):
    spoil(repository, name)
    status, error = load(server, name)
    assert (status, [text for text in texts if text not in error]) == ("400", []), error


def test_other_signature_of_the_same_file_is_served(server, repository):
    spoil(repository, "features")
    assert load(server, "features") == ("", "")
    assert infer(server, "features", "hidden", x=ROWS)["hidden"].tobytes() == expected("hidden").tobytes()
    assert unload(server, "features") == 200


@pytest.mark.parametrize("times", [3, pytest.param(100, marks=[pytest.mark.load, pytest.mark.timeout(1800)])])
def test_loads_and_unloads_leave_nothing_behind(server, repository, times):
    """Few times by default: what a load leaves in the server is that of any process."""
    name = f"cycled{times}"
    add_model(repository, name, "network", ONE + BATCH_OF_8)

    def cycle() -> None:
        assert load(server, name) == ("", "")
        infer(server, name, "scores", x=ROWS)
        assert unload(server, name) == 200
        wait_until(lambda: index(server).get((name, "1"), ("", ""))[0] != "READY", "the unload", server)
        wait_until(lambda: not workers(server, name), "the end of its process", server)

    cycle()
    with holding_no_more(server.process.pid, growth_bytes=3 << 20):
        for _ in range(times):
            cycle()
