"""Binding, draining and stopping."""

import queue
import socket
import threading
import time
from concurrent.futures import Future

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from halimede.core.observe.start_summary import GRPC
from halimede.core.wire.protocol import message_class
from halimede.front_processes.services import bind_port
from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bound_port, release
from halimede.settings import Settings
from support.h2client import GOAWAY, SETTINGS, WINDOW_UPDATE, H2Client, frame, grpc_message
from support.server import wait_until

HealthResponse = message_class("grpc.health.v1.HealthCheckResponse")
Asking = message_class("grpc.reflection.v1.ServerReflectionRequest")

GOING = (
    grpc.StatusCode.UNAVAILABLE,
    "GRPC server is shutting down and has stopped accepting new requests.",
)
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

ASKING_HELD = pb.ModelInferRequest(model_name="held", id="a").SerializeToString()


def bind_failure(address: str, port: int) -> str:
    with pytest.raises(OSError, match="failed to start GRPC service") as caught:
        bind_port(GRPC, Settings(grpc_address=address, grpc_port=port))
    return str(caught.value)


def bound_and_released(address: str, port: int) -> int:
    sockets, _ = bind_port(GRPC, Settings(grpc_address=address, grpc_port=port))
    bound = bound_port(sockets)
    release(sockets)
    return bound


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_by_grpc_is_refused(served, address: str) -> None:
    assert bind_failure(address, served.port) == (
        f"failed to start GRPC service: Socket '{address}:{served.port}' already in use"
    )


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_in_use_by_another_socket_is_refused(reuse: bool) -> None:
    with socket.socket() as taken:
        if reuse:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert bind_failure("127.0.0.1", port) == (
            f"failed to start GRPC service: Socket '127.0.0.1:{port}' already in use"
        )


def test_an_address_of_another_machine_or_an_invalid_one_is_refused() -> None:
    assert bind_failure("192.0.2.1", 0) == (
        "failed to start GRPC service: cannot listen on '192.0.2.1:0': Cannot assign requested address"
    )
    assert bind_failure("not an address", 0).startswith("failed to start GRPC service: address 'not an address': ")


def test_unusable_addresses_of_a_name_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `localhost` in a container without IPv6 whose /etc/hosts has the IPv6 address."""

    def getaddrinfo(*_args: object, **_options: object) -> list:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 0)) for host in ("127.0.0.1", "192.0.2.1")]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert bound_and_released("localhost", 0) > 0


def test_a_port_that_was_bound_and_never_served_is_released() -> None:
    port = bound_and_released("127.0.0.1", 0)
    assert bound_and_released("127.0.0.1", port) == port


def drained(served) -> Future:
    return served.thread.begin(served.front.drain())


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def refused(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError):
        list(call)
    return call.code(), call.details()


def test_draining_answers_requests_in_flight_and_accepts_no_new_ones(served, channel) -> None:
    asked = channel.unary_unary(INFER).future(ASKING_HELD, timeout=20)
    watching = channel.unary_stream(WATCH, response_deserializer=HealthResponse.FromString)(b"", timeout=20)
    served.core.wait_for(lambda core: len(core.held) == 1)
    assert next(watching).status == HealthResponse.SERVING

    draining = drained(served)
    assert next(watching).status == HealthResponse.NOT_SERVING
    assert refused(watching) == GOING
    wait_until(lambda: not is_open(served.port), "the port to close")
    with grpc.insecure_channel(served.url) as other, pytest.raises(grpc.RpcError) as caught:
        other.unary_unary(LIVE)(b"", timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not draining.done()

    served.do(served.core.release)
    assert pb.ModelInferResponse.FromString(asked.result(20)).id == "a"
    draining.result(20)


def test_clients_without_pause_see_only_answers_and_unavailable_at_a_stop(served) -> None:
    """A bare CANCELLED would not be retried elsewhere."""
    codes: list[grpc.StatusCode] = []
    is_over = threading.Event()

    def ask_repeatedly() -> None:
        with grpc.insecure_channel(served.url) as other:
            live = other.unary_unary(LIVE)
            while not is_over.is_set():
                try:
                    live(b"", timeout=20)
                except grpc.RpcError as error:
                    codes.append(error.code())
                else:
                    codes.append(grpc.StatusCode.OK)

    asking = [threading.Thread(target=ask_repeatedly) for _ in range(4)]
    for each in asking:
        each.start()
    try:
        wait_until(lambda: len(codes) > 100, "the first answers")
        drained(served).result(20)
        before = len(codes)
        wait_until(lambda: len(codes) > before + 20, "calls after the stop")
    finally:
        is_over.set()
        for each in asking:
            each.join()
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
    # No call failed before the port was closed.
    assert codes.index(grpc.StatusCode.UNAVAILABLE) > 90


def test_health_reports_the_drain_to_calls_that_still_arrive(served) -> None:
    with H2Client(("127.0.0.1", served.port), answers_pings=False) as client:
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        draining = drained(served)
        assert client.receive_until(client.goaway)
        check = client.call("/grpc.health.v1.Health/Check")
        assert client.finish(check)["grpc-status"] == "0"
        assert HealthResponse.FromString(client.data(check)[5:]).status == HealthResponse.NOT_SERVING
    draining.result(20)


def test_draining_ends_open_streams_when_their_requests_are_answered(served, channel) -> None:
    requests: queue.Queue = queue.Queue()
    stream = channel.stream_stream(STREAM, response_deserializer=pb.ModelStreamInferResponse.FromString)(
        iter(requests.get, None), timeout=20
    )
    questions: queue.Queue = queue.Queue()
    idle = channel.stream_stream(REFLECTION)(iter(questions.get, None), timeout=20)
    questions.put(b"")
    assert next(idle)
    requests.put(ASKING_HELD)
    served.core.wait_for(lambda core: len(core.held) == 1)

    draining = drained(served)
    assert refused(idle) == GOING
    assert not draining.done()
    served.do(served.core.release)
    assert next(stream).infer_response.id == "a"
    assert refused(stream) == GOING
    draining.result(20)
    requests.put(None)
    questions.put(None)


def test_draining_completes_a_stream_that_its_client_has_closed(served, channel) -> None:
    stream = channel.unary_stream(STREAM)(ASKING_HELD, timeout=20)
    served.core.wait_for(lambda core: len(core.held) == 1)
    channel.unary_unary(LIVE)(b"")
    draining = drained(served)
    served.do(served.core.release)
    assert len(list(stream)) == 1
    assert stream.code() is grpc.StatusCode.OK
    draining.result(20)


def test_draining_waits_a_limited_time_for_incomplete_requests(serve) -> None:
    assert GrpcLimits().drain_stall_s == 5
    served = serve(limits=GrpcLimits(drain_stall_s=2.0))
    with H2Client(("127.0.0.1", served.port)) as client:
        late, never = client.call(INFER, None), client.call(INFER, None)
        watch = client.call(WATCH, None)
        client.send_data(never, grpc_message(ASKING_HELD)[:9], is_end=False)
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        draining = drained(served)
        assert client.receive_until(client.goaway)
        client.send_data(late, grpc_message(pb.ModelInferRequest(model_name="nope").SerializeToString()))
        assert client.finish(late)["grpc-message"] == "Request for unknown model: 'nope' is not found"
        assert not draining.done()
        for stream in (never, watch):
            assert (client.finish(stream)["grpc-status"], client.fields[stream]["grpc-message"]) == ("14", GOING[1])
    draining.result(20)


def test_a_call_that_waits_behind_the_data_of_another_is_served_in_a_drain(serve) -> None:
    """On a slow network the client's answer to GOAWAY waits there too."""
    served = serve(limits=GrpcLimits(goaway_answer_s=0.3), port_limits=PortLimits(sweep_s=0.05))
    with H2Client(("127.0.0.1", served.port), answers_pings=False) as client:
        message = grpc_message(pb.ModelInferRequest(model_name="n" * 90).SerializeToString())
        first = client.call(INFER, None)
        client.send_data(first, message[:10], is_end=False)
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        draining = drained(served)
        assert client.receive_until(client.goaway)
        for at in range(10, 80):
            client.send_data(first, message[at : at + 1], is_end=False)
            client.receive(0.02)
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        client.send_data(first, message[80:])
        assert client.finish(first)["grpc-status"] == "5"
        assert client.wait_closed()
    draining.result(20)


def test_a_slow_client_gets_its_whole_answer_before_its_connection_is_closed(serve, tmp_path) -> None:
    """A unix socket holds 200 KB; the rest of the answer waits in the server."""
    served = serve(
        address=f"unix:{tmp_path}/grpc.sock",
        limits=GrpcLimits(goaway_answer_s=0.05),
        port_limits=PortLimits(sweep_s=0.05),
    )
    message = pb.ModelInferRequest(model_name="ident", raw_input_contents=[bytes(700_000)])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 175_000])
    with H2Client(f"{tmp_path}/grpc.sock") as client:
        client.send(frame(SETTINGS, payload=(4).to_bytes(2, "big") + (1 << 20).to_bytes(4, "big")))
        client.send(frame(WINDOW_UPDATE, payload=(1 << 20).to_bytes(4, "big")))
        call = client.call(INFER, grpc_message(message.SerializeToString()))
        served.core.wait_for(lambda core: len(core.requests) == 1)
        draining = drained(served)
        with pytest.raises(TimeoutError):
            draining.result(1)
        assert client.finish(call)["grpc-status"] == "0"
        assert len(client.data(call)) > 700_000
        assert client.wait_closed()
    draining.result(20)


def test_a_client_that_sends_credit_gets_its_whole_answer_before_the_close(serve, tmp_path) -> None:
    """The answer is in the socket, and no longer in the server."""
    served = serve(
        address=f"unix:{tmp_path}/grpc.sock",
        limits=GrpcLimits(goaway_answer_s=0.3),
        port_limits=PortLimits(sweep_s=0.05),
    )
    message = pb.ModelInferRequest(model_name="held", raw_input_contents=[bytes(40_000)])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 10_000])
    with H2Client(f"{tmp_path}/grpc.sock") as client:
        call = client.call(INFER, grpc_message(message.SerializeToString()))
        served.core.wait_for(lambda core: len(core.held) == 1)
        draining = drained(served)
        assert client.receive_until(lambda: len(client.of(GOAWAY)) == 2)
        served.do(served.core.release)
        for _ in range(50):
            client.send(frame(WINDOW_UPDATE, payload=(1).to_bytes(4, "big")))
            time.sleep(0.02)  # the pace of a slow reader
        assert client.finish(call)["grpc-status"] == "0"
        assert len(client.data(call)) > 40_000
    draining.result(20)


def test_a_call_that_ends_without_a_whole_request_is_answered(served) -> None:
    with H2Client(("127.0.0.1", served.port)) as client:
        for path in (INFER, LIVE, "/grpc.health.v1.Health/Check", WATCH):
            for body in (b"", b"\0\0\0\0\x09x"):
                fields = client.finish(client.call(path, body))
                assert (fields["grpc-status"], fields["grpc-message"]) == (
                    "3",
                    "the call ended before a whole request came",
                )


def test_closing_cancels_calls_in_flight(served, channel) -> None:
    asked = channel.unary_unary(INFER).future(ASKING_HELD, timeout=20)
    served.core.wait_for(lambda core: len(core.held) == 1)
    draining = drained(served)
    served.thread.run(served.front.close())
    draining.result(20)
    assert asked.exception(20).code() is grpc.StatusCode.UNAVAILABLE
    assert served.core.cancelled == [1]


def test_a_stopped_server_releases_its_port(served) -> None:
    served.thread.run(served.front.close())
    assert bound_and_released("127.0.0.1", served.port) == served.port


def test_the_reserve_serves_control_calls_alone(serve) -> None:
    served = serve(port_limits=PortLimits(max_connections=1))
    with H2Client(("127.0.0.1", served.port)) as busy, H2Client(("127.0.0.1", served.port)) as probe:
        held = busy.call(INFER, grpc_message(ASKING_HELD))
        served.core.wait_for(lambda core: len(core.held) == 1)
        assert probe.finish(probe.call(LIVE))["grpc-status"] == "0"
        refused = probe.finish(probe.call(INFER, grpc_message(ASKING_HELD)))
        full = "the server has as many connections as it can serve"
        assert (refused["grpc-status"], refused["grpc-message"]) == ("14", full)
        assert probe.finish(probe.call(LIVE))["grpc-status"] == "0"
        served.do(served.core.release)
        assert busy.finish(held)["grpc-status"] == "0"
