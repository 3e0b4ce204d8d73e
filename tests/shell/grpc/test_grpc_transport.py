"""The transport's options, tested with a client that works in HTTP/2 frames; and unix sockets."""

import socket
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton

from halimede.core.observe.start_summary import GRPC
from halimede.front_processes.services import bind_port
from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Transport
from halimede.frontends.sockets import bound_port, release
from halimede.settings import Settings
from support.h2client import (
    ENHANCE_YOUR_CALM,
    LIVE,
    RST_STREAM,
    STREAM_INFER,
    H2Client,
    grpc_message,
)

MAX_CONCURRENT_STREAMS = GrpcLimits().http2.max_streams
MAX_METADATA_BYTES = GrpcLimits().max_metadata_bytes
TOO_MANY_PINGS = (ENHANCE_YOUR_CALM, b"too_many_pings")
CONFIG = "/inference.GRPCInferenceService/ModelConfig"
STATISTICS = "/inference.GRPCInferenceService/ModelStatistics"


def address(served) -> tuple[str, int]:
    return (served.address, served.port)


def test_too_many_pings_end_the_connection(serve) -> None:
    served = serve()
    with H2Client(address(served)) as client:
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        assert client.ping_until_refused(20) < 20
        assert client.goaway() == TOO_MANY_PINGS
        assert client.wait_closed()


def test_flags_set_the_number_of_permitted_pings(serve) -> None:
    counts = []
    for strikes in (1, 6):
        with H2Client(address(serve(Transport(http2_max_ping_strikes=strikes)))) as client:
            counts.append(client.ping_until_refused(20))
    assert counts[1] - counts[0] == 5
    with H2Client(address(serve(Transport(http2_max_ping_strikes=0)))) as client:
        assert client.ping_until_refused(30) == 30


@pytest.mark.parametrize(
    ("without_calls", "with_call", "refused"), [(False, False, True), (False, True, False), (True, False, False)]
)
def test_pings_may_arrive_as_often_as_the_flag_permits(
    serve, without_calls: bool, with_call: bool, refused: bool
) -> None:
    """Connections without calls may ping only where that is permitted."""
    transport = Transport(http2_min_recv_ping_interval_without_data=1, keepalive_permit_without_calls=without_calls)
    with H2Client(address(serve(transport))) as client:
        if with_call:
            client.call(STREAM_INFER, None)
        assert (client.ping_until_refused(20) < 20) is refused


def test_the_server_pings_connections_with_calls_and_idle_ones_if_permitted(serve) -> None:
    with H2Client(address(serve(Transport(keepalive_time=100)))) as client:
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        before = client.pings()
        client.receive_until(lambda: client.pings() > before, 0.5)
        assert client.pings() == before
        client.call(STREAM_INFER, None)
        assert client.receive_until(lambda: client.pings() >= before + 2)
    with H2Client(address(serve(Transport(keepalive_time=100, keepalive_permit_without_calls=True)))) as client:
        assert client.receive_until(lambda: client.pings() >= 2)


def test_a_client_that_answers_no_ping_is_closed_after_the_timeout(serve) -> None:
    transport = Transport(keepalive_time=100, keepalive_timeout=300, keepalive_permit_without_calls=True)
    with H2Client(address(serve(transport)), answers_pings=False) as client:
        assert client.wait_closed(20)
        assert client.goaway() == (ENHANCE_YOUR_CALM, b"ping_timeout")


@pytest.mark.load
def test_the_default_timeout_of_a_ping_is_twenty_seconds(serve) -> None:
    transport = Transport(keepalive_time=100, keepalive_permit_without_calls=True)
    with H2Client(address(serve(transport)), answers_pings=False) as client:
        assert not client.wait_closed(18)
        assert client.wait_closed(20)


def test_an_old_connection_gets_goaway_and_is_closed_after_the_grace(serve) -> None:
    with H2Client(address(serve(Transport(max_connection_age=200, max_connection_age_grace=200)))) as client:
        stream = client.call(STREAM_INFER, None)
        assert client.receive_until(client.goaway)
        assert client.goaway() == (0, b"max_age")
        assert client.finish(stream)["grpc-message"] == "max connection age"
        assert client.wait_closed()


@pytest.mark.parametrize(
    ("level", "accepted", "encoding"),
    [
        ("none", "identity,deflate,gzip", None),
        ("low", "identity,deflate,gzip", "gzip"),
        ("medium", "identity,deflate,gzip", "deflate"),
        ("high", "identity,gzip", "gzip"),
        ("high", "identity", None),
        ("high", "", None),
    ],
)
def test_answers_are_compressed_for_clients_that_accept_it(
    serve, level: str, accepted: str, encoding: str | None
) -> None:
    with H2Client(address(serve(Transport(compression_level=level)))) as client:
        headers = [("grpc-accept-encoding", accepted)] if accepted else []
        stream = client.call(STATISTICS, grpc_message(b""), headers)
        fields = client.finish(stream)
        assert fields["grpc-status"] == "0"
        assert fields.get("grpc-encoding") == encoding
        assert client.data(stream)[0] == (1 if encoding else 0)


def test_tritonclient_reads_compressed_answers(serve) -> None:
    served = serve(Transport(compression_level="high"))
    with triton.InferenceServerClient(served.url) as client:
        assert len(client.get_inference_statistics().model_stats) == len(served.core.views)


def test_calls_beyond_the_limit_of_a_connection_are_refused(served) -> None:
    with H2Client(address(served)) as client:
        streams = [client.call(STREAM_INFER, None) for _ in range(MAX_CONCURRENT_STREAMS + 3)]
        assert client.receive_until(lambda: len(client.of(RST_STREAM)) == 3)
        assert [got.stream for got in client.of(RST_STREAM)] == streams[-3:]


def test_metadata_up_to_the_limit_are_accepted_and_larger_ones_refused(served, channel) -> None:
    live = channel.unary_unary(LIVE)
    for _ in range(5):
        live(b"", metadata=[("x", "v" * (MAX_METADATA_BYTES - 1000))], timeout=20)
        with pytest.raises(grpc.RpcError) as caught:
            live(b"", metadata=[("x", "v" * MAX_METADATA_BYTES)], timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_servers_share_a_port_if_all_request_it() -> None:
    first, _ = bind_port(GRPC, Settings(grpc_address="127.0.0.1", grpc_port=0, reuse_grpc_port=True))
    same = Settings(grpc_address="127.0.0.1", grpc_port=bound_port(first), reuse_grpc_port=True)
    second, _ = bind_port(GRPC, same)
    assert bound_port(second) == bound_port(first)
    with pytest.raises(OSError, match="already in use"):
        bind_port(GRPC, replace(same, reuse_grpc_port=False))
    release([*first, *second])


def failure(serve, address: str) -> str:
    with pytest.raises(OSError, match="failed to start GRPC service") as caught:
        serve(address=address)
    return str(caught.value).removeprefix("failed to start GRPC service: ")


def test_a_unix_socket_is_served_and_removed_at_the_stop(serve, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    served = serve(address=f"unix:{path}")
    assert served.port == 0
    with triton.InferenceServerClient(served.url) as client:
        assert client.is_server_live()
    assert failure(serve, f"unix:{path}") == f"Socket 'unix:{path}' already in use"
    with triton.InferenceServerClient(served.url) as client:
        assert client.is_server_live()
    served.thread.run(served.front.close())
    assert not path.exists()


def test_the_socket_of_a_dead_server_is_replaced(serve, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with triton.InferenceServerClient(serve(address=f"unix:{path}").url) as client:
        assert client.is_server_live()


def test_a_live_servers_full_backlog_does_not_make_it_look_dead(serve, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as caller:
        live.bind(str(path))
        live.listen(0)
        caller.connect(str(path))
        assert failure(serve, f"unix:{path}") == f"Socket 'unix:{path}' already in use"


def test_an_unusable_socket_path_is_refused_and_left_unchanged(serve, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for target, cause in (
        (f"unix:{file}", "a file of that name exists and is not a socket"),
        (f"unix:{tmp_path}/none/grpc.sock", "No such file or directory"),
        (f"unix:{tmp_path}/{'long' * 40}", "AF_UNIX path too long"),
        ("unix:", "a path must follow"),
    ):
        assert failure(serve, target) == f"cannot listen on '{target}': {cause}"
    assert file.read_text() == "kept"
