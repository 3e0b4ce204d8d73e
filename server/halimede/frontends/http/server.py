"""The HTTP front end: a listener that passes each exchange to the server by its route."""

import re
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from types import MappingProxyType

from halimede import __version__
from halimede.core.accounts import UNBOUNDED, MemoryBounds
from halimede.core.config.model_view import ModelView
from halimede.core.config.write import to_json
from halimede.core.observe.access_lines import AccessLog
from halimede.core.types import Buffer, InferenceError, Restrictions
from halimede.core.types.error import clip, unsupported
from halimede.core.wire.control_size import MAX_CONTROL_BYTES, control_too_large
from halimede.core.wire.forwarding import Forwarding
from halimede.core.wire.http_control import (
    decode_index_request,
    decode_load_request,
    decode_unload_request,
    devices_json,
    error_json,
    index_json,
    metadata_json,
    model_metadata_json,
    statistics_json,
)
from halimede.core.wire.shared_memory import unknown_region
from halimede.facade.server import Server
from halimede.frontends.finding import find_model
from halimede.frontends.http.answers import respond_error, respond_infer_error
from halimede.frontends.http.cors import Cors
from halimede.frontends.http.exchange import Exchange
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.generate import GenerateHandler
from halimede.frontends.http.infer import InferHandler
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.outbox import JSON, PLAIN_TEXT
from halimede.frontends.http.routes import Action, Route, resolve
from halimede.frontends.port import PortLimits
from halimede.frontends.steps import StepQueue
from halimede.frontends.totals import PortTotals
from halimede.frontends.turns import Turns

_NOT_FOUND = error_json(
    "Not Found: paths begin with /v2, such as GET /v2/health/ready, GET /v2/models/NAME, POST /v2/models/NAME/infer"
    " and, for the list of models, POST /v2/repository/index. Metrics are at /metrics of another port, 8002 by default."
    " The documentation of Halimede begins with docs/pages/quickstart.md."
)
# Halimede's version. The version in the body may be one of Triton's.
_SERVER = f"Server: halimede/{__version__}\r\n".encode()


class HttpServer(Listener):
    """Serves the inference protocol over HTTP. See `Listener` for serve, drain and close."""

    def __init__(
        self,
        server: Server,
        *,
        max_input_size: int,
        log: Callable[[str], None],
        restricted: Restrictions = MappingProxyType({}),
        forward: re.Pattern[str] | None = None,
        limits: Limits | None = None,
        port_limits: PortLimits | None = None,
        totals: PortTotals | None = None,
        memory: MemoryBounds = UNBOUNDED,
        turns: Turns | None = None,
        cors_origins: Collection[str] = (),
        access_log: AccessLog | None = None,
        log_request: Callable[[str], None] | None = None,
    ) -> None:
        """`max_input_size` bounds a body before and after decompression, in bytes; `log` gets internal faults.

        Headers whose whole name matches `forward` become parameters of inference requests. Pages of the sites
        `cors_origins` may call the server.
        """
        cors = Cors(cors_origins)
        super().__init__(
            # Without restrictions there is no cost.
            self._check_secret if restricted else self._route,
            service="HTTP",
            max_body=max_input_size,
            log=log,
            limits=limits or Limits(),
            port_limits=port_limits or PortLimits(),
            keep_names=forward is not None,
            totals=totals,
            memory=memory,
            turns=turns,
            cors=cors if cors_origins else None,
            access_log=access_log,
            log_request=log_request,
        )
        self._cors = cors
        self._model_server = server
        steps = StepQueue()
        forwarding = None if forward is None else Forwarding(forward, restricted)
        self._infer = InferHandler(server, steps, max_input_size=max_input_size, forward=forwarding).handle
        self._generating = GenerateHandler(server, steps, forward=forwarding, spawn=self.spawn)
        self._actions: dict[Action, Callable[[Exchange, Route], None]] = {
            Action.SERVER_METADATA: self._server_metadata,
            Action.SERVER_LIVE: self._server_live,
            Action.SERVER_READY: self._server_ready,
            Action.MODEL_METADATA: self._model_metadata,
            Action.MODEL_READY: self._model_ready,
            Action.MODEL_CONFIG: self._model_config,
            Action.MODEL_STATISTICS: self._model_statistics,
            Action.REPOSITORY_INDEX: self._repository_index,
            Action.DEVICES: self._devices,
            Action.MODEL_LOAD: self._model_load,
            Action.MODEL_UNLOAD: self._model_unload,
            Action.GENERATE: self._generate,
            Action.GENERATE_STREAM: self._generate,
            Action.SYSTEM_SHARED_MEMORY: _shared_memory,
            Action.CUDA_SHARED_MEMORY: _shared_memory,
            Action.TRACE: _unavailable_extension,
            Action.LOGGING: _unavailable_extension,
        }
        self._secrets = {action: restricted[action.category] for action in Action if action.category in restricted}

    def _check_secret(self, exchange: Exchange) -> None:
        """Checked before everything else of a route, so that a refused client learns nothing of what exists."""
        route = resolve(exchange.head.target)
        secret = None if route is None else self._secrets.get(route.action)
        # A browser asks without the secret whether a page may call, and learns nothing of what exists.
        if (
            route is None
            or secret is None
            or secret.is_given(exchange.head.headers.get(secret.header.encode("latin-1")))
            or self._cors.preflight_fields(exchange.head, route) is not None
        ):
            self._route(exchange)
            return
        text = f"This API is restricted, expecting header '{secret.header}'"
        exchange.respond(403, JSON, (error_json(text),))

    def _route(self, exchange: Exchange) -> None:
        route = resolve(exchange.head.target)
        if route is None:
            exchange.respond(404, JSON, (_NOT_FOUND,))
        elif exchange.head.method not in route.methods:
            if (fields := self._cors.preflight_fields(exchange.head, route)) is not None:
                exchange.respond(200, PLAIN_TEXT + fields)
                return
            allow = b"Allow: %b\r\n" % b", ".join(route.methods)
            exchange.respond(405, JSON + allow, (error_json("Method Not Allowed"),))
        elif route.action is Action.INFER:
            self._infer(exchange, route.model, route.version)
        elif self._cors.refuses(exchange.head, route):
            origin = clip(exchange.head.headers[b"origin"].decode("latin-1"))
            text = f"a page of '{origin}' may not make this call; --http-cors-origin names the sites that may"
            exchange.respond(403, JSON, (error_json(text),))
        else:
            try:
                self._actions[route.action](exchange, route)
            except InferenceError as error:
                respond_infer_error(exchange, error)

    def _generate(self, exchange: Exchange, route: Route) -> None:
        streams = route.action is Action.GENERATE_STREAM
        self._generating.handle(exchange, route.model, route.version, streams=streams)

    def _server_metadata(self, exchange: Exchange, _route: Route) -> None:
        exchange.respond(200, JSON + _SERVER, (metadata_json(self._model_server.metadata()),))

    def _server_live(self, exchange: Exchange, _route: Route) -> None:
        exchange.respond(200 if self._model_server.is_live() else 400, PLAIN_TEXT)

    def _server_ready(self, exchange: Exchange, _route: Route) -> None:
        if self._model_server.is_draining():
            exchange.respond(503, JSON, (error_json("Server exiting"),))
            return
        exchange.respond(200 if self._model_server.is_ready() else 400, PLAIN_TEXT)

    def _model_metadata(self, exchange: Exchange, route: Route) -> None:
        self._answer_from_model(exchange, route, model_metadata_json)

    def _model_config(self, exchange: Exchange, route: Route) -> None:
        self._answer_from_model(exchange, route, lambda view: to_json(view.config))

    def _answer_from_model(self, exchange: Exchange, route: Route, encode: Callable[[ModelView], bytes]) -> None:
        def answer(view: ModelView) -> None:
            exchange.respond(200, JSON, (encode(view),))

        on_error = partial(respond_infer_error, exchange)
        find_model(self._model_server, exchange, route.model, route.version, answer, on_error)

    def _model_ready(self, exchange: Exchange, route: Route) -> None:
        self.spawn(exchange, self._ask_model(exchange, route.model, route.version))

    async def _ask_model(self, exchange: Exchange, model: str, version: str) -> None:
        try:
            is_ready = await self._model_server.is_model_ready(model, version)
        except InferenceError as error:
            respond_error(exchange, error)
        else:
            if is_ready:
                exchange.respond(200, PLAIN_TEXT)
            else:
                exchange.respond(400, JSON, (error_json("Model version not ready"),))

    def _model_statistics(self, exchange: Exchange, route: Route) -> None:
        self.spawn(exchange, self._statistics(exchange, route))

    async def _statistics(self, exchange: Exchange, route: Route) -> None:
        try:
            statistics = await self._model_server.statistics(route.model, route.version)
        except InferenceError as error:
            respond_error(exchange, error)
        else:
            exchange.respond(200, JSON, (statistics_json(statistics),))

    def _repository_index(self, exchange: Exchange, route: Route) -> None:
        self.spawn(exchange, self._index(exchange, decode_index_request(_small_body(exchange, route))))

    async def _index(self, exchange: Exchange, ready_only: bool) -> None:
        try:
            index = await self._model_server.repository_index(ready_only)
        except InferenceError as error:
            respond_error(exchange, error)
        else:
            exchange.respond(200, JSON, (index_json(index),))

    def _devices(self, exchange: Exchange, _route: Route) -> None:
        self.spawn(exchange, self._answer_devices(exchange))

    async def _answer_devices(self, exchange: Exchange) -> None:
        exchange.respond(200, JSON, (devices_json(await self._model_server.devices()),))

    def _model_load(self, exchange: Exchange, route: Route) -> None:
        _refuse_repository(route)
        parameters = decode_load_request(_small_body(exchange, route))
        load = partial(self._model_server.load_model, route.model, parameters)
        self.spawn(exchange, _respond_after(exchange, load))

    def _model_unload(self, exchange: Exchange, route: Route) -> None:
        _refuse_repository(route)
        unload_dependents = decode_unload_request(_small_body(exchange, route))
        unload = partial(self._model_server.unload_model, route.model, unload_dependents)
        self.spawn(exchange, _respond_after(exchange, unload))


async def _respond_after(exchange: Exchange, change: Callable[[], Awaitable[None]]) -> None:
    try:
        await change()
    except InferenceError as error:
        respond_error(exchange, error)
    else:
        exchange.respond(200, PLAIN_TEXT)


def _refuse_repository(route: Route) -> None:
    if route.repository:
        raise unsupported("'repository_name' specification is not supported")


def _small_body(exchange: Exchange, route: Route) -> Buffer:
    if len(exchange.body) > MAX_CONTROL_BYTES:
        raise control_too_large(route.action.label, len(exchange.body))
    return exchange.body


def _shared_memory(exchange: Exchange, route: Route) -> None:
    """No region can be registered, so none is listed, and to unregister succeeds without effect."""
    if route.verb == "register":
        _unavailable_extension(exchange, route)
    elif route.verb == "unregister":
        exchange.respond(200, PLAIN_TEXT)
    elif route.region:
        raise unknown_region("system" if route.action is Action.SYSTEM_SHARED_MEMORY else "cuda", route.region)
    else:
        exchange.respond(200, JSON, (b"[]",))


def _unavailable_extension(_exchange: Exchange, route: Route) -> None:
    raise unsupported(f"the '{route.action.label}' extension is not available in this server")
