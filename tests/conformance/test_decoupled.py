"""Decoupled models, and clients that disconnect or do not read during their answers."""

import json
import queue
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calling import COUNT, COUNT_METHODS
from support.calls import DECOUPLED_OVER_HTTP, canceled, executing, metric
from support.h2client import STREAM_INFER, H2Client, grpc_message
from support.latency import LOOSE_MS, median_ms, quickest_ms
from support.processes import resident_bytes
from support.served import ECHO, Stage, body, infer, workers
from support.server import RunningServer, wait_until


def deploy(stage: Stage, name: str, execute: str = COUNT, methods: str = COUNT_METHODS, **how: object) -> None:
    stage.deploy(name, execute, methods=methods, decoupled=True, max_batch_size=0, **how)


class Stream:
    """A stream of tritonclient, with one method to read the next answer."""

    def __init__(self, client: grpcclient.InferenceServerClient) -> None:
        self.client = client
        self.answers: queue.Queue[tuple[grpcclient.InferResult, InferenceServerException | None]] = queue.Queue()
        client.start_stream(lambda result, error: self.answers.put((result, error)))

    def ask(self, model: str, *numbers: float, request_id: str = "", with_final: bool = False) -> None:
        tensor = grpcclient.InferInput("IN", [len(numbers)], "FP32")
        tensor.set_data_from_numpy(np.array(numbers, np.float32))
        self.client.async_stream_infer(model, [tensor], request_id=request_id, enable_empty_final_response=with_final)

    def next(self) -> object:
        """The numbers of the next answer, "final" for an empty one that ends its request, or the text of an error."""
        result, error = self.answers.get(timeout=30)
        if error is not None:
            return error.message()
        response = result.get_response()
        if not response.outputs:
            assert response.parameters["triton_final_response"].bool_param
            return "final"
        return result.as_numpy("OUT").tolist()


@contextmanager
def streaming(server: RunningServer) -> Iterator[Stream]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        yield Stream(client)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_answers_of_a_model_arrive_and_then_the_final_one(stage: Stage, count: int) -> None:
    deploy(stage, "repeat")
    with streaming(stage.server) as stream:
        stream.ask("repeat", count, 0, with_final=True)
        assert [stream.next() for _ in range(count + 1)] == [*([float(n)] for n in range(count)), "final"]
        # Without the flag the client gets no empty final answer.
        stream.ask("repeat", count, 0)
        assert [stream.next() for _ in range(count)] == [[float(n)] for n in range(count)]
        wait_until(lambda: executing(stage.server, "repeat") == 0, "its end", stage.server, 10)
        stream.ask("repeat", 1, 0, with_final=True)
        assert [stream.next() for _ in range(2)] == [[0], "final"]


def test_answers_carry_parameters_and_whether_they_are_the_last(stage: Stage) -> None:
    deploy(stage, "repeat")
    with streaming(stage.server) as stream:
        stream.ask("repeat", 2, 0, request_id="a", with_final=True)
        responses = [stream.answers.get(timeout=30)[0].get_response() for _ in range(3)]
    assert [response.id for response in responses] == ["a"] * 3
    assert [response.parameters["number"].int64_param for response in responses[:2]] == [0, 1]
    assert [response.parameters["triton_final_response"].bool_param for response in responses] == [False, False, True]


def test_answers_of_parallel_requests_arrive_in_order_for_each(stage: Stage) -> None:
    deploy(stage, "repeat", count=2)
    with streaming(stage.server) as stream:
        for number in range(20):
            stream.ask("repeat", 10, 0.001, request_id=str(number))
        seen: dict[str, list[float]] = {}
        for _ in range(200):
            result, error = stream.answers.get(timeout=30)
            assert error is None
            seen.setdefault(result.get_response().id, []).append(float(result.as_numpy("OUT")[0]))
    assert seen == {str(number): [float(n) for n in range(10)] for number in range(20)}
    wait_until(lambda: executing(stage.server, "repeat") == 0, "the end of all requests", stage.server, 10)


def test_answers_of_several_requests_arrive_when_they_are_sent(stage: Stage) -> None:
    deploy(stage, "repeat")
    with streaming(stage.server) as stream:
        stream.ask("repeat", 3, 0.15, request_id="slow")
        assert stream.next() == [0]
        stream.ask("repeat", 2, 0, request_id="fast")
        ids = [stream.answers.get(timeout=30)[0].get_response().id for _ in range(4)]
    assert set(ids[:2]) == {"fast"}


def test_an_error_is_an_answer_among_others(stage: Stage) -> None:
    methods = """
        def count(self, sender, count, pause):
            tensor = pb_utils.Tensor("OUT", np.ones(1, np.float32))
            sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(pb_utils.InferenceResponse([], error=pb_utils.TritonError("not this one")))
            sender.send(pb_utils.InferenceResponse([tensor]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
    deploy(stage, "among", methods=methods)
    with streaming(stage.server) as stream:
        stream.ask("among", 0, 0)
        assert [stream.next() for _ in range(3)] == [[1], "not this one", [1]]
    assert metric(stage.server, "nv_inference_request_success", "among") == 0


def test_statistics_have_each_answer_by_its_index(stage: Stage) -> None:
    deploy(stage, "repeat")
    with streaming(stage.server) as stream:
        for count in (0, 1, 3):
            stream.ask("repeat", count, 0, with_final=True)
            for _ in range(count + 1):
                stream.next()
        [stats] = stage.server.get("/v2/models/repeat/stats").json["model_stats"]
    counts = {
        key: (
            value["success"]["count"],
            value["fail"]["count"],
            value["empty_response"]["count"],
            value["cancel"]["count"],
        )
        for key, value in stats["response_stats"].items()
    }
    assert counts == {"0": (2, 0, 1, 0), "1": (1, 0, 1, 0), "2": (1, 0, 0, 0), "3": (0, 0, 1, 0)}
    assert stats["inference_stats"]["success"]["count"] == 3


def test_an_exception_ends_the_open_requests_of_its_batch(stage: Stage) -> None:
    execute = """
        for request in requests:
            sender = request.get_response_sender()
            sender.send(answer(request))
        raise ValueError("boom")
        """
    deploy(stage, "raising", execute)
    with streaming(stage.server) as stream:
        stream.ask("raising", 5)
        assert stream.next() == [5]
        assert "ValueError: boom" in str(stream.next())
    wait_until(lambda: executing(stage.server, "raising") == 0, "its end", stage.server, 10)


def test_unary_calls_to_a_decoupled_model_are_refused(stage: Stage) -> None:
    deploy(stage, "repeat")
    status, text = infer(stage.server, "repeat", 1, 0)
    assert (status, text) == (501, DECOUPLED_OVER_HTTP)
    with grpcclient.InferenceServerClient(stage.server.grpc_url) as client:
        tensor = grpcclient.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(np.ones(2, np.float32))
        with pytest.raises(
            InferenceServerException, match="ModelInfer RPC doesn't support models with decoupled"
        ) as caught:
            client.infer("repeat", [tensor])
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_an_answer_after_the_final_one_is_refused_and_dropped(stage: Stage) -> None:
    methods = """
        def count(self, sender, count, pause):
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            for _ in range(2):
                try:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]))
                    note("sent")
                except pb_utils.TritonModelException as error:
                    note(error)
        """
    deploy(stage, "after", methods=methods)
    with streaming(stage.server) as stream:
        stream.ask("after", 0, 0, with_final=True)
        assert stream.next() == "final"
        stream.ask("after", 0, 0, with_final=True)
        assert stream.next() == "final"
        wait_until(lambda: len(stage.notes("after")) == 4, "the sends", stage.server, 10)
    assert set(stage.notes("after")) == {"Unable to send response. Response sender has been closed."}


def test_a_request_without_final_answer_is_open_until_its_client_leaves(stage: Stage) -> None:
    methods = """
        def count(self, sender, count, pause):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.ones(1, np.float32))]))
            self.kept = getattr(self, "kept", []) + [sender]
        """
    server = stage.server
    deploy(stage, "endless", methods=methods)
    with streaming(server) as stream:
        for _ in range(3):
            stream.ask("endless", 0, 0, with_final=True)
            assert stream.next() == [1]
        assert executing(server, "endless") == 3
        assert infer(server, "bystander", 3) == (200, [3])
        stream.client.stop_stream(cancel_requests=True)
    wait_until(lambda: executing(server, "endless") == 0, "the requests to be dropped", server, 10)
    assert canceled(server, "endless") == 3


def test_a_death_ends_every_open_request_once(stage: Stage) -> None:
    server = stage.server
    deploy(stage, "dying")
    with streaming(server) as stream:
        for _ in range(3):
            stream.ask("dying", 1000, 0.05)
        begun = 0
        while begun < 3:
            begun += stream.next() == [0]
        workers(server, "dying")[0].kill()
        texts = []
        while len(texts) < 3:
            if isinstance(answer := stream.next(), str):
                texts.append(answer)
        assert all("Stub process 'dying_0_0' is not healthy. It ended by signal 9." in text for text in texts), texts
        stream.ask("dying", 1, 0, with_final=True)
        assert [stream.next(), stream.next()] == [[0], "final"]


# Clients that disconnect.

WATCHING = f"""
if value(requests[0]) < 0:
    note("running")
    end = time.monotonic() + 30
    while not requests[0].is_cancelled():
        if time.monotonic() > end: raise RuntimeError("no client left")
        time.sleep(0.005)
    note(time.monotonic())
    raise pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
{ECHO}
"""


def asking_over_http(server: RunningServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.http_port))
    document = json.dumps(body(-1))
    head = f"POST /v2/models/watch/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(document)}\r\n\r\n"
    connection.sendall((head + document).encode())
    return connection


def leave_by_close(server: RunningServer) -> Callable[[], object]:
    return asking_over_http(server).close


def leave_by_reset(server: RunningServer) -> Callable[[], object]:
    connection = asking_over_http(server)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return connection.close


def request() -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="watch", raw_input_contents=[struct.pack("<f", -1)])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    return message


def leave_by_cancel(channel: grpc.Channel) -> Callable[[], object]:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(request(), timeout=60).cancel


def leave_by_stream(channel: grpc.Channel) -> Callable[[], object]:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request()]), timeout=60).cancel


def leave_by_deadline(channel: grpc.Channel) -> Callable[[], object]:
    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(request(), timeout=1)

    def wait() -> None:
        assert call.exception(30).code() is grpc.StatusCode.DEADLINE_EXCEEDED

    return wait


HTTP = [leave_by_close, leave_by_reset]
GRPC = [leave_by_cancel, leave_by_stream, leave_by_deadline]


def seen_after_ms(stage: Stage, leave: Callable) -> float:
    """Milliseconds from the client's disconnect until the model `watch` sees it."""
    server = stage.server
    before = len(stage.notes("watch"))
    with grpc.insecure_channel(server.grpc_url) as channel:
        go = leave(server if leave in HTTP else channel)
        wait_until(lambda: stage.notes("watch")[before:] == ["running"], "the execution", server, 20)
        go()
        gone = time.monotonic()
        wait_until(lambda: len(stage.notes("watch")) == before + 2, "the model to see it", server, 20)
    wait_until(lambda: executing(server, "watch") == 0, "the end of the request", server, 10)
    return (float(stage.notes("watch")[-1]) - gone) * 1e3


leaving = pytest.mark.parametrize("leave", [*HTTP, *GRPC], ids=lambda leave: leave.__name__)


@leaving
def test_a_model_soon_sees_that_its_client_has_disconnected(stage: Stage, leave: Callable) -> None:
    stage.deploy("watch", WATCHING)
    assert quickest_ms(lambda _: seen_after_ms(stage, leave)) <= LOOSE_MS
    assert canceled(stage.server, "watch") == len(stage.notes("watch")) / 2
    assert infer(stage.server, "watch", 3) == (200, [3])


@pytest.mark.load
@leaving
def test_a_model_sees_within_100_ms_that_its_client_has_disconnected(stage: Stage, leave: Callable) -> None:
    stage.deploy("watch", WATCHING)
    assert median_ms(lambda _: seen_after_ms(stage, leave)) <= 100


@pytest.mark.parametrize(
    "times",
    [
        30,
        pytest.param(100, marks=pytest.mark.large),
        pytest.param(1000, marks=[pytest.mark.load, pytest.mark.timeout(900)]),
    ],
)
def test_streams_that_are_left_at_any_moment_leave_nothing_behind(stage: Stage, times: int) -> None:
    server = stage.server
    deploy(stage, "left", count=2)
    chance = random.Random(times)

    def leave(seconds: float) -> None:
        message = pb.ModelInferRequest(model_name="left", raw_input_contents=[struct.pack("<2f", 100, 0.001)])
        message.inputs.add(name="IN", datatype="FP32", shape=[2])
        with grpc.insecure_channel(server.grpc_url, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([message]), timeout=60)
            answers = in_background(lambda: sum(1 for _ in call))
            time.sleep(seconds)  # the random point
            call.cancel()
            with pytest.raises(grpc.RpcError):
                answers.result(30)

    def leave_some(count: int) -> None:
        callers = [in_background(lambda: [leave(chance.uniform(0, 0.05)) for _ in range(count // 4)]) for _ in range(4)]
        for caller in callers:
            caller.result(600)
        wait_until(lambda: executing(server, "left") == 0, "the end of all requests", server, 10)

    leave_some(20)
    before = resident_bytes(server)
    leave_some(times)
    growth = resident_bytes(server) - before
    print(f"{times} streams that were left added {growth / (1 << 20):.2f} MiB")
    assert growth < 4 << 20
    with streaming(server) as stream:
        stream.ask("left", 1, 0, with_final=True)
        assert [stream.next(), stream.next()] == [[0], "final"]


def test_a_client_that_does_not_read_holds_back_only_its_model(stage: Stage) -> None:
    methods = """
        def count(self, sender, count, pause):
            tensor = pb_utils.Tensor("OUT", np.ones(1 << 18, np.float32))
            for number in range(count):
                sender.send(pb_utils.InferenceResponse([tensor]))
                note(number)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """
    server = stage.server
    deploy(stage, "big", methods=methods)
    before = resident_bytes(server)
    message = pb.ModelInferRequest(model_name="big", raw_input_contents=[struct.pack("<2f", 400, 0)])
    message.inputs.add(name="IN", datatype="FP32", shape=[2])
    with H2Client(("127.0.0.1", server.grpc_port)) as client:
        # A client that grants no flow-control credit beyond the first 64 KiB.
        client.call(STREAM_INFER, grpc_message(message.SerializeToString()))
        seen = -1

        def has_stalled() -> bool:
            nonlocal seen
            last, seen = seen, len(stage.notes("big"))
            time.sleep(0.3)  # enough for a model without backpressure to send hundreds
            return 0 < last == seen

        wait_until(has_stalled, "the model to be held back", server, 30)
        growth = resident_bytes(server) - before
        print(f"{seen} answers of 1 MiB were sent, and {growth / (1 << 20):.0f} MiB are held")
        assert seen < 20  # its window of 8, and buffers of the connection
        assert growth < 64 << 20
        assert infer(server, "bystander", 3) == (200, [3])
        with streaming(server) as other:
            other.ask("big", 3, 0, with_final=True)
            assert [len(other.next()) for _ in range(3)] == [1 << 18] * 3
            assert other.next() == "final"
    wait_until(lambda: executing(server, "big") == 0, "the end of the request", server, 20)


LIMITLESS = """
from halimede.workers.host import requests as open_requests

open_requests.WINDOW_RESPONSES = open_requests.WINDOW_BYTES = 1 << 60
"""
"""A model that disables backpressure."""


def test_a_worker_that_does_not_wait_for_its_client_is_replaced(stage: Stage) -> None:
    server = stage.server
    deploy(stage, "pushing", methods=COUNT_METHODS.replace("[number]", "[number] * (1 << 18)"), head=LIMITLESS)
    message = pb.ModelInferRequest(model_name="pushing", raw_input_contents=[struct.pack("<2f", 1000, 0)])
    message.inputs.add(name="IN", datatype="FP32", shape=[2])
    with H2Client(("127.0.0.1", server.grpc_port), is_greedy=False) as client:
        client.call(STREAM_INFER, grpc_message(message.SerializeToString()))
        wait_until(lambda: "33 answers of one request while its client has taken none" in server.log, "its end", server)
    with streaming(server) as stream:
        stream.ask("pushing", 3, 0)
        assert stream.next()[:1] == [0]  # type: ignore[index]
