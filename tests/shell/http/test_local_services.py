"""Services in the process of the core: their ports, and how they end."""

from pathlib import Path
from typing import Any

from halimede.core.observe.start_summary import HTTP, METRICS
from halimede.front_processes.services import LocalService
from halimede.frontends.http.server import HttpServer
from halimede.frontends.metrics import MetricsServer
from halimede.settings import Settings


def test_a_service_that_never_started_frees_its_port(http: Any, tmp_path: Path) -> None:
    settings = Settings(http_address=f"unix:{tmp_path}/http")
    server = http.call(lambda: HttpServer(http.core, max_input_size=1000, log=http.log.append))
    service = LocalService(HTTP, settings, server)
    assert service.bind() == {HTTP: f"unix:{tmp_path}/http"}
    assert (tmp_path / "http").is_socket()
    http.run(service.close())
    assert not (tmp_path / "http").exists()


def test_metrics_are_served_until_the_service_closes(http: Any) -> None:
    settings = Settings(metrics_address="127.0.0.1", metrics_port=0)
    service = LocalService(METRICS, settings, http.call(lambda: MetricsServer(lambda: iter(()), log=http.log.append)))
    address = service.bind()[METRICS]
    http.run(service.start())
    http.call(service.send_away)
    http.run(service.drain())
    http.port = int(address.rpartition(":")[2])
    assert http.ask("GET", "/").status == 200
    assert "connection" not in http.ask("GET", "/").headers
    http.run(service.close())
