"""Ragged and padded batches of ONNX models, as clients of the running server see them.

The models run only when a fixed number of requests has come, so those share a batch.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from support.background import in_background
from support.calls import load, metric
from support.models import write_config
from support.served import add_python, parameter
from support.server import RunningServer, serving
from support.unequal_models import PADDED, PROCESS, add_padded, add_ragged, add_sized, together

WAYS = {"thread": "", "process": PROCESS}
COUNT_REQUESTS = """
answers = []
for request in requests:
    shape = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().shape
    seen = np.array([[len(requests), *shape]], np.float32)
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", seen)]))
return answers
"""

JOINED = """
name: "joined"
platform: "ensemble"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: -1 }
output { name: "OUT" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step {
    model_name: "ragged_alone"
    model_version: -1
    input_map { key: "IN" value: "IN" }
    output_map { key: "DOUBLED" value: "OUT" }
  }
}
parameters { key: "PADDING" value { string_value: "own" } }
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    for way, isolation in WAYS.items():
        add_ragged(models, f"ragged_{way}", together(3) + isolation)
        add_padded(models, f"padded_{way}", together(4) + isolation)
        add_padded(models, f"short_{way}", together(4) + isolation, lengths="INT32")
        add_sized(models, f"sized_{way}", together(3) + isolation)
    add_ragged(models, "ragged_alone")
    add_padded(models, "padded_alone")
    (models / "joined" / "1").mkdir(parents=True)
    write_config(models / "joined", JOINED)
    own = parameter("PADDING", "left") + parameter("BATCH_SIZES", "any")
    batching = "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 60000000 }"
    add_python(models, "python_ragged", COUNT_REQUESTS, extra=batching + own)
    config = models / "python_ragged" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1))
    with serving(
        tmp_path_factory.mktemp("log"),
        ["--model-repository", models, "--model-control-mode=explicit", "--load-model=*"],
    ) as running:
        yield running


def infer(server: RunningServer, model: str, **inputs: np.ndarray) -> dict[str, list]:
    with httpclient.InferenceServerClient(server.http_url, network_timeout=90) as client:
        tensors = []
        for name, array in inputs.items():
            tensor = httpclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
            tensors.append(tensor.set_data_from_numpy(array))
        result = client.infer(model, tensors)
        return {each["name"]: result.as_numpy(each["name"]).tolist() for each in result.get_response()["outputs"]}


def at_once(server: RunningServer, model: str, requests: Sequence[dict[str, np.ndarray]]) -> list[dict[str, list]]:
    calls = [in_background(lambda inputs=inputs: infer(server, model, **inputs)) for inputs in requests]
    return [call.result(60) for call in calls]


def batches(server: RunningServer, model: str) -> dict[int, int]:
    """The number of executions by batch size."""
    (stats,) = server.get(f"/v2/models/{model}/stats").json["model_stats"]
    return {each["batch_size"]: each["compute_infer"]["count"] for each in stats["batch_stats"]}


def floats(*rows: Sequence[float]) -> np.ndarray:
    return np.array(rows, np.float32)


@pytest.mark.parametrize("way", WAYS, ids="by {}".format)
def test_requests_of_unequal_lengths_share_a_ragged_batch(server: RunningServer, way: str) -> None:
    requests = [{"IN": floats(range(length))} for length in (3, 1, 5)]
    answers = at_once(server, f"ragged_{way}", requests)
    assert batches(server, f"ragged_{way}") == {3: 1}
    assert metric(server, "nv_inference_count", f"ragged_{way}") == 3
    assert [answer["SUM"] for answer in answers] == [[[3.0]], [[0.0]], [[10.0]]]
    assert [answer["DOUBLED"] for answer in answers] == [(request["IN"] * 2).tolist() for request in requests]
    # The count, the longest of the batch, the shape without the rows, and the same again.
    assert [answer["SEEN"] for answer in answers] == [[[3, 5, 3, 3]], [[1, 5, 1, 1]], [[5, 5, 5, 5]]]


def test_a_batch_of_one_request_is_ragged_too(server: RunningServer) -> None:
    assert infer(server, "ragged_alone", IN=floats([1, 2])) == {
        "SUM": [[3]],
        "DOUBLED": [[2, 4]],
        "SEEN": [[2, 2, 2, 2]],
    }


def test_a_step_of_an_ensemble_may_be_ragged(server: RunningServer) -> None:
    assert infer(server, "joined", IN=floats([1, 2])) == {"OUT": [[2, 4]]}
    note = "parameter 'PADDING' has no effect on batches: an ensemble's steps form the batches"
    assert server.log.count(note) == 1


def test_python_models_get_the_requests_of_a_ragged_batch_one_by_one(server: RunningServer) -> None:
    requests = [{"IN": floats(range(length))} for length in (3, 5)]
    assert [answer["OUT"] for answer in at_once(server, "python_ragged", requests)] == [[[2, 1, 3]], [[2, 1, 5]]]
    for name in ("PADDING", "BATCH_SIZES"):
        note = f"parameter '{name}' has no effect on batches: a python model takes the requests one by one"
        assert server.log.count(note) == 1


def masked(length: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 1000, (1, length))
    return {"IDS": ids, "MASK": rng.integers(0, 2, (1, length)).astype(np.float32)}


@pytest.mark.parametrize("model", ["padded_thread", "padded_process", "short_thread", "short_process"])
def test_padded_requests_are_answered_as_each_of_them_alone(server: RunningServer, model: str) -> None:
    rng = random.Random(4)
    for round_number in range(5):
        lengths = [rng.randint(1, 16) for _ in range(4)]
        requests = [masked(length, seed=number) for number, length in enumerate(lengths)]
        answers = at_once(server, model, requests)
        assert batches(server, model) == {4: round_number + 1}
        bucket = next(bucket for bucket in (4, 8, 16) if bucket >= max(lengths))
        assert [answer.pop("SEEN") for answer in answers] == [[[length, bucket]] for length in lengths]
        alone = [infer(server, "padded_alone", **request) for request in requests]
        for answer in alone:
            del answer["SEEN"]
        assert answers == alone
        assert [len(answer["SCORES"][0]) for answer in answers] == lengths


def test_rows_of_a_request_are_as_long_as_the_request(server: RunningServer) -> None:
    answer = infer(server, "padded_alone", IDS=np.array([[1, 2, 3], [4, 5, 6]]), MASK=floats([1, 1, 1], [1, 1, 0]))
    assert answer == {
        "SCORES": [[2, 4, 6], [8, 10, 0]],
        "MEAN": [[4], [6]],
        "SEEN": [[3, 4], [3, 4]],
    }


def test_a_request_longer_than_every_bucket_is_refused(server: RunningServer) -> None:
    with pytest.raises(InferenceServerException) as caught:
        infer(server, "padded_alone", **masked(17, seed=1))
    assert caught.value.status() == "400"
    assert caught.value.message() == (
        "[request id: <id_unknown>] input 'IDS' for model 'padded_alone' has length 17 in dimension 1, its padding "
        "takes at most 16"
    )


@pytest.mark.parametrize("way", WAYS, ids="by {}".format)
def test_statistics_count_the_rows_that_requests_sent(server: RunningServer, way: str) -> None:
    requests = [{"IN": floats([number, number])} for number in range(3)]
    answers = at_once(server, f"sized_{way}", requests)
    assert answers == [{"DOUBLED": [[2 * number, 2 * number]], "SEEN": [[4]]} for number in range(3)]
    assert batches(server, f"sized_{way}") == {3: 1}
    assert metric(server, "nv_inference_count", f"sized_{way}") == 3


WRONG = {
    "is not JSON": ('string_value: "[', 'string_value: "'),
    "input 'QUERY' is not an input of the model": (r"\"IDS\"", r"\"QUERY\""),
    "allowed inputs are: IDS": (r"\"LENGTHS\"", r"\"SIZES\""),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_model_with_a_wrong_padding_is_not_loaded(server: RunningServer, models: Path, text: str) -> None:
    name = f"wrong_{list(WRONG).index(text)}"
    add_padded(models, name, config=PADDED.replace(*WRONG[text]))
    status, error = load(server, name)
    assert status != 200
    assert text in error
