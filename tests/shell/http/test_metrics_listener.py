"""The metrics port."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from halimede.frontends.metrics import MetricsServer

PARTS = [b"# TYPE x counter\n", b"x 1\n"]
PAGE = b"".join(PARTS)


def render() -> Iterator[None]:
    yield
    return PARTS


@pytest.fixture
def metrics(serve: Any) -> Any:
    return serve(make=lambda _core, log: MetricsServer(render, log=log.append))


def seen(running: Any, method: str, path: str) -> tuple[int, str, bytes]:
    answer = running.ask(method, path)
    return answer.status, answer.headers["content-type"], answer.body


def test_metrics_are_in_text_format(metrics: Any) -> None:
    assert seen(metrics, "GET", "/metrics") == (200, "text/plain; charset=utf-8", PAGE)
    assert seen(metrics, "GET", "/metrics?name=x") == (200, "text/plain; charset=utf-8", PAGE)


def test_other_methods_are_not_allowed(metrics: Any) -> None:
    for path in ("/metrics", "/"):
        answer = metrics.ask("POST", path, b"x")
        assert (answer.status, answer.headers["allow"], answer.body) == (405, "GET", b'{"error":"Method Not Allowed"}')


def test_other_paths_have_an_empty_answer(metrics: Any) -> None:
    for path in ("/", "/metrics/", "/v2"):
        assert seen(metrics, "GET", path) == (200, "text/plain; charset=utf-8", b"")


def test_a_page_that_cannot_be_rendered_is_a_500(serve: Any) -> None:
    def fail() -> Iterator[None]:
        yield
        raise RuntimeError("secret")

    running = serve(make=lambda _core, log: MetricsServer(fail, log=log.append))
    assert running.ask("GET", "/metrics").status == 500
    assert running.log[0].startswith("Metrics service: unexpected error in <Exchange GET /metrics>: ")
    assert running.ask("GET", "/").status == 200


def test_a_scraper_keeps_its_connection(metrics: Any) -> None:
    with metrics.connect() as connection, connection.makefile("rb") as reader:
        for last in (False, True):
            connection.sendall(
                b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + (b"Connection: close\r\n" if last else b"") + b"\r\n"
            )
        assert reader.read().count(PAGE) == 2


def test_other_requests_are_answered_while_a_page_is_rendered(serve: Any) -> None:
    """A page of many models takes long to render; only its scraper waits."""
    is_asked = threading.Event()

    def until_asked() -> Iterator[None]:
        while not is_asked.is_set():
            yield
        return PARTS

    running = serve(make=lambda _core, log: MetricsServer(until_asked, log=log.append))
    with running.connect() as connection, connection.makefile("rb") as reader:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert running.ask("GET", "/").status == 200
        is_asked.set()
        assert reader.read().endswith(PAGE)


def test_the_number_of_concurrent_scrapers_is_limited(serve: Any) -> None:
    running = serve(make=lambda _core, log: MetricsServer(render, log=log.append))
    connections = [running.connect() for _ in range(65)]
    try:
        for connection in connections[:64]:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert connections[64].recv(12) == b"HTTP/1.1 503"
    finally:
        for connection in connections:
            connection.close()
