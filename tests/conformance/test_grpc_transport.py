"""The gRPC transport's flags on the running server, through tritonclient and a client that works in HTTP/2 frames."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

import support.server
from support.h2client import ENHANCE_YOUR_CALM, INFER, LIVE, STREAM_INFER, H2Client, grpc_message
from support.models import add_identity
from support.processes import resident_bytes
from support.server import RunningServer, start_server, wait_until

PKI = Path(support.server.__file__).parent / "pki"
METADATA = "/inference.GRPCInferenceService/ServerMetadata"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    add_identity(tmp_path / "models", "ident", dims="-1")
    return tmp_path / "models"


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def begin(*flags: str) -> RunningServer:
        running.append(start_server(tmp_path, ["--model-repository", models, *flags]))
        return running[-1]

    yield begin
    for server in running:
        assert server.stop() == 0, server.log


def tensor(elements: int = 16) -> triton.InferInput:
    made = triton.InferInput("IN", [1, elements], "FP32")
    made.set_data_from_numpy(np.arange(elements, dtype=np.float32).reshape(1, -1))
    return made


def test_mutual_tls_serves_only_clients_with_a_certificate(start) -> None:
    server = start(
        "--grpc-use-ssl=true",
        "--grpc-use-ssl-mutual=true",
        f"--grpc-server-cert={PKI / 'server.pem'}",
        f"--grpc-server-key={PKI / 'server.key'}",
        f"--grpc-root-cert={PKI / 'root.pem'}",
    )
    certificate = {"private_key": str(PKI / "client.key"), "certificate_chain": str(PKI / "client.pem")}
    address = f"localhost:{server.grpc_port}"
    with triton.InferenceServerClient(address, ssl=True, root_certificates=str(PKI / "root.pem"), **certificate) as it:
        answer = it.infer("ident", [tensor(150_000)]).as_numpy("OUT")
        assert np.array_equal(answer[0], np.arange(150_000, dtype=np.float32))
        with triton.InferenceServerClient(address, ssl=True, root_certificates=str(PKI / "root.pem")) as without:
            with pytest.raises(InferenceServerException) as caught:
                without.is_server_live(client_timeout=20)
            assert caught.value.status() == str(grpc.StatusCode.UNAVAILABLE)
        with H2Client(("127.0.0.1", server.grpc_port)) as plain:
            plain.call(LIVE)
            assert plain.wait_closed(30)  # the goal is 10 s
        assert it.is_server_live()
    # With a line for each failed handshake, any client could fill the disk.
    assert "andshake" not in server.log


def test_the_flags_reach_the_transport(start) -> None:
    server = start(
        "--grpc-infer-response-compression-level=low",
        "--grpc-keepalive-time=100",
        "--grpc-keepalive-timeout=1500",
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-min-recv-ping-interval-without-data=600000",
        "--grpc-http2-max-ping-strikes=3",
        "--grpc-max-connection-age=4500",
        "--grpc-max-connection-age-grace=100",
    )
    address = ("127.0.0.1", server.grpc_port)
    with H2Client(address) as client:
        stream = client.call(METADATA, extra=[("grpc-accept-encoding", "gzip")])
        assert client.finish(stream)["grpc-encoding"] == "gzip"
        assert client.data(stream)[0] == 1
        assert client.receive_until(lambda: client.pings() >= 2)
        assert client.receive_until(client.goaway)
        assert client.goaway() == (0, b"max_age")
        assert client.wait_closed()
    with H2Client(address, answers_pings=False) as client:
        assert client.wait_closed()
        assert client.goaway() == (ENHANCE_YOUR_CALM, b"ping_timeout")
    with H2Client(address) as client:
        assert client.ping_until_refused(20) < 20
        assert client.goaway() == (ENHANCE_YOUR_CALM, b"too_many_pings")


def large_request(elements: int) -> bytes:
    message = pb.ModelInferRequest(model_name="ident", raw_input_contents=[bytes(4 * elements)])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, elements])
    return grpc_message(message.SerializeToString())


def test_a_stream_of_a_client_that_does_not_read_is_ended_and_released(start) -> None:
    server = start("--grpc-stall-timeout-secs=2")
    size = 48 << 20
    address = ("127.0.0.1", server.grpc_port)
    with H2Client(address, is_greedy=False) as lazy, H2Client(address) as other:
        before = resident_bytes(server)
        stream = lazy.call(STREAM_INFER, None)
        beside = lazy.call(STREAM_INFER, None)
        lazy.send_data(stream, large_request(size // 4), is_end=False)
        # Its window is full: the rest of the answer waits in the server.
        assert lazy.receive_until(lambda: len(lazy.data(stream)) == 65535)
        assert resident_bytes(server) - before > size // 2
        begun = time.monotonic()
        fields = lazy.finish(stream)
        assert 1 < time.monotonic() - begun < 6
        assert fields["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
        assert fields["grpc-message"] == "the client has not read its answer for 2 s"
        wait_until(lambda: resident_bytes(server) - before < size // 2, "the memory to be released", server)
        # Calls without an answer that waits continue, also on the same connection.
        assert not lazy.is_over(beside)
        assert lazy.finish(lazy.call(LIVE, b""))["grpc-status"] == "3"
        assert other.finish(other.call(INFER, large_request(16)))["grpc-status"] == "0"
