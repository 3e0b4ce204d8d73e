"""Listening sockets: unix paths, shared ports, and options that accepted sockets inherit."""

import os
import socket
import stat
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from halimede.core.types import ErrorCode, InferenceError
from halimede.frontends.http.server import HttpServer
from halimede.frontends.http.sockets import bind
from halimede.frontends.metrics import MetricsServer

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def ask(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as reader:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(LIVE)
        return reader.read()


def http_server(running: Any) -> HttpServer:
    made: HttpServer = running.call(lambda: HttpServer(running.core, max_input_size=1000, log=running.log.append))
    return made


def error(address: str, port: int = 0, *, reuse_port: bool = False) -> str:
    with pytest.raises(InferenceError) as raised:
        bind(address, port, "HTTP", reuse_port=reuse_port).close()
    assert raised.value.code is ErrorCode.UNAVAILABLE
    return raised.value.message.removeprefix("failed to start HTTP service: Socket ")


def test_a_unix_socket_serves_and_is_removed_at_the_end(http: Any, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    for end in ("drain", "close"):
        server = http_server(http)
        assert http.run(server.start(f"unix:{path}", 8000)) == 0
        assert ask(path).startswith(b"HTTP/1.1 200 OK\r\n")
        http.run(getattr(server, end)())
        assert not path.exists()
        http.run(server.close())


def test_metrics_have_unix_sockets_too(http: Any, tmp_path: Path) -> None:
    server = http.call(lambda: MetricsServer(lambda: iter(()), log=http.log.append))
    assert http.run(server.start(f"unix:{tmp_path}/m", 0)) == 0
    assert ask(tmp_path / "m").startswith(b"HTTP/1.1 200 OK\r\n")
    http.run(server.close())


def test_the_socket_of_a_dead_server_is_replaced_and_of_a_live_one_is_not(http: Any, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    bind(f"unix:{path}", 0, "HTTP").close()  # like a server that was killed
    assert stat.S_ISSOCK(path.stat().st_mode)
    server = http_server(http)
    http.run(server.start(f"unix:{path}", 0))
    assert error(f"unix:{path}") == f"'unix:{path}' already in use"
    assert ask(path).startswith(b"HTTP/1.1 200 OK\r\n")
    http.run(server.close())


def test_a_live_server_is_detected_even_if_it_accepts_nothing(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(tmp_path / "s"))
        busy.listen(0)
        waiting.connect(str(tmp_path / "s"))
        assert error(f"unix:{tmp_path}/s") == f"'unix:{tmp_path}/s' already in use"


def test_only_a_socket_is_ever_removed(http: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "directory").mkdir()
    bind(f"unix:{tmp_path}/dead", 0, "HTTP").close()
    (tmp_path / "link").symlink_to(tmp_path / "dead")
    for name in ("file", "directory", "link"):
        where = f"unix:{tmp_path}/{name}"
        assert error(where) == f"'{where}' cannot be opened: another file of this name exists and is not a socket"
    assert (tmp_path / "file").read_text() == "precious"

    server = http_server(http)
    http.run(server.start(f"unix:{tmp_path}/s", 0))
    (tmp_path / "s").unlink()
    (tmp_path / "s").write_text("another's")
    http.run(server.close())
    assert (tmp_path / "s").read_text() == "another's"


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    assert error("unix:") == "'unix:' cannot be opened: unix: has no path after it"
    assert error(f"unix:{tmp_path}/no/such") == f"'unix:{tmp_path}/no/such' cannot be opened: No such file or directory"
    long = f"unix:{tmp_path}/{'x' * 200}"
    assert error(long) == f"'{long}' cannot be opened: AF_UNIX path too long"


def test_the_umask_sets_the_permissions_of_a_unix_socket(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        bind(f"unix:{tmp_path}/s", 0, "HTTP").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


def test_servers_share_a_port_only_if_all_request_it() -> None:
    with bind("127.0.0.1", 0, "HTTP", reuse_port=True) as first:
        port = first.getsockname()[1]
        assert error("127.0.0.1", port) == f"'127.0.0.1:{port}' already in use"
        with bind("127.0.0.1", port, "HTTP", reuse_port=True) as second:
            assert second.getsockname() == first.getsockname()
    with bind("127.0.0.1", 0, "HTTP") as alone:
        port = alone.getsockname()[1]
        assert error("127.0.0.1", port, reuse_port=True) == f"'127.0.0.1:{port}' already in use"


def test_two_servers_on_one_port_both_serve(serve: Any) -> None:
    first = serve(sock=bind("127.0.0.1", 0, "HTTP", reuse_port=True))
    second = serve(sock=bind("127.0.0.1", first.port, "HTTP", reuse_port=True))
    clients = [HTTPConnection("127.0.0.1", first.port, timeout=20) for _ in range(100)]
    for client in clients:
        client.request("GET", "/v2/health/live")
        assert client.getresponse().read() == b""
    counts = [running.listener.connection_count for running in (first, second)]
    assert sum(counts) == 100
    assert min(counts) > 0  # the chance of a false failure is 2^-99
    for client in clients:
        client.close()


def test_keepalive_detects_a_vanished_peer_within_two_minutes(http: Any) -> None:
    accepted: list[socket.socket] = []
    with http.connect() as client:
        client.sendall(LIVE[:10])
        http.wait_until(lambda: http.listener.connection_count == 1)
        # The test's process has both ends: the peer name of the other end is this socket's name.
        for number in os.listdir("/proc/self/fd"):
            try:
                found = socket.socket(fileno=os.dup(int(number)))
            except OSError:
                continue
            try:
                if found.family == socket.AF_INET and found.getpeername() == client.getsockname():
                    accepted.append(found)
                    continue
            except OSError:
                pass
            found.close()
        (server_side,) = accepted
        with server_side:
            tcp = socket.IPPROTO_TCP
            assert server_side.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [
                server_side.getsockopt(tcp, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            ] == [60, 15, 4, 120_000]
            assert server_side.getsockopt(tcp, socket.TCP_NODELAY) == 1
