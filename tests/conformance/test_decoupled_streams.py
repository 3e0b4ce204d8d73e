"""Decoupled python models over gRPC: streaming, backpressure, disconnected clients, models that never end."""

import os
import queue
import signal
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from support.calls import DECOUPLED_OVER_HTTP, canceled, executing, index, unload
from support.h2client import STREAM_INFER, H2Client, grpc_message
from support.models import write_config
from support.server import RunningServer, start_server, wait_until

MODEL = """
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    # IN is [answers, elements of each, whether the last one is followed by the end, milliseconds between answers].

    def execute(self, requests):
        for request in requests:
            count, elements, ends, pause_ms = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            arguments = request.get_response_sender(), int(count), int(elements), bool(ends), pause_ms / 1000
            threading.Thread(target=self.send, args=arguments, daemon=True).start()

    def send(self, sender, count, elements, ends, pause_secs):
        for number in range(count):
            if sender.is_cancelled():
                break
            output = pb_utils.Tensor("OUT", np.full(elements, number, np.int32))
            sender.send(pb_utils.InferenceResponse([output], parameters={"number": number, "pid": os.getpid()}))
            time.sleep(pause_secs)
        if ends:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

LIMITLESS = """
from halimede.workers.child import requests as open_requests

open_requests.WINDOW_RESPONSES = open_requests.WINDOW_BYTES = 1 << 60
"""
"""A model that disables backpressure."""

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: 4 }
output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    for name in ("repeat", "greedy", "gone", "pushing"):
        write_config(models / name, CONFIG)
        (models / name / "1").mkdir()
        (models / name / "1" / "model.py").write_text(MODEL)
    (models / "pushing" / "1" / "model.py").write_text(LIMITLESS + MODEL)
    write_config(models / "fixed", CONFIG.replace("python", "identity").replace("INT32", "FP32"))
    (models / "fixed" / "1").mkdir()
    explicit = [
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in ("repeat", "greedy", "gone", "pushing")),
    ]
    running = start_server(tmp_path_factory.mktemp("log"), ["--model-repository", models, *explicit])
    yield running
    assert running.stop() == 0, running.log


class Stream:
    """A stream of tritonclient, with one method to read the next answer."""

    def __init__(self, server: RunningServer) -> None:
        self.client = triton.InferenceServerClient(server.grpc_url)
        self._answers: queue.Queue[tuple[triton.InferResult | None, InferenceServerException | None]] = queue.Queue()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)))

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def ask(self, *numbers: int, model: str = "repeat", request_id: str = "", wants_end: bool = False) -> None:
        self.client.async_stream_infer(
            model, [tensor(*numbers)], request_id=request_id, enable_empty_final_response=wants_end
        )

    def next(self) -> triton.InferResult:
        result, error = self._answers.get(timeout=20)
        assert error is None, error
        return result

    def failure(self) -> str:
        """The next error; skips answers before it."""
        error = None
        while error is None:
            _, error = self._answers.get(timeout=20)
        return str(error.message())


def tensor(count: int, elements: int = 1, ends: int = 1, pause_ms: int = 0) -> triton.InferInput:
    made = triton.InferInput("IN", [4], "INT32")
    made.set_data_from_numpy(np.array([count, elements, ends, pause_ms], np.int32))
    return made


def request(count: int, elements: int, model: str) -> bytes:
    message = pb.ModelInferRequest(
        model_name=model, raw_input_contents=[np.array([count, elements, 1, 0], np.int32).tobytes()]
    )
    message.inputs.add(name="IN", datatype="INT32", shape=[4])
    return message.SerializeToString()


def figures(server: RunningServer, model: str) -> dict:
    return server.get(f"/v2/models/{model}/stats").json["model_stats"][0]


def idle(server: RunningServer, model: str) -> None:
    wait_until(lambda: executing(server, model) == 0, f"'{model}' to have nothing to do", server)


def test_answers_have_order_and_parameters_and_a_final_one_on_request(server: RunningServer) -> None:
    with Stream(server) as stream:
        stream.ask(100, request_id="many", wants_end=True)
        for number in range(100):
            result = stream.next()
            response = result.get_response()
            assert (response.id, result.as_numpy("OUT").tolist()) == ("many", [number])
            assert response.parameters["number"].int64_param == number
            assert not response.parameters["triton_final_response"].bool_param
        end = stream.next().get_response()
        assert (end.id, len(end.outputs), end.parameters["triton_final_response"].bool_param) == ("many", 0, True)

        stream.ask(0, request_id="nothing")
        stream.ask(1, request_id="one")
        assert stream.next().get_response().id == "one"
    idle(server, "repeat")


def test_answers_of_several_requests_arrive_when_they_are_sent(server: RunningServer) -> None:
    with Stream(server) as stream:
        stream.ask(3, 1, 1, 150, request_id="slow")
        assert stream.next().get_response().id == "slow"
        stream.ask(2, request_id="fast")
        ids = [stream.next().get_response().id for _ in range(4)]
        assert ids.count("fast") == 2
        assert ids.index("fast") < 2


def test_statistics_are_kept_by_answer_index(server: RunningServer) -> None:
    before = figures(server, "repeat")
    with Stream(server) as stream:
        stream.ask(2, wants_end=True)
        while not stream.next().get_response().parameters["triton_final_response"].bool_param:
            pass
        after = figures(server, "repeat")

        def grown(at: str, kind: str) -> int:
            zero = {kind: {"count": 0}}
            was, now = (each["response_stats"].get(at, zero)[kind]["count"] for each in (before, after))
            return now - was

        assert [grown(at, "success") for at in "012"] == [1, 1, 0]
        assert [grown(at, "empty_response") for at in "012"] == [0, 0, 1]
        assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
        over_grpc = stream.client.get_inference_statistics("repeat", as_json=True)["model_stats"][0]
        assert over_grpc["response_stats"]["0"]["success"]["count"] == str(
            after["response_stats"]["0"]["success"]["count"]
        )


def test_unary_inference_of_a_decoupled_model_is_refused(server: RunningServer) -> None:
    over_http = triton_http.InferInput("IN", [4], "INT32")
    over_http.set_data_from_numpy(np.array([1, 1, 1, 0], np.int32))
    with (
        triton_http.InferenceServerClient(server.http_url) as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer("repeat", [over_http])
    assert refused.value.message() == DECOUPLED_OVER_HTTP
    with triton.InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException) as refused:
        client.infer("repeat", [tensor(1)])
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_decoupled_model_whose_instances_are_threads_is_refused(server: RunningServer) -> None:
    answer = server.post("/v2/repository/models/fixed/load")
    assert "decoupled models run in processes of their own" in answer.error


def test_a_model_waits_for_a_client_that_does_not_read(server: RunningServer) -> None:
    """Answers of 1 MiB: the model is blocked after its window of 8 and the buffers of the connection."""
    with H2Client(("127.0.0.1", server.grpc_port), is_greedy=False) as client:
        client.send(client.head(STREAM_INFER)[1])
        stream = 1
        client.send_data(stream, grpc_message(request(100, 256 << 10, "greedy")))
        wait_until(lambda: len(figures(server, "greedy")["response_stats"]) >= 8, "the window to be full", server)

        # Other requests are served meanwhile; after them, a model without backpressure would have sent more.
        with Stream(server) as other:
            for _ in range(20):
                other.ask(20, wants_end=True)
                while not other.next().get_response().parameters["triton_final_response"].bool_param:
                    pass
        assert len(figures(server, "greedy")["response_stats"]) < 20
        assert executing(server, "greedy") == 1
    idle(server, "greedy")


def test_a_worker_that_does_not_wait_for_its_client_is_replaced(server: RunningServer) -> None:
    with H2Client(("127.0.0.1", server.grpc_port), is_greedy=False) as client:
        client.send(client.head(STREAM_INFER)[1])
        client.send_data(1, grpc_message(request(1_000, 256 << 10, "pushing")))
        wait_until(lambda: "33 answers of one request while its client has taken none" in server.log, "its end", server)
    with Stream(server) as stream:
        stream.ask(3, model="pushing")
        assert int(stream.next().as_numpy("OUT")[0]) == 0


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    """Goal: the model sees it within 100 ms. Each of the clients disconnects at a different point."""
    before = canceled(server, "repeat")
    for read in range(10):
        with Stream(server) as stream:
            stream.ask(100_000, 1, 1, 1)
            for _ in range(read):
                stream.next()
            if not read:
                wait_until(lambda: executing(server, "repeat") == 1, "the request to run", server)
    idle(server, "repeat")
    assert canceled(server, "repeat") == before + 10
    with Stream(server) as stream:
        stream.ask(1)
        stream.next()


def test_a_stream_without_final_answer_is_open_until_its_client_leaves(server: RunningServer) -> None:
    rpc = grpc.insecure_channel(server.grpc_url)
    with rpc:
        never = pb.ModelInferRequest(model_name="gone", raw_input_contents=[np.array([1, 1, 0, 0], np.int32).tobytes()])
        never.inputs.add(name="IN", datatype="INT32", shape=[4])
        call = rpc.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )(iter([never]))
        assert next(call).infer_response.parameters["number"].int64_param == 0
        # The client has half-closed; no further answer arrives, and the stream stays open.
        ended = threading.Event()
        call.add_callback(ended.set)
        assert not ended.wait(0.5)
        assert executing(server, "gone") == 1
        call.cancel()
    idle(server, "gone")
    assert unload(server, "gone") == 200
    wait_until(lambda: index(server)["gone", "1"] == ("UNAVAILABLE", "unloaded"), "the model to be unloaded", server)


def test_a_worker_that_dies_ends_the_streams_that_it_served(server: RunningServer) -> None:
    with Stream(server) as stream:
        stream.ask(100_000, 1, 1, 1)
        pid = stream.next().get_response().parameters["pid"].int64_param
        os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        error = stream.failure()
        # Goal: 50 ms after the death.
        assert time.monotonic() - begun < 2
        assert "Stub process 'repeat_0_0' is not healthy." in error
        stream.ask(1, request_id="again")
        assert stream.next().get_response().id == "again"
