"""GOAWAY to clients of a server that continues to serve, so that they connect to another server."""

import ssl
import time
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Tls, Transport
from support.h2client import GOAWAY, INFER, LIVE, H2Client, grpc_message

LEAVE_AFTER_S = GrpcLimits().leave_after_s
PKI = Path(__file__).parents[2] / "support/pki"
NO_ERROR = (0, b"")


def test_a_connection_gets_goaway_once_and_is_still_served(served) -> None:
    with H2Client(("127.0.0.1", served.port)) as client:
        held = client.call(INFER, grpc_message(pb.ModelInferRequest(model_name="held").SerializeToString()))
        served.core.wait_for(lambda core: len(core.held) == 1)
        served.do(served.front.send_away)
        assert client.receive_until(client.goaway)
        assert client.goaway() == NO_ERROR
        assert int.from_bytes(client.of(GOAWAY)[0].payload[:4], "big") == 2**31 - 1
        # Requests that the client sent before it read the frame are served too.
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        client.receive(1)
        assert len(client.of(GOAWAY)) == 1
        served.do(served.core.release)
        assert client.finish(held)["grpc-status"] == "0"


def test_a_new_connection_is_served_and_then_gets_goaway(served) -> None:
    """At once, its client might take it for a failure to connect."""
    served.do(served.front.send_away)
    began_at = time.monotonic()
    with H2Client(("127.0.0.1", served.port)) as client:
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        assert client.receive_until(client.goaway)
        assert time.monotonic() - began_at >= LEAVE_AFTER_S
        assert client.goaway() == NO_ERROR
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"


def test_a_drain_after_goaway_says_which_call_was_the_last(served) -> None:
    with H2Client(("127.0.0.1", served.port)) as client:
        held = client.call(INFER, grpc_message(pb.ModelInferRequest(model_name="held").SerializeToString()))
        served.core.wait_for(lambda core: len(core.held) == 1)
        served.do(served.front.send_away)
        assert client.receive_until(client.goaway)
        draining = served.thread.begin(served.front.drain())
        assert client.receive_until(lambda: len(client.of(GOAWAY)) == 2)
        assert int.from_bytes(client.of(GOAWAY)[1].payload[:4], "big") == held
        served.do(served.core.release)
        assert client.finish(held)["grpc-status"] == "0"
        assert client.wait_closed()
    draining.result(20)


@pytest.mark.parametrize("kind", ["tls", "unix"])
def test_goaway_with_tls_and_on_unix_sockets(serve, tmp_path: Path, kind: str) -> None:
    if kind == "tls":
        served = serve(Transport(tls=Tls((PKI / "server.pem").read_bytes(), (PKI / "server.key").read_bytes())))
        context = ssl.create_default_context(cafile=str(PKI / "root.pem"))
        context.set_alpn_protocols(["h2"])
        connected = H2Client(("127.0.0.1", served.port), context)
    else:
        served = serve(address=f"unix:{tmp_path}/grpc.sock")
        connected = H2Client(f"{tmp_path}/grpc.sock")
    with connected as client:
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
        served.do(served.front.send_away)
        assert client.receive_until(client.goaway)
        assert client.goaway() == NO_ERROR
        assert client.finish(client.call(LIVE))["grpc-status"] == "0"
