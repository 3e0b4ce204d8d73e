"""HTTP and metrics over unix sockets."""

import socket
from pathlib import Path
from typing import Any

from halimede.frontends.http.server import HttpServer
from halimede.frontends.metrics import MetricsServer
from halimede.frontends.sockets import bind, bound_port

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def ask(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as reader:
        connection.settimeout(20)
        connection.connect(str(path))
        connection.sendall(LIVE)
        return reader.read()


def test_a_unix_socket_serves_and_is_removed_at_the_end(http: Any, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    for end in ("drain", "close"):
        server = http.call(lambda: HttpServer(http.core, max_input_size=1000, log=http.log.append))
        sockets = bind(f"unix:{path}", 8000, "HTTP")
        assert bound_port(sockets) == 0
        http.call(lambda: server.serve(sockets))  # noqa: B023  it is called at once
        assert ask(path).startswith(b"HTTP/1.1 200 OK\r\n")
        http.run(getattr(server, end)())
        assert not path.exists()
        http.run(server.close())


def test_metrics_have_unix_sockets_too(http: Any, tmp_path: Path) -> None:
    server = http.call(lambda: MetricsServer(lambda: iter(()), log=http.log.append))
    http.call(lambda: server.serve(bind(f"unix:{tmp_path}/m", 0, "Metrics")))
    assert ask(tmp_path / "m").startswith(b"HTTP/1.1 200 OK\r\n")
    http.run(server.close())
