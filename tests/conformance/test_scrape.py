"""The metrics port of a server with many models: rendering a large page does not delay other requests."""

import http.client
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.calls import ONES_JSON, load
from support.models import add_identity
from support.open_loop import Phase, Stream, run_phases
from support.served import Stage
from support.server import RunningServer, Start

ONE = "instance_group { kind: KIND_CPU count: 1 }"

Serve = Callable[..., RunningServer]


@pytest.fixture
def serve(start: Start, repository: Path) -> Serve:
    def serve(models: int, *arguments: str) -> RunningServer:
        for number in range(models):
            add_identity(repository, f"m{number}", extra=ONE)
        return start("--model-repository", repository, *arguments)

    return serve


def scrape_seconds(server: RunningServer) -> float:
    """The shortest of some scrapes, which excludes other load of the machine."""
    times = []
    for _ in range(5):
        begun = time.monotonic()
        server.metrics()
        times.append(time.monotonic() - begun)
    return min(times)


def check_many(serve: Serve, models: int, limit_secs: float) -> None:
    server = serve(models)
    assert server.post(f"/v2/models/m{models - 1}/infer", ONES_JSON).status == 200
    page = server.metrics()
    # The parser takes longer for the whole page than the server to make it.
    lines = "".join(line for line in page.splitlines(keepends=True) if "nv_inference_request_success" in line)
    (family,) = text_string_to_metric_families(lines)
    success = {sample.labels["model"]: sample.value for sample in family.samples}
    assert success == {f"m{number}": float(number == models - 1) for number in range(models)}

    seconds = scrape_seconds(server)
    print(f"{models} models: {len(page) >> 10} KiB in {seconds * 1000:.0f} ms")
    assert seconds <= limit_secs

    # Continuous scrapes, with health requests in parallel.
    streams = (
        Stream("scrape", server.metrics_port, "/metrics", callers=1),
        Stream("health", server.http_port, "/v2/health/live", rate=100),
    )
    (seen,) = run_phases([Phase(0.5, streams)])
    print(f"health meanwhile: p50 {seen['health'].quantile_ms(200, 0.5):.1f} ms")
    print(f"health meanwhile: p99 {seen['health'].quantile_ms(200, 0.99):.1f} ms")
    assert seen["health"].latencies_ms.keys() == seen["scrape"].latencies_ms.keys() == {"200"}
    # A rendering step takes about a millisecond; a page rendered in one step would block health for half of its time.
    assert seen["health"].quantile_ms(200, 0.5) <= 10 + 0.2 * seconds * 1000


def test_a_scrape_of_many_models_does_not_block_requests(serve: Serve) -> None:
    check_many(serve, 200, limit_secs=0.2)


@pytest.mark.load
@pytest.mark.timeout(300)
def test_a_scrape_of_a_thousand_models_does_not_block_requests(serve: Serve) -> None:
    begun = time.monotonic()
    check_many(serve, 1000, limit_secs=0.1)
    print(f"in all {time.monotonic() - begun:.1f} s")


def test_a_scraper_that_does_not_read_delays_no_other(serve: Serve) -> None:
    server = serve(100)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.metrics_port))
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        for _ in range(3):
            assert server.metrics().count("\nnv_inference_count{") == 100
        assert server.get("/v2/health/live").status == 200


def test_tags_of_a_configuration_stay_inside_their_labels(stage: Stage) -> None:
    hostile = 'a\\"} 1\\nnv_fake{b=\\"'
    add_identity(stage.repository, "tagged", extra=f'metric_tags {{ key: "{hostile}" value: "{hostile}" }}')
    assert load(stage.server, "tagged") == (200, "")
    families = {family.name: family for family in text_string_to_metric_families(stage.server.metrics())}
    assert "nv_fake" not in families
    (labels,) = (each.labels for each in families["nv_inference_count"].samples if each.labels["model"] == "tagged")
    assert sorted(labels.values()) == ["1", 'a"} 1\nnv_fake{b="', "tagged"]


def test_counter_latencies_can_be_left_out(serve: Serve) -> None:
    server = serve(1, "--metrics-config=counter_latencies=false")
    page = server.metrics()
    assert "nv_inference_request_duration_us" not in page
    assert 'nv_inference_request_success{model="m0",version="1"} 0' in page


def test_the_metrics_port_answers_until_the_server_exits(serve: Serve) -> None:
    """The last counters of a stopping server can be scraped."""
    server = serve(1, "--drain-delay=2")
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=30)
    connection.request("GET", "/metrics")
    assert connection.getresponse().read()
    server.process.terminate()
    connection.request("GET", "/metrics")
    assert connection.getresponse().status == 200
    connection.close()
    assert server.process.wait(20) == 0
