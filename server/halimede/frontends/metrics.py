"""The metrics listener: GET /metrics on its own port."""

from collections.abc import Callable, Sequence

from halimede.core.observe.access_lines import AccessLog, Protocol
from halimede.core.types import Buffer
from halimede.core.wire.http_control import error_json
from halimede.core.wire.steps import Steps
from halimede.frontends.http.answers import respond_error
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.outbox import JSON, PLAIN_TEXT
from halimede.frontends.http.routes import path_of
from halimede.frontends.port import PortLimits
from halimede.frontends.steps import StepQueue

_MAX_BODY_BYTES = 64 << 10
_MAX_CONNECTIONS = 64
"""The page of a thousand models is 5 MB, and a scraper may take a minute to read it."""
_SPARE_DESCRIPTORS = 8
"""Fewer than the HTTP front end leaves, so that metrics are served while it refuses connections."""


class MetricsServer(Listener):
    """Serves the page that `render` makes in steps, in Prometheus' text format, until the server ends.

    See `Listener` for serve and close.
    """

    def __init__(
        self,
        render: Callable[[], Steps[Sequence[Buffer]]],
        *,
        log: Callable[[str], None],
        access_log: AccessLog | None = None,
        log_request: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            self._answer,
            service="Metrics",
            max_body=_MAX_BODY_BYTES,
            log=log,
            limits=Limits(),
            port_limits=PortLimits(
                max_connections=_MAX_CONNECTIONS, spare_descriptors=_SPARE_DESCRIPTORS, reserved_connections=0
            ),
            protocol=Protocol.METRICS,
            access_log=access_log,
            log_request=log_request,
        )
        self._render = render
        self._steps = StepQueue()

    def send_away(self) -> None:
        """No effect: the metrics of a server that stops are read, too."""

    async def drain(self) -> None:
        """Return at once, and continue to serve."""

    def _answer(self, exchange: Exchange) -> None:
        if exchange.head.method != b"GET":
            exchange.respond(405, JSON + b"Allow: GET\r\n", (error_json("Method Not Allowed"),))
        elif path_of(exchange.head.target) != b"/metrics":
            exchange.respond(200, PLAIN_TEXT)  # As in Triton: probes of all kinds use this port.
        else:
            self._steps.run(
                exchange,
                self._render(),
                lambda parts: exchange.respond(200, PLAIN_TEXT, parts),
                lambda error: respond_error(exchange, error),
            )
