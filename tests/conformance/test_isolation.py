"""Backends other than python in worker processes: the same answers, and streams from decoupled ones."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.calls import load
from support.plugin import PLAIN_BACKEND, install_backend
from support.server import RunningServer, serving

REPEAT = (
    '''
"""Sends one answer for each element of the input, from a thread, and then the final flag."""
import threading

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.tensor import tensor_from_array

'''
    + PLAIN_BACKEND
    + """
class RepeatBackend(PlainBackend):
    def load(self, config, source):
        return Model(config)


class Model:
    def __init__(self, config):
        self.datatype = config.output[0].data_type

    def create_instance(self, placement):
        return self

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request,)).start()

    def answer(self, request):
        elements = request.inputs["IN"].array()
        for at in range(len(elements)):
            if elements[at] < 0:
                request.fail(InferenceError(ErrorCode.INVALID_ARG, f"element {at} is negative"))
                return
            request.respond(
                [tensor_from_array("OUT", self.datatype, elements[at : at + 1])],
                final=False,
                parameters={"index": at},
            )
        request.respond([], final=True)

    def close(self):
        pass
"""
)

CONFIG = """
backend: "repeat"
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_INT32 dims: 1 }}
model_transaction_policy {{ decoupled: true }}
{parameters}
"""
PROCESS = 'parameters { key: "ISOLATION" value { string_value: "process" } }'


LOSES_ITS_DEVICE = (
    """
import os

from halimede.backends.api import LostInstanceError
from halimede.core.types import ErrorCode

"""
    + PLAIN_BACKEND
    + """
class LosingBackend(PlainBackend):
    def load(self, config, source):
        return self

    def create_instance(self, placement):
        return self

    def run(self, inputs, outputs, context):
        if inputs["IN"][0] < 0:
            raise LostInstanceError(ErrorCode.INTERNAL, "the device is lost")
        return {"OUT": inputs["IN"] * 0 + os.getpid()}

    def close(self):
        pass
"""
)


MODELS = {
    "streams": CONFIG.format(parameters=PROCESS),
    "threads": CONFIG.format(parameters=""),
    "losing": CONFIG.replace("repeat", "losing")
    .replace("model_transaction_policy {{ decoupled: true }}", "")
    .format(parameters=PROCESS),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("isolation")
    install_backend(folder, "repeat", REPEAT, "RepeatBackend")
    environment = install_backend(folder, "losing", LOSES_ITS_DEVICE, "LosingBackend")
    for name, config in MODELS.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "config.pbtxt").write_text(config)
    arguments = ["--model-repository", folder / "models", "--model-control-mode=explicit"]
    with serving(
        folder, [*arguments, "--load-model=streams", "--load-model=losing"], environment=environment
    ) as running:
        yield running


def stream(address: str, model: str, *requests: list[int]) -> list[object]:
    """The answers: a value, an error's text, or None for the end of a request."""
    came: queue.Queue[object] = queue.Queue()
    answers: list[object] = []
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: came.put(error if error is not None else result))
        for values in requests:
            tensor = grpcclient.InferInput("IN", [len(values)], "INT32")
            tensor.set_data_from_numpy(np.array(values, np.int32))
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            while True:
                one = came.get(timeout=20)
                if isinstance(one, Exception):
                    answers.append(str(one))
                    break
                if one.get_response().parameters["triton_final_response"].bool_param:
                    answers.append(None)
                    break
                answers.append((int(one.as_numpy("OUT")[0]), one.get_response().parameters["index"].int64_param))
        client.stop_stream()
    return answers


def test_a_decoupled_backend_streams_from_a_worker_process(server: RunningServer) -> None:
    assert stream(server.grpc_url, "streams", [7, 8, 9], [], [1, -1, 2]) == [
        *[(7, 0), (8, 1), (9, 2), None],
        None,
        *[(1, 0), "element 1 is negative"],
    ]


def test_a_decoupled_model_on_threads_is_refused_with_the_fix(server: RunningServer) -> None:
    reason = load(server, "threads")[1]
    assert "decoupled models run in processes of their own; set parameter 'ISOLATION' to 'process'" in reason


def test_an_instance_that_is_lost_gets_a_new_process(server: RunningServer) -> None:
    def ask(value: int) -> tuple[int, Any]:
        body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]}
        answer = server.post("/v2/models/losing/infer", body)
        return answer.status, answer.json["outputs"][0]["data"][0] if answer.status == 200 else answer.error

    (first, before), lost = ask(1), ask(-1)
    assert (first, lost) == (200, (500, "the device is lost"))
    (second, after) = ask(1)
    assert (second, after != before) == (200, True)
    assert "the device is lost" in server.log
