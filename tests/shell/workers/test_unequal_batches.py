"""Unequal requests in one batch of a real ONNX model: each answer is that of the request alone."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from halimede.backends.api import ModelSource
from halimede.backends.identity import IdentityBackend
from halimede.backends.onnxruntime import OnnxRuntimeBackend
from halimede.core.config.defaults import apply_defaults
from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.config.read import read_config
from halimede.core.config.validate import validate
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, Placement, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.workers.instance import InstanceRunner
from support.models import save_onnx, write_config
from support.unequal_models import add_padded, add_ragged, add_sized

FP32, INT64, BYTES = DataType.FP32, DataType.INT64, DataType.BYTES
CPU = Placement("m_0", 0, "CPU")


@dataclass
class Item:
    request: InferenceRequest
    rows: int
    cancelled: bool = False


class Model:
    """An instance of the model in a directory of `repository`."""

    def __init__(self, repository: Path, name: str, config: ModelConfig | None = None) -> None:
        directory = repository / name
        if config is None:
            config = read_config("config.pbtxt", (directory / "config.pbtxt").read_text()).config
        config = apply_defaults(config, name, "model.onnx")
        assert validate(config) == ()
        source = ModelSource(name, 1, directory, directory / "1" / "model.onnx")
        instance = OnnxRuntimeBackend().load(config, source).create_instance(CPU)
        self.runner = InstanceRunner("m_0", config, instance)

    def run(self, *requests: list[Tensor]) -> list[dict[str, list] | InferenceError]:
        items = [Item(InferenceRequest("m", inputs=inputs), inputs[0].shape[0]) for inputs in requests]
        ran = self.runner.run(items)
        return [
            {each.name: each.array().tolist() for each in reply} if isinstance(reply, list) else reply
            for reply in ran.replies
        ]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    add_ragged(directory, "ragged")
    add_padded(directory, "padded")
    add_sized(directory, "sized")
    return directory


@pytest.fixture(scope="module")
def ragged(repository: Path) -> Model:
    return Model(repository, "ragged")


@pytest.fixture(scope="module")
def padded(repository: Path) -> Model:
    return Model(repository, "padded")


def floats(name: str, values: list[list[float]]) -> Tensor:
    return tensor_from_array(name, FP32, np.array(values, np.float32).reshape(len(values), -1))


def own_part(answers: list[dict[str, list]]) -> list[dict[str, list]]:
    """The answers without what the model saw of its batch."""
    return [{name: values for name, values in answer.items() if name != "SEEN"} for answer in answers]


LENGTHS = st.lists(st.integers(1, 16), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(LENGTHS)
def test_ragged_requests_are_answered_as_each_of_them_alone(ragged: Model, lengths: list[int]):
    requests = [[floats("IN", [list(range(at, at + length))])] for at, length in enumerate(lengths)]
    answers = ragged.run(*requests)
    assert own_part(answers) == own_part([ragged.run(request)[0] for request in requests])
    assert [answer["SEEN"] for answer in answers] == [[[each, max(lengths), each, each]] for each in lengths]


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.data())
def test_padded_requests_are_answered_as_each_of_them_alone(padded: Model, lengths: list[int], data):
    requests = []
    for length in lengths:
        rows = data.draw(st.integers(1, 2))
        ids = np.arange(rows * length).reshape(rows, length)
        requests.append([tensor_from_array("IDS", INT64, ids), floats("MASK", (ids % 3 > 0).tolist())])
    answers = padded.run(*requests)
    assert own_part(answers) == own_part([padded.run(request)[0] for request in requests])
    assert [len(answer["SCORES"][0]) for answer in answers] == lengths


def test_a_long_request_does_not_lengthen_the_rows_of_short_ones(padded: Model):
    def ids(length: int) -> list[Tensor]:
        shape = (1, length)
        return [Tensor("IDS", INT64, shape, bytes(8 * length)), Tensor("MASK", FP32, shape, bytes(4 * length))]

    lengths = [2, 1_000_000, *range(1, 7)]
    answers = padded.run(*map(ids, lengths))
    assert [answer["SEEN"] for answer in answers] == [[[length, max(length, 8)]] for length in lengths]
    assert [len(answer["SCORES"][0]) for answer in answers] == lengths


def test_a_ragged_string_that_is_no_text_fails_its_own_request_alone(tmp_path: Path):
    save_onnx(
        tmp_path / "texts" / "1" / "model.onnx",
        [helper.make_node("Identity", ["IN"], ["OUT"])],
        [("IN", "BYTES", ["S"])],
        [("OUT", "BYTES", ["S"])],
    )
    write_config(
        tmp_path / "texts",
        """
        backend: "onnxruntime"
        max_batch_size: 8
        input { name: "IN" data_type: TYPE_STRING dims: -1 allow_ragged_batch: true }
        output { name: "OUT" data_type: TYPE_STRING dims: -1 }
        batch_output { target_name: "OUT" source_input: "IN" }
        """,
    )
    requests = [
        [tensor_from_array("IN", BYTES, np.array([row], dtype=object))]
        for row in ([b"a", b"b", b"c"], [b"\xff", b"d"], [b"e"])
    ]
    first, second, third = Model(tmp_path, "texts").run(*requests)
    assert (first, third) == ({"OUT": [[b"a", b"b", b"c"]]}, {"OUT": [[b"e"]]})
    assert isinstance(second, InferenceError)
    assert (second.code, "is not UTF-8 text" in second.message) == (ErrorCode.INVALID_ARG, True)


@pytest.mark.parametrize(("requests", "seen"), [(1, 2), (2, 2), (3, 4), (5, 8), (8, 8)])
def test_the_model_gets_an_allowed_number_of_rows(repository: Path, requests: int, seen: int):
    answers = Model(repository, "sized").run(*([floats("IN", [[each, each]])] for each in range(requests)))
    assert answers == [{"DOUBLED": [[2 * each, 2 * each]], "SEEN": [[seen]]} for each in range(requests)]


def test_padded_rows_and_allowed_sizes_go_together(repository: Path):
    config = read_config("config.pbtxt", (repository / "padded" / "config.pbtxt").read_text()).config
    sizes = {"BATCH_SIZES": ModelParameter("4,8")}
    model = Model(repository, "padded", replace(config, parameters={**config.parameters, **sizes}))
    requests = [
        [tensor_from_array("IDS", INT64, np.ones((1, length), np.int64)), floats("MASK", [[1] * length])]
        for length in (2, 5)
    ]
    assert model.run(*requests) == [
        {"SCORES": [[2] * length], "MEAN": [[2]], "SEEN": [[length, 8]]} for length in (2, 5)
    ]


def test_a_backend_that_takes_requests_warns_of_settings_for_arrays(caplog: pytest.LogCaptureFixture):
    config = ModelConfig(name="m", backend="identity", parameters={"BATCH_SIZES": ModelParameter("1,4")})
    instance = IdentityBackend().load(config, ModelSource("m", 1, Path(), Path())).create_instance(CPU)
    InstanceRunner("m_0", config, instance)
    assert caplog.messages == [
        "instance 'm_0': parameter 'BATCH_SIZES' has no effect on batches: backend 'identity' takes the requests one by "
        "one"
    ]
