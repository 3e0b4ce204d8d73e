"""The metrics listener: GET /metrics on a port of its own."""

from collections.abc import Callable

from halimede.core.wire.http_control import error_json
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.protocol import JSON, PLAIN_TEXT, Exchange
from halimede.frontends.http.routes import path_of

_MAX_BODY_BYTES = 64 << 10


class MetricsServer(Listener):
    """Serves what `render` returns, a text in Prometheus' format. See `Listener` for start, serve, drain and close."""

    def __init__(
        self, render: Callable[[], bytes], *, log: Callable[[str], None], limits: Limits | None = None
    ) -> None:
        super().__init__(self._answer, service="Metrics", max_body=_MAX_BODY_BYTES, log=log, limits=limits or Limits())
        self._render = render

    def _answer(self, exchange: Exchange) -> None:
        if exchange.head.method != b"GET":
            exchange.respond(405, JSON + b"Allow: GET\r\n", (error_json("Method Not Allowed"),))
        elif path_of(exchange.head.target) != b"/metrics":
            exchange.respond(200, PLAIN_TEXT)  # As Triton does: probes of all kinds point at this port.
        else:
            exchange.respond(200, PLAIN_TEXT, (self._render(),))
