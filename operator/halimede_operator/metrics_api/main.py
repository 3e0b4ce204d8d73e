"""The process of `halimede-operator metrics-api`."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

import yaml
from kubernetes.aio.config import ConfigException

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.errors import ApiError
from halimede_operator.log import set_up_logging
from halimede_operator.metrics_api.cluster import Cluster
from halimede_operator.metrics_api.core import ownership
from halimede_operator.metrics_api.core.errors import MetricsError
from halimede_operator.metrics_api.core.identity import read_front_proxy
from halimede_operator.metrics_api.core.rules import Rules, parse_rules
from halimede_operator.metrics_api.metrics import Metrics
from halimede_operator.metrics_api.prometheus import Prometheus
from halimede_operator.metrics_api.server import Server
from halimede_operator.metrics_api.service import Service
from halimede_operator.metrics_api.settings import Settings, parse
from halimede_operator.metrics_api.tls import Tls
from halimede_operator.probes import serve_metrics, serve_probes

log = logging.getLogger(__name__)

EXIT_USAGE = 2
REFRESH_S = 10.0
RETRY_S = 2.0


def main(arguments: Sequence[str]) -> int:
    settings = parse(arguments)
    set_up_logging(settings.log_format)
    return asyncio.run(MetricsApi(settings).run())


class MetricsApi:
    """All parts of the process. They share one event loop."""

    def __init__(self, settings: Settings, *, refresh_s: float = REFRESH_S) -> None:
        """refresh_s: how often certificates and the owner of the API are read again."""
        self._settings = settings
        self._refresh_s = refresh_s
        self._connection = Connection(settings.kubeconfig)
        self._own = ownership.Service(settings.service_namespace, settings.service_name)
        self._unread: str | None = "the API server was not asked yet"
        """Why we are not ready: what could not be read since the start."""
        self._told: dict[str, str | None] = {}
        """The last line of each subject, so that only changes are logged."""

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT. Return the exit status."""
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        try:
            rules = load_rules(self._settings)
            self._tls = Tls(self._settings.tls_cert_file, self._settings.tls_key_file)
            await self._connection.refresh()
        except (ConfigException, OSError, ValueError) as error:
            log.error("%s", error)
            return EXIT_USAGE
        self._cluster = Cluster(self._connection)
        settings = self._settings
        metrics = Metrics(time.monotonic)
        self._prometheus = Prometheus(
            settings.prometheus_url, settings.prometheus_token_file, settings.prometheus_ca_file, metrics
        )
        self._service = Service(rules, self._prometheus, self._cluster)
        closers: list[Callable[[], Awaitable[None]]] = [self._cluster.close, self._prometheus.close]
        try:
            probes = await serve_probes(settings.health_port, lambda: None, lambda: self._unread)
            closers.insert(0, probes.cleanup)
            closers.insert(0, (await serve_metrics(settings.metrics_port, metrics.text)).cleanup)
            closers.insert(0, await Server(self._service, self._tls, metrics).start(settings.port))
            await self._refresh_until(stopping)
        except OSError as error:
            log.error("a port cannot be opened: %s", error)
            return EXIT_USAGE
        finally:
            for close in closers:
                await close()
        return 0

    async def _refresh_until(self, stopping: asyncio.Event) -> None:
        """Keep up with certificates, with the owner of the API and with Prometheus."""
        while not stopping.is_set():
            await self._refresh()
            if self._unread is None:
                await self._check_prometheus()
            try:
                async with asyncio.timeout(self._refresh_s if self._unread is None else RETRY_S):
                    await stopping.wait()
            except TimeoutError:
                pass

    async def _refresh(self) -> None:
        try:
            front_proxy = read_front_proxy(await self._cluster.authentication_config())
            self._tls.trust(front_proxy.authority)
            self._service.front_proxy = front_proxy
            self._tell("front proxy", None)
        except (ApiError, ValueError, OSError) as error:
            self._tell("front proxy", f"kube-system/extension-apiserver-authentication cannot be used: {error}")
        try:
            self._tls.reload()
            self._tell("certificate", None)
        except OSError as error:
            self._tell("certificate", f"the changed certificate cannot be used: {error}")
        try:
            current = await self._cluster.service_of_api(ownership.OURS)
            earlier = await self._cluster.service_of_api(ownership.EARLIER)
            self._service.why_not_serving = ownership.why_not_serving(self._own, current)
            is_owner_known = True
            self._tell("owner", self._service.why_not_serving or ownership.warning(self._own, current, earlier))
        except ApiError as error:
            is_owner_known = False
            self._tell("owner", f"the owner of the API is unknown: {error}")
        # The last values that were read are used while the API server cannot be asked.
        if self._service.front_proxy is not None and (is_owner_known or self._unread is None):
            self._unread = None
        else:
            self._unread = self._told.get("front proxy") or self._told.get("owner")

    async def _check_prometheus(self) -> None:
        """Ask Prometheus, also without requests: an outage is in the log before an HPA meets it."""
        try:
            await self._prometheus.check()
            self._tell("Prometheus", None)
        except MetricsError as error:
            self._tell("Prometheus", error.message)

    def _tell(self, subject: str, what: str | None) -> None:
        if what != self._told.get(subject):
            self._told[subject] = what
            log.warning("%s", what) if what else log.info("%s: in order again", subject)


def load_rules(settings: Settings) -> Rules:
    """Raises ValueError or OSError."""
    try:
        rules = parse_rules(yaml.safe_load(settings.rules.read_text()))
    except yaml.YAMLError as error:
        raise ValueError(f"{settings.rules} is no YAML: {error}") from error
    if not isinstance(rules, Rules):
        raise ValueError(f"{settings.rules}: " + "; ".join(rules))
    return rules
