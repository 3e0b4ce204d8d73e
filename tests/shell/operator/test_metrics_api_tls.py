"""TLS of the metrics API: which certificate a connection gets, and whose it accepts."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.pki import Authority
from halimede_operator.metrics_api.core.identity import Certificate
from halimede_operator.metrics_api.tls import Tls


async def seen(tls: Tls, *clients: Callable[[int], None]) -> list[str | None]:
    """Connect the clients one after another, each with the port; the common name of each one's certificate."""
    names: list[str | None] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        certificate: Certificate | None = tls.certificate_of(writer.get_extra_info("ssl_object"))
        names.append(certificate.common_name if certificate else None)
        writer.write(b"done")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls.listening)
    async with server:
        for client in clients:
            await asyncio.to_thread(client, server.sockets[0].getsockname()[1])
    return names


def client_context(server: Authority, folder: Path | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=server.certificate.decode())
    if folder is not None:
        context.load_cert_chain(folder / "client.crt", folder / "client.key")
    return context


def connect(
    port: int, context: ssl.SSLContext, name: str | None = None, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """The session of a finished connection, and whether it resumed the given one."""
    with (
        socket.create_connection(("127.0.0.1", port), 60) as raw,
        context.wrap_socket(raw, server_hostname=name, session=session) as connection,
    ):
        assert connection.recv(4) == b"done"
        return connection.session, bool(connection.session_reused)


@pytest.fixture
def serving(tmp_path: Path) -> Authority:
    authority = Authority("serving-ca")
    authority.issue("serving", "", "127.0.0.1").write(tmp_path / "serving")
    return authority


@pytest.mark.parametrize("name", [None, "metrics.halimede.svc"])
def test_a_connection_gets_the_newest_certificates(serving: Authority, tmp_path: Path, name: str | None) -> None:
    tls = Tls(tmp_path / "serving.crt", tmp_path / "serving.key")
    proxy = Authority("front-proxy-ca")
    proxy.issue("front-proxy").write(tmp_path / "client")
    tls.trust(proxy.certificate.decode())
    renewed = Authority("serving-ca-2")

    def before(port: int) -> None:
        connect(port, client_context(serving, tmp_path), name)

    def after(port: int) -> None:
        renewed.issue("serving", "", "127.0.0.1").write(tmp_path / "serving")
        tls.reload()
        connect(port, client_context(renewed, tmp_path), name)

    assert asyncio.run(seen(tls, before, after)) == ["front-proxy", "front-proxy"]


def test_no_session_is_resumed_and_none_is_older_than_tls_1_3(serving: Authority, tmp_path: Path) -> None:
    tls = Tls(tmp_path / "serving.crt", tmp_path / "serving.key")

    def twice(port: int) -> None:
        context = client_context(serving)
        session, _ = connect(port, context)
        assert connect(port, context, session=session)[1] is False
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            connect(port, context)

    assert asyncio.run(seen(tls, twice)) == [None, None]


def test_files_that_do_not_fit_leave_the_former_ones(serving: Authority, tmp_path: Path) -> None:
    tls = Tls(tmp_path / "serving.crt", tmp_path / "serving.key")
    (tmp_path / "serving.crt").write_text("half a certificate")
    with pytest.raises(OSError, match="PEM"):
        tls.reload()
    with pytest.raises(OSError, match=r"PEM|certificate"):
        tls.trust("no certificate")
    assert asyncio.run(seen(tls, lambda port: void(connect(port, client_context(serving))))) == [None]


def void(_: object) -> None: ...
