"""Encryption, and certificates that cannot be used."""

import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

import support.h2client
from halimede.frontends.grpc.options import Tls, Transport
from halimede.frontends.port import PortLimits
from support.h2client import LIVE, H2Client

PKI = Path(support.h2client.__file__).parent / "pki"


def pem(name: str) -> bytes:
    return (PKI / name).read_bytes()


PLAIN = Tls(pem("server.pem"), pem("server.key"))
MUTUAL = replace(PLAIN, root_cert=pem("root.pem"))


def client(served, name: str = "", root: str = "root.pem") -> triton.InferenceServerClient:
    """tritonclient with the certificate of this name, or without one."""
    return triton.InferenceServerClient(
        f"localhost:{served.port}",
        ssl=True,
        root_certificates=str(PKI / root),
        private_key=str(PKI / f"{name}.key") if name else None,
        certificate_chain=str(PKI / f"{name}.pem") if name else None,
    )


def is_refused(asked: triton.InferenceServerClient) -> bool:
    with asked, pytest.raises(InferenceServerException) as caught:
        asked.is_server_live(client_timeout=20)
    return caught.value.status() == str(grpc.StatusCode.UNAVAILABLE)


def test_tritonclient_with_ssl(serve) -> None:
    served = serve(Transport(tls=PLAIN))
    with client(served) as asked:
        assert asked.is_server_live()
    assert is_refused(client(served, root="stranger_root.pem"))


def test_mutual_tls_accepts_only_certificates_signed_by_the_root(serve) -> None:
    served = serve(Transport(tls=MUTUAL))
    with client(served, "client") as asked:
        assert asked.is_server_live()
    assert is_refused(client(served))
    assert is_refused(client(served, "stranger"))


def test_a_client_without_tls_is_closed_without_affecting_others(serve) -> None:
    served = serve(Transport(tls=PLAIN))
    with client(served) as asked, H2Client(("127.0.0.1", served.port)) as plain:
        plain.call(LIVE)
        assert plain.wait_closed(30)  # the goal is 10 s
        assert asked.is_server_live()


def test_a_client_that_sends_nothing_is_closed(serve) -> None:
    assert PortLimits().handshake_timeout_s == 10
    served = serve(Transport(tls=PLAIN), port_limits=PortLimits(handshake_timeout_s=2.0))
    with client(served) as asked, socket.create_connection(("127.0.0.1", served.port), timeout=30) as silent:
        assert silent.recv(1) == b""
        assert asked.is_server_live()


def test_old_tls_is_refused_and_h2_is_spoken(serve) -> None:
    served = serve(Transport(tls=PLAIN))
    context = ssl.create_default_context(cafile=str(PKI / "root.pem"))
    context.set_alpn_protocols(["h2"])
    with H2Client(("127.0.0.1", served.port), context) as asked:
        assert asked.finish(asked.call(LIVE))["grpc-status"] == "0"
        assert isinstance(asked.socket, ssl.SSLSocket)
        assert asked.socket.version() in {"TLSv1.2", "TLSv1.3"}


NONE = "the file holds no valid PEM"


@pytest.mark.parametrize(
    ("tls", "text"),
    [
        (replace(PLAIN, server_cert=b""), f"--grpc-server-cert: {NONE} certificate (no certificate or crl found)"),
        (replace(PLAIN, server_cert=pem("server.key")), f"--grpc-server-cert: {NONE} certificate"),
        (replace(PLAIN, server_cert=pem("server.pem")[:300]), f"--grpc-server-cert: {NONE} certificate"),
        (replace(PLAIN, server_key=b"\0\xff"), f"--grpc-server-key: {NONE} private key"),
        (replace(PLAIN, server_key=pem("server.pem")), f"--grpc-server-key: {NONE} private key"),
        (
            replace(PLAIN, server_key=pem("client.key")),
            "--grpc-server-key: the key is not that of the certificate in --grpc-server-cert",
        ),
        (
            replace(PLAIN, server_key=pem("server_encrypted.key")),
            "--grpc-server-key: the key is encrypted, and only a key without a password can be used",
        ),
        (replace(PLAIN, root_cert=b"nothing"), f"--grpc-root-cert: {NONE} certificate"),
    ],
)
def test_the_error_of_an_unusable_certificate_names_the_flag(serve: Callable, tls: Tls, text: str) -> None:
    with pytest.raises(OSError, match=re.escape(f"failed to start GRPC service: {text}")):
        serve(Transport(tls=tls))
