"""Clients that leave, or that do not read: the core and the model notice it through the front end."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from support.calls import ONES_JSON, canceled, executing, pending
from support.front_ends import TWO, connections_to_each, front_ends, grpc_clients_of_each
from support.h2client import STREAM_INFER, H2Client, grpc_message
from support.models import add_identity
from support.processes import holding_no_more
from support.served import Stage, add_python, body
from support.server import RunningServer, serving, wait_until

HELD = """
for request in requests:
    while not request.is_cancelled():
        time.sleep(0.005)
    note("cancelled")
return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)) for _ in requests]
"""
ENDLESS = """
for request in requests:
    sender = request.get_response_sender()
    array = np.zeros(int(value(request)), np.float32)
    count = 0
    while not sender.is_cancelled() and count < 2000:
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)]))
        count += 1
        note(count)
    note("ended")
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HELD_BODY = json.dumps(body(1.0, batch=False))


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    repository = tmp_path_factory.mktemp("stage") / "models"
    repository.mkdir()
    add_identity(repository, "quick")
    add_python(repository, "held", HELD, max_batch_size=0)
    add_python(repository, "endless", ENDLESS, max_batch_size=0, decoupled=True)
    add_python(repository, "unread", ENDLESS, max_batch_size=0, decoupled=True)
    with serving(tmp_path_factory.mktemp("log"), [TWO, "--model-repository", repository]) as running:
        yield Stage(running, repository)


def idle(server: RunningServer, model: str) -> None:
    wait_until(lambda: (executing(server, model), pending(server, model)) == (0, 0), f"no request of '{model}'", server)


def ignore(result: Any, error: Any) -> None:
    """What a cancelled call returns."""


def tensor(*values: float) -> grpcclient.InferInput:
    made = grpcclient.InferInput("IN", [len(values)], "FP32")
    made.set_data_from_numpy(np.array(values, np.float32))
    return made


def test_requests_of_http_clients_that_leave_are_cancelled(stage: Stage):
    server = stage.server
    before = canceled(server, "held")
    with connections_to_each(server, each=2) as fronts:
        count = len(fronts)
        for front in fronts:
            front.http.request("POST", "/v2/models/held/infer", HELD_BODY)
        wait_until(lambda: executing(server, "held") + pending(server, "held") == count, "all requests", server)
    idle(server, "held")
    assert canceled(server, "held") == before + count
    wait_until(lambda: "cancelled" in stage.notes("held"), "the model to see it", server)


def test_calls_that_grpc_clients_cancel_are_cancelled(stage: Stage):
    server = stage.server
    before = canceled(server, "held")
    with grpc_clients_of_each(server) as clients:
        calls = [client.async_infer("held", [tensor(1.0)], callback=ignore) for client in clients]
        wait_until(lambda: executing(server, "held") + pending(server, "held") == len(calls), "all calls", server)
        for call in calls:
            call.cancel()
        idle(server, "held")
    assert canceled(server, "held") == before + len(calls)


def test_a_large_request_whose_client_leaves_at_once_is_cancelled(stage: Stage):
    """Its bytes are copied on a thread when the client leaves."""
    server = stage.server
    with connections_to_each(server) as fronts:
        data = np.ones(4_000_000, np.float32).tobytes()
        document = {
            "inputs": [
                {"name": "IN", "shape": [4_000_000], "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
            ]
        }
        header = json.dumps(document).encode()
        for front in fronts:
            front.http.request(
                "POST", "/v2/models/held/infer", header + data, {"Inference-Header-Content-Length": str(len(header))}
            )
    for _ in range(3):
        assert server.post("/v2/models/quick/infer", ONES_JSON).status == 200
    idle(server, "held")


def test_an_event_stream_whose_client_leaves_ends(stage: Stage):
    server = stage.server
    with connections_to_each(server) as fronts:
        for front in fronts:
            front.http.request("POST", "/v2/models/endless/generate_stream", '{"IN": 10}')
            assert front.http.getresponse().read(100).startswith(b"data: ")
        assert executing(server, "endless") + pending(server, "endless") >= 1
    idle(server, "endless")
    assert server.post("/v2/models/quick/infer", ONES_JSON).status == 200


def test_a_grpc_stream_whose_client_leaves_ends(stage: Stage):
    server = stage.server
    with grpc_clients_of_each(server) as clients:
        for client in clients:
            client.start_stream(ignore)
            client.async_stream_infer("endless", [tensor(10.0)])
        wait_until(lambda: executing(server, "endless") >= 1, "a stream", server)
        for client in clients:
            client.stop_stream(cancel_requests=True)
    idle(server, "endless")


@pytest.mark.parametrize("elements", [10, 100_000], ids=["in frames", "in shared memory"])
def test_a_model_waits_for_a_grpc_client_that_does_not_read(stage: Stage, elements: int):
    server = stage.server
    sent = len(stage.notes("unread"))
    message = pb.ModelInferRequest(model_name="unread", raw_input_contents=[np.float32(elements).tobytes()])
    message.inputs.add(name="IN", datatype="FP32", shape=[1])
    with ExitStack() as stack:
        client = stack.enter_context(H2Client(("127.0.0.1", server.grpc_port), is_greedy=False))
        client.send(client.head(STREAM_INFER)[1])
        client.send_data(1, grpc_message(message.SerializeToString()))
        wait_until(lambda: len(stage.notes("unread")) >= sent + 8, "the first answers", server)
        steady(stage, "unread")
        assert len(stage.notes("unread")) - sent < 1500, "the model is not stopped"
        assert executing(server, "unread") == 1
        assert server.post("/v2/models/quick/infer", ONES_JSON).status == 200
    idle(server, "unread")
    wait_until(lambda: stage.notes("unread")[-1] == "ended", "the model to see the end", server)


def steady(stage: Stage, model: str) -> None:
    """Wait until a hundred other requests are answered while the model sends nothing."""

    def is_still() -> bool:
        before = stage.notes(model)
        for _ in range(100):
            assert stage.server.post("/v2/models/quick/infer", ONES_JSON).status == 200
        return stage.notes(model) == before

    wait_until(is_still, f"'{model}' to stop", stage.server)


def test_a_model_waits_for_an_http_client_that_does_not_read(stage: Stage):
    server = stage.server
    sent = len(stage.notes("unread"))
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.http_port))
        content = b'{"IN": 20000}'
        raw.sendall(
            b"POST /v2/models/unread/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content)
            + content
        )
        wait_until(lambda: len(stage.notes("unread")) >= sent + 8, "the first answers", server)
        steady(stage, "unread")
        assert len(stage.notes("unread")) - sent < 1500, "the model is not stopped"
    idle(server, "unread")


def test_many_connections_that_come_and_go_leave_nothing(stage: Stage):
    """A thousand connections to both front ends, a fifth of which leave during a request."""
    server = stage.server

    def use(count: int) -> None:
        for number in range(count):
            with socket.create_connection(("127.0.0.1", server.http_port)) as raw:
                model = "held" if number % 5 == 0 else "quick"
                content = (HELD_BODY if model == "held" else ONES_JSON).encode()
                raw.sendall(
                    b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                    % (model.encode(), len(content))
                    + content
                )
                if model == "quick":
                    assert raw.recv(1 << 16).startswith(b"HTTP/1.1 200")
        idle(server, "held")

    use(250)
    with ExitStack() as stack:
        for pid in (server.process.pid, *(each.pid for each in front_ends(server))):
            stack.enter_context(holding_no_more(pid, growth_bytes=4 << 20))
        use(1000)
