"""Encrypted connections: what the port does for a client before the protocol begins, on both event loops."""

import asyncio
import logging
import socket
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

from halimede.frontends.port import PortLimits
from support.echo import PAGE

PKI = Path(__file__).parents[2] / "support/pki"


def server_context(*, mutual: bool = False) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PKI / "server.pem", PKI / "server.key")
    if mutual:
        context.load_verify_locations(PKI / "root.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(root: str = "root.pem") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=PKI / root)
    context.load_cert_chain(PKI / "client.pem", PKI / "client.key")
    return context


def encrypted(running: Any, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
    return (context or client_context()).wrap_socket(running.connect(), server_hostname="localhost")


def ask(connection: socket.socket) -> bytes:
    connection.sendall(b"x")
    return connection.recv(100)


@pytest.mark.parametrize("mutual", [False, True])
def test_clients_are_served(serve: Any, each_loop: Any, mutual: bool) -> None:
    running = serve(tls=server_context(mutual=mutual), loop_factory=each_loop)
    with encrypted(running) as client:
        assert ask(client) == b"x"
        client.sendall(b"page")
        left = len(PAGE)
        while left:
            left -= len(client.recv(1 << 20))


def test_a_handshake_that_takes_too_long_is_ended_and_counts_until_then(serve: Any, each_loop: Any) -> None:
    running = serve(
        PortLimits(max_connections=1, reserved_connections=0, handshake_timeout_s=0.3),
        tls=server_context(),
        loop_factory=each_loop,
    )
    with running.connect() as silent:
        running.wait_until(lambda: repr(running.port) == "<Port Echo connections=0+1>")
        with running.connect() as second:
            assert second.recv(100) == b""  # no answer, which would have to be encrypted
        assert silent.recv(100) == b""
    running.wait_until(lambda: repr(running.port) == "<Port Echo connections=0+0>")
    with encrypted(running) as client:
        assert ask(client) == b"x"
    assert len(running.log) == 1
    assert "1 connections are open, as many as are served" in running.log[0]


def test_failed_handshakes_log_nothing(serve: Any, each_loop: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    running = serve(PortLimits(handshake_timeout_s=0.3), tls=server_context(mutual=True), loop_factory=each_loop)
    # Not TLS, the beginning of a handshake, nothing at all, a client that does not trust the server, one without a
    # certificate.
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01", b""):
        with running.connect() as client:
            client.sendall(data)
            client.settimeout(5)
            while client.recv(100):
                pass
    with pytest.raises(ssl.SSLError):
        encrypted(running, client_context("stranger_root.pem"))
    with encrypted(running, ssl.create_default_context(cafile=PKI / "root.pem")) as anonymous:
        # The client's side of the handshake is complete before the server asks for the certificate.
        assert anonymous.recv(100) == b""
    with running.connect() as gone:
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with encrypted(running) as client:
        assert ask(client) == b"x"
    running.wait_until(lambda: running.port.connection_count == 0)
    assert (running.log, [record.message for record in caplog.records]) == ([], [])


def test_the_last_handshakes_get_a_limited_time(serve: Any, each_loop: Any) -> None:
    running = serve(tls=server_context(), loop_factory=each_loop)
    with running.connect() as silent, encrypted(running) as client:
        assert ask(client) == b"x"
        begun = time.monotonic()
        running.run(running.port.stop_accepting())
        assert time.monotonic() - begun < 5  # the goal is 1 s; the timeout of a handshake is 10 s
        assert silent.recv(100) == b""
        assert ask(client) == b"x"


def test_close_ends_handshakes(serve: Any, each_loop: Any) -> None:
    running = serve(tls=server_context(), loop_factory=each_loop)
    with running.connect() as silent:
        asyncio.run_coroutine_threadsafe(running.port.stop_accepting(), running.loop)
        running.run(running.port.close())
        assert silent.recv(100) == b""
    assert running.log == []
