"""Outputs of python models that differ from the configuration, for every kind of answer and of call."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from support.calling import CALLS
from support.ensemble_models import Tensors, add_ensemble, chain
from support.served import Stage, add_python, body, parameter
from support.server import RunningServer, serving

MADE = """
def made(request):
    array, name = {
        0: (np.ones((1, 2), np.int32), "OUT"),
        1: (np.ones((1, 2), np.int64), "OUT"),
        2: (np.ones((1, 1, 2), np.int32), "OUT"),
        3: (np.ones((3, 2), np.int32), "OUT"),
        4: (np.ones((1, 2), np.int32), "OTU"),
    }[int(value(request))]
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])
"""
RETURNED = "return [made(request) for request in requests]"
SENT = """
for request in requests:
    request.get_response_sender().send(made(request), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLED = """
answers = []
for request in requests:
    called = ask("returned", tensor(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy())).exec()
    answers.append(pb_utils.InferenceResponse(called.output_tensors(), error=called.error()))
return answers
"""
STRICT = parameter("STRICT_OUTPUTS", "true")

ORDINARY = ("returned", "sent", "called", "piped")

RIGHT = ("INT32", [1, 2])
DIFFERENT = {1: ("INT64", [1, 2]), 2: ("INT32", [1, 1, 2]), 3: ("INT32", [3, 2])}
WHY = {
    1: "output 'OUT': the model sent INT64, but the configuration says TYPE_INT32",
    2: "output 'OUT': the model sent shape [1,1,2], but the configuration says [-1,2]",
    3: "output 'OUT': the model sent shape [3,2] for a request of 1 rows; its first dimension must be 1",
    4: "unexpected inference output 'OTU'; the model has OUT",
}


def add(repository: Path, name: str, execute: str, **how: object) -> None:
    add_python(repository, name, execute, head=CALLS + MADE, **how)
    config = repository / name / "config.pbtxt"
    text = config.read_text()
    config.write_text(
        text.replace('"OUT" data_type: TYPE_FP32 dims: [ -1 ]', '"OUT" data_type: TYPE_INT32 dims: [ 2 ]')
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("outputs") / "models"
    models.mkdir()
    add(models, "returned", RETURNED, count=2)
    add(models, "sent", SENT)
    add(models, "many", SENT, decoupled=True)
    add(models, "called", CALLED)
    add(models, "s_returned", RETURNED, extra=STRICT)
    add(models, "s_sent", SENT, extra=STRICT)
    add(models, "s_many", SENT, decoupled=True, extra=STRICT)
    takes = "return [pb_utils.InferenceResponse([pb_utils.Tensor('OUT', np.ones((1, 2), np.int32))]) for _ in requests]"
    add_python(models, "takes", takes, datatype="INT32", dims="2")
    ends = {"inputs": Tensors(dims="1"), "outputs": Tensors(["OUT"], "INT32", "2")}
    add_ensemble(models, "piped", chain("returned"), **ends)
    add_ensemble(models, "onward", chain("returned", "takes"), **ends)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models]) as running:
        yield running


def asked(server: RunningServer, model: str, number: int) -> object:
    """Datatype and shape of OUT, None without it, or the error's status and text."""
    answer = server.post(f"/v2/models/{model}/infer", body(number))
    if answer.status != 200:
        return answer.status, answer.error
    outputs = answer.json["outputs"]
    return (outputs[0]["datatype"], outputs[0]["shape"]) if outputs else None


def streamed(server: RunningServer, model: str, number: int) -> object:
    """The same for a decoupled model's one answer."""
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), number, np.float32))
    answers: list[object] = []

    def take(result: triton.InferResult, error: InferenceServerException | None) -> None:
        outputs = result.get_response().outputs if error is None else ()
        if error is not None:
            answers.append(error.message())
        else:
            answers.append((outputs[0].datatype, list(outputs[0].shape)) if outputs else None)

    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(take)
        client.async_stream_infer(model, [tensor])
        client.stop_stream()
    (answer,) = answers
    return answer


@pytest.mark.parametrize("model", ORDINARY)
def test_an_output_that_differs_is_sent_unchanged(server: RunningServer, model: str) -> None:
    assert asked(server, model, 0) == RIGHT
    assert {number: asked(server, model, number) for number in DIFFERENT} == DIFFERENT
    assert asked(server, model, 4) is None


def test_a_decoupled_output_that_differs_is_sent_unchanged(server: RunningServer) -> None:
    assert streamed(server, "many", 0) == RIGHT
    # An answer of a decoupled model may have any number of rows.
    assert {number: streamed(server, "many", number) for number in DIFFERENT} == DIFFERENT


@pytest.mark.parametrize("model", ["s_returned", "s_sent"])
def test_strict_outputs_refuse_an_output_that_differs(server: RunningServer, model: str) -> None:
    assert asked(server, model, 0) == RIGHT
    assert {number: asked(server, model, number) for number in WHY} == {
        number: (500, why) for number, why in WHY.items()
    }


def test_strict_outputs_of_a_decoupled_model(server: RunningServer) -> None:
    assert streamed(server, "s_many", 0) == RIGHT
    assert {number: streamed(server, "s_many", number) for number in (1, 2, 4)} == {n: WHY[n] for n in (1, 2, 4)}


def test_the_next_step_of_an_ensemble_checks_the_output(server: RunningServer) -> None:
    assert asked(server, "onward", 0) == RIGHT
    status, text = asked(server, "onward", 1)
    assert status == 400
    assert text.startswith("in ensemble 'onward', ")
    assert text.endswith("inference input 'IN' data-type is 'INT64', but model 'takes' expects 'INT32'")
    status, text = asked(server, "onward", 2)
    assert (status, "unexpected shape for input 'IN' for model 'takes'" in text) == (400, True)


def test_each_difference_has_one_warning_per_model(server: RunningServer) -> None:
    for number in WHY:
        for _ in range(4):
            asked(server, "sent", number)
            asked(server, "returned", number)
    lines = server.log.splitlines()
    for number in DIFFERENT:
        for model in ("sent", "returned"):
            warned = f"model '{model}': {WHY[number]}; it is sent unchanged"
            assert [line[0] for line in lines if warned in line] == ["W"], (model, number)
    assert 1 <= len([line for line in lines if line.startswith("W") and f"{WHY[4]}: it is left out" in line]) <= 5
    assert not [line for line in lines if "'s_returned': output" in line]


def test_strict_outputs_must_be_true_or_false(stage: Stage) -> None:
    stage.add("wrong", extra=parameter("STRICT_OUTPUTS", "maybe"))
    answer = stage.server.post("/v2/repository/models/wrong/load")
    assert answer.status == 500
    assert "parameter 'STRICT_OUTPUTS' is 'maybe'; it must be 'true' or 'false'" in answer.error
