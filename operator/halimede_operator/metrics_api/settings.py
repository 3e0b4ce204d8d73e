"""The command line of `halimede-operator metrics-api`. Every flag is also a variable, HALIMEDE_METRICS_API_<FLAG>."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click

from halimede_operator.command_line import pods_namespace, run_command

FILE = click.Path(path_type=Path)


@dataclass(frozen=True, slots=True)
class Settings:
    rules: Path
    prometheus_url: str
    """Without a slash at the end."""
    prometheus_token_file: Path | None
    prometheus_ca_file: Path | None
    tls_cert_file: Path
    tls_key_file: Path
    service_namespace: str
    service_name: str
    port: int
    health_port: int
    metrics_port: int
    log_format: str
    kubeconfig: str | None
    """None: use the pod's service account."""


def parse(arguments: Sequence[str]) -> Settings:
    """Exits as click does, for --help and for invalid flags."""
    return run_command(_command, Settings, arguments, "halimede-operator metrics-api")


def _url(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and not parts.fragment
    except ValueError:
        is_valid = False
    if not is_valid:
        raise click.BadParameter(f"{value!r} is no address; write http://HOST:PORT, a path may follow")
    return value.rstrip("/")


@click.command(context_settings={"auto_envvar_prefix": "HALIMEDE_METRICS_API", "show_default": True})
@click.option("--rules", type=FILE, required=True, help="File with the metrics and their queries.")
@click.option("--prometheus-url", required=True, callback=_url, help="Where Prometheus' HTTP API is.")
@click.option(
    "--prometheus-token-file", type=FILE, help="File with a bearer token for Prometheus; read for each query."
)
@click.option("--prometheus-ca-file", type=FILE, help="CAs that sign Prometheus' certificate; the system's by default.")
@click.option(
    "--tls-cert-file", type=FILE, required=True, help="Certificate of this server; read again when it changes."
)
@click.option("--tls-key-file", type=FILE, required=True)
@click.option("--service-name", required=True, help="Service of this server, which the APIService must name.")
@click.option("--service-namespace", help="Namespace of that Service; the pod's by default.")
@click.option("--port", type=click.IntRange(0, 65535), default=6443)
@click.option("--health-port", type=click.IntRange(0, 65535), default=8080, help="For /healthz and /readyz.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=9090, help="For /metrics.")
@click.option("--log-format", type=click.Choice(["json", "text"]), default="json")
@click.option(
    "--kubeconfig", envvar="KUBECONFIG", help="Credentials outside of a cluster; the pod's service account by default."
)
def _command(service_namespace: str | None, **given: object) -> Settings:
    """Serves custom.metrics.k8s.io/v1beta2, the metrics of HorizontalPodAutoscalers, out of Prometheus."""
    return Settings(service_namespace=service_namespace or pods_namespace(), **given)  # type: ignore[arg-type]  # click's
