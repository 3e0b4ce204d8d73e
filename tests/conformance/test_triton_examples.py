"""Models of sequences as Triton's examples have them, with the clients of its examples.

The model of `simple_sequence` and `simple_dyna_sequence` adds up: the first request of a sequence sets the value, and
each later one adds to it. `countdown` and `later` ask for further executions, without a strategy in the configuration.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as aioclient
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from support.calls import metric
from support.models import write_config
from support.server import RunningServer, serving, wait_until

VALUES = [0, 11, 7, 5, 3, 2, 0, 1]
SUMS = np.cumsum(VALUES).tolist()

CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } ] }
  ]
  state [ { input_name: "INPUT_STATE" output_name: "OUTPUT_STATE" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
TENSORS = """
input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
OLDEST = "oldest { max_candidate_sequences: 4 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 100 }"
ADDING = {"simple_sequence": "", "simple_dyna_sequence": OLDEST, "defaults": "oldest { }"}

COUNTDOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.remaining = None

    def execute(self, requests):
        for request in requests:
            if self.remaining is None:
                self.remaining = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0]
            self.remaining -= 1
            sender = request.get_response_sender()
            output = pb_utils.Tensor("OUTPUT", np.array([self.remaining], np.int32))
            response = pb_utils.InferenceResponse([output])
            if self.remaining > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(response)
            else:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
                self.remaining = None
        return None
"""
LATER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.flags = []

    def execute(self, requests):
        responses = []
        for request in requests:
            self.flags.append(request.flags())
            if len(self.flags) < 3:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                output = pb_utils.Tensor("OUTPUT", np.array([int("".join(map(str, self.flags)))], np.int32))
                responses.append(pb_utils.InferenceResponse([output]))
                self.flags = []
        return responses
"""


CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        sums = [self.call(*place) for place in ((1, 1), (2, 0), (3, 2))]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([sums[-1]], np.int32))])

    def call(self, value, flags):
        response = pb_utils.InferenceRequest(
            model_name="simple_sequence",
            inputs=[pb_utils.Tensor("INPUT", np.array([[value]], np.int32))],
            requested_output_names=["OUTPUT"],
            correlation_id=4001,
            flags=flags,
        ).exec()
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "OUTPUT").as_numpy().item()
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("repository") / "models"
    for name, strategy in ADDING.items():
        config = (
            f'name: "{name}" platform: "onnxruntime_onnx" max_batch_size: 8 {TENSORS} '
            f"sequence_batching {{ max_sequence_idle_microseconds: 5000000 {strategy} {CONTROLS} }} "
            "instance_group [ { kind: KIND_CPU count: 1 } ]"
        )
        folder(
            models, name, config.replace("max_sequence_idle_microseconds: 5000000", "") if "{ }" in strategy else config
        )
        onnx.save(adding(), models / name / "1" / "model.onnx")
    state = '{ name: "OUTPUT_STATE" data_type: TYPE_INT32 dims: 1 }'
    for name, more in (("nobatch", ""), ("nobatch_output", f"output [ {state} ]")):
        batching = f"sequence_batching {{ {CONTROLS} }}"
        folder(models, name, f'platform: "onnxruntime_onnx" max_batch_size: 0 {TENSORS} {more} {batching}')
        onnx.save(adding([1]), models / name / "1" / "model.onnx")
    folder(models, "caller", f'backend: "python" {TENSORS}')
    (models / "caller" / "1" / "model.py").write_text(CALLER)
    iterative = "sequence_batching { iterative_sequence: true } instance_group [ { kind: KIND_CPU } ]"
    for name, code, policy in (
        ("countdown", COUNTDOWN, "model_transaction_policy { decoupled: true }"),
        ("countdown_direct", COUNTDOWN, "model_transaction_policy { decoupled: true }"),
        ("later", LATER, ""),
    ):
        config = f'name: "{name}" backend: "python" {TENSORS} {iterative} {policy}'
        if name == "countdown_direct":
            config = config.replace("true }", "true direct { max_queue_delay_microseconds: 10000000 } }", 1)
        folder(models, name, config)
        (models / name / "1" / "model.py").write_text(code)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models]) as running:
        yield running


def folder(models: Path, name: str, config: str) -> None:
    (models / name / "1").mkdir(parents=True)
    write_config(models / name, config)


def adding(shape: Sequence[int | str] = ("rows", 1)) -> onnx.ModelProto:
    names = ("INPUT", "INPUT_STATE", "START", "READY", "OUTPUT", "OUTPUT_STATE")
    tensors = [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in names]
    nodes = [
        helper.make_node("Cast", ["START"], ["starts"], to=TensorProto.BOOL),
        helper.make_node("Add", ["INPUT", "INPUT_STATE"], ["sum"]),
        helper.make_node("Where", ["starts", "INPUT", "sum"], ["OUTPUT_STATE"]),
        helper.make_node("Mul", ["OUTPUT_STATE", "READY"], ["OUTPUT"]),
    ]
    graph = helper.make_graph(nodes, "adding", tensors[:4], tensors[4:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def number(value: int, *, shape: tuple[int, ...] = (1, 1)) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput("INPUT", shape, "INT32")
    tensor.set_data_from_numpy(np.full(shape, value, np.int32))
    return tensor


def places() -> list[tuple[int, dict[str, bool]]]:
    """The values of a sequence, each with its flags."""
    return [(value, {"sequence_start": i == 0, "sequence_end": i == len(VALUES) - 1}) for i, value in enumerate(VALUES)]


@pytest.mark.parametrize("model", ADDING)
def test_two_sequences_add_up_over_http(server: RunningServer, model: str) -> None:
    def run(sequence: int | str, sign: int) -> list[int]:
        sums = []
        with httpclient.InferenceServerClient(server.http_url) as client:
            for value, flags in places():
                tensor = httpclient.InferInput("INPUT", [1, 1], "INT32")
                tensor.set_data_from_numpy(np.array([[sign * value]], np.int32))
                result = client.infer(model, [tensor], sequence_id=sequence, **flags)
                sums.append(int(result.as_numpy("OUTPUT")[0, 0]))
        return sums

    # tritonclient's HTTP client does not work in several threads, so the requests take turns.
    assert run(1001, 1) == SUMS
    assert run("1002", -1) == [-total for total in SUMS]


@pytest.mark.parametrize("model", ADDING)
def test_two_sequences_add_up_over_one_stream(server: RunningServer, model: str) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for value, flags in places():
            for sequence, sign in ((2001, 1), ("2002", -1)):
                tensor = number(sign * value)
                client.async_stream_infer(model, [tensor], request_id=str(sequence), sequence_id=sequence, **flags)
        found = [answers.get(timeout=30) for _ in range(2 * len(VALUES))]
        client.stop_stream()
    assert [error for _, error in found if error is not None] == []
    sums = {"2001": [], "2002": []}
    for result, _ in found:
        sums[result.get_response().id].append(int(result.as_numpy("OUTPUT")[0, 0]))
    assert sums == {"2001": SUMS, "2002": [-total for total in SUMS]}


def test_sequences_add_up_over_asyncio_streams(server: RunningServer) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for value, flags in places():
            yield {"model_name": "simple_sequence", "inputs": [number(value)], "sequence_id": 3001, **flags}

    async def run() -> list[int]:
        async with aioclient.InferenceServerClient(server.grpc_url) as client:
            return [int(result.as_numpy("OUTPUT")[0, 0]) async for result, _ in client.stream_infer(requests())]

    assert asyncio.run(run()) == SUMS


def test_null_rows_are_not_answered_and_count_only_in_batch_sizes(server: RunningServer) -> None:
    def formed() -> Counter[int]:
        [stats] = server.get("/v2/models/simple_sequence/stats").json["model_stats"]
        return Counter({each["batch_size"]: each["compute_infer"]["count"] for each in stats["batch_stats"]})

    before, formed_before = metric(server, "nv_inference_count", "simple_sequence"), formed()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def add(sequence: int, value: int, **flags: bool) -> int:
            result = client.infer("simple_sequence", [number(value)], sequence_id=sequence, **flags)
            return int(result.as_numpy("OUTPUT")[0, 0])

        # The first sequence has the first row, so the batches of the second one have a null row before it.
        assert add(1, 5, sequence_start=True) == 5
        assert [add(2, 1, sequence_start=True), add(2, 1), add(2, 1, sequence_end=True)] == [1, 2, 3]
        assert add(1, 5, sequence_end=True) == 10
    assert metric(server, "nv_inference_count", "simple_sequence") - before == 5
    assert formed() - formed_before == {1: 2, 2: 3}


def test_a_decoupled_model_is_executed_until_its_last_response(server: RunningServer) -> None:
    def run(count: int) -> list[tuple[int, bool]]:
        answers: SimpleQueue[Any] = SimpleQueue()
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("countdown", [number(count, shape=(1,))], enable_empty_final_response=True)
            found = []
            while not found or not found[-1][1]:
                result, error = answers.get(timeout=30)
                assert error is None, error
                final = result.get_response().parameters["triton_final_response"].bool_param
                found.append((int(result.as_numpy("OUTPUT")[0]), final))
            client.stop_stream()
        return found

    assert run(3) == [(2, False), (1, False), (0, True)]
    assert run(1) == [(0, True)]
    # An execution is counted when it ends, which is after its answers.
    wait_until(
        lambda: metric(server, "nv_inference_exec_count", "countdown") == 4, "the last execution to be counted", server
    )
    assert metric(server, "nv_inference_count", "countdown") == 2


def test_iterative_requests_wait_in_the_backlog(server: RunningServer) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for _ in range(4):
            client.async_stream_infer("countdown_direct", [number(2, shape=(1,))])
        found = [answers.get(timeout=30) for _ in range(8)]
        client.stop_stream()
    assert [error for _, error in found if error is not None] == []
    assert [int(result.as_numpy("OUTPUT")[0]) for result, _ in found] == [1, 0] * 4


def test_a_request_is_a_start_in_its_first_execution_alone(server: RunningServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for _ in range(2):
            # The flags of three executions: 1, 0 and 0.
            assert client.infer("later", [number(0, shape=(1,))]).as_numpy("OUTPUT").tolist() == [100]


def test_configurations_are_shown_with_tritons_defaults(server: RunningServer) -> None:
    def batching(model: str) -> dict[str, Any]:
        shown: dict[str, Any] = server.get(f"/v2/models/{model}/config").json
        assert "dynamic_batching" not in shown
        assert [each["name"] for each in server.get(f"/v2/models/{model}").json["inputs"]] == ["INPUT"]
        found: dict[str, Any] = shown["sequence_batching"]
        return found

    def strategy(candidates: int, sizes: list[int], delay: int) -> dict[str, Any]:
        return {
            "max_candidate_sequences": candidates,
            "preferred_batch_size": sizes,
            "max_queue_delay_microseconds": delay,
            "preserve_ordering": False,
        }

    direct, dyna, defaults = (batching(model) for model in ADDING)
    assert {"direct", "oldest"} & set(direct) == set()
    assert direct["max_sequence_idle_microseconds"] == 5_000_000
    assert dyna["oldest"] == strategy(4, [2, 4], 100)
    # Triton shows 0 candidates, and takes the maximum batch size.
    assert defaults["oldest"] == strategy(0, [8], 0)
    assert defaults["max_sequence_idle_microseconds"] == 1_000_000
    assert defaults["control_input"][0] == {
        "name": "START",
        "control": [
            {
                "kind": "CONTROL_SEQUENCE_START",
                "int32_false_true": [0, 1],
                "fp32_false_true": [],
                "bool_false_true": [],
                "data_type": "TYPE_INVALID",
            }
        ],
    }
    assert defaults["state"] == [
        {
            "input_name": "INPUT_STATE",
            "output_name": "OUTPUT_STATE",
            "data_type": "TYPE_INT32",
            "dims": [1],
            "initial_state": [],
            "use_same_buffer_for_input_output": False,
            "use_growable_memory": False,
        }
    ]
    assert batching("countdown") == {
        "max_sequence_idle_microseconds": 1_000_000,
        "control_input": [],
        "state": [],
        "iterative_sequence": True,
    }


def test_refused_requests_of_sequences_count_as_failures(server: RunningServer) -> None:
    def failures() -> float:
        return metric(server, "nv_inference_request_failure", "simple_sequence", 'reason="REJECTED",')

    before = failures()
    tensor = {"name": "INPUT", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    for parameters in ({}, {"sequence_id": 0, "sequence_start": True}, {"sequence_id": 99}):
        answer = server.post("/v2/models/simple_sequence/infer", {"inputs": [tensor], "parameters": parameters})
        assert answer.status == 400
    assert failures() - before == 3
    assert metric(server, "nv_inference_pending_request_count", "simple_sequence") == 0


def test_clients_see_a_state_only_if_it_is_an_output(server: RunningServer) -> None:
    def ask(model: str, value: int, *outputs: str, **flags: bool) -> dict[str, list[int]]:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            wanted = [grpcclient.InferRequestedOutput(name) for name in outputs]
            result = client.infer(model, [number(value, shape=(1,))], outputs=wanted, sequence_id=1, **flags)
            return {name: result.as_numpy(name).tolist() for name in outputs}

    with pytest.raises(InferenceServerException) as caught:
        ask("nobatch", 1, "OUTPUT_STATE", sequence_start=True)
    assert caught.value.message().startswith("unexpected inference output 'OUTPUT_STATE' for model")
    assert ask("nobatch", 1, "OUTPUT", sequence_start=True) == {"OUTPUT": [1]}
    assert ask("nobatch", 2, "OUTPUT", sequence_end=True) == {"OUTPUT": [3]}
    both = ("OUTPUT", "OUTPUT_STATE")
    assert ask("nobatch_output", 1, *both, sequence_start=True) == {"OUTPUT": [1], "OUTPUT_STATE": [1]}
    assert ask("nobatch_output", 2, *both, sequence_end=True) == {"OUTPUT": [3], "OUTPUT_STATE": [3]}


def test_a_model_calls_a_model_of_sequences(server: RunningServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        for _ in range(2):
            assert client.infer("caller", [number(0, shape=(1,))]).as_numpy("OUTPUT").tolist() == [6]


def test_many_sequences_at_once_keep_their_own_sums(server: RunningServer) -> None:
    def run(model: str, sequence: int) -> list[int]:
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            return [
                int(
                    client.infer(model, [number(sequence * value)], sequence_id=sequence, **flags).as_numpy("OUTPUT")[
                        0, 0
                    ]
                )
                for value, flags in places()
            ]

    for model in ADDING:
        # More sequences than places: some of them wait in the backlog.
        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(partial(run, model), range(1, 13))) == [
                [each * total for total in SUMS] for each in range(1, 13)
            ]
