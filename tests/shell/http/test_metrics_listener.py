"""The metrics port."""

from typing import Any

import pytest

from halimede.frontends.metrics import MetricsServer

PAGE = b"# TYPE x counter\nx 1\n"


@pytest.fixture
def metrics(serve: Any) -> Any:
    return serve(make=lambda _core, log: MetricsServer(lambda: PAGE, log=log.append))


def seen(running: Any, method: str, path: str) -> tuple[int, str, bytes]:
    answer = running.ask(method, path)
    return answer.status, answer.headers["content-type"], answer.body


def test_metrics_are_text(metrics: Any) -> None:
    assert seen(metrics, "GET", "/metrics") == (200, "text/plain; charset=utf-8", PAGE)
    assert seen(metrics, "GET", "/metrics?name=x") == (200, "text/plain; charset=utf-8", PAGE)


def test_other_methods_are_not_allowed(metrics: Any) -> None:
    for path in ("/metrics", "/"):
        answer = metrics.ask("POST", path, b"x")
        assert (answer.status, answer.headers["allow"], answer.body) == (405, "GET", b'{"error":"Method Not Allowed"}')


def test_other_paths_are_empty(metrics: Any) -> None:
    for path in ("/", "/metrics/", "/v2"):
        assert seen(metrics, "GET", path) == (200, "text/plain; charset=utf-8", b"")


def test_a_page_that_cannot_be_rendered_is_a_500(serve: Any) -> None:
    def fail() -> bytes:
        raise RuntimeError("secret")

    running = serve(make=lambda _core, log: MetricsServer(fail, log=log.append))
    assert running.ask("GET", "/metrics").status == 500
    assert running.log[0].startswith("Metrics service: unexpected error in <Exchange GET /metrics>: ")
    assert running.ask("GET", "/").status == 200


def test_a_scraper_keeps_its_connection(metrics: Any) -> None:
    with metrics.connect() as connection, connection.makefile("rb") as reader:
        for last in (False, True):
            connection.sendall(b"GET /metrics HTTP/1.1\r\n" + (b"Connection: close\r\n" if last else b"") + b"\r\n")
        assert reader.read().count(PAGE) == 2
