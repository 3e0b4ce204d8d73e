"""A real listener on a loop in a thread, with a fake server whose models behave as their names describe."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import uvloop

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelTransactionPolicy
from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    DataType,
    Device,
    DeviceKind,
    DeviceReport,
    DeviceState,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ModelIndexEntry,
    ModelReadyState,
    ServerMetadata,
    Tensor,
)
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.facade.lookup import ModelLookup
from halimede.frontends.http.framing import Limits
from halimede.frontends.http.listener import Listener
from halimede.frontends.http.server import HttpServer
from halimede.frontends.port import PortLimits
from halimede.frontends.sockets import bind, bound_port
from halimede.frontends.turns import Turns
from support.loop_thread import LoopThread

MAX_INPUT_SIZE = 1 << 20


def view(name: str, datatype: DataType = DataType.FP32, *, decoupled: bool = False) -> ModelView:
    policy = ModelTransactionPolicy(decoupled=True) if decoupled else None
    config = ModelConfig(
        name=name,
        backend="identity",
        input=(ModelInput(name="IN", data_type=datatype, dims=(-1,)),),
        output=(ModelOutput(name="OUT", data_type=datatype, dims=(-1,)),),
        model_transaction_policy=policy,
    )
    return ModelView(name, "1", ("1",), config, {})


class FakeServer:
    """Answers by model name: `echo` immediately, `held` when `release` is called, `live` when `give` is called, the others
    with an error or an invalid answer."""

    def __init__(self) -> None:
        self.models = {
            "echo": view("echo"),
            "text": view("text", DataType.BYTES),
            "half": view("half", DataType.FP16),
            "held": view("held"),
            "full": view("full"),
            "broken": view("broken"),
            "bug": view("bug"),
            "chatty": view("chatty"),
            "stream": view("stream", decoupled=True),
            "live": view("live", decoupled=True),
        }
        self.requests: list[InferenceRequest] = []
        self.held: dict[int, tuple[InferenceRequest, Callable[[InferenceResponse], None]]] = {}
        self.cancelled: list[int] = []
        self.acknowledged: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.ready = True
        self.draining = False
        self.load_gate: asyncio.Event | None = None
        self.kv_gate: asyncio.Future[None] | None = None
        self.lookups: dict[str, ModelLookup] = {}
        """Models that are not known yet."""
        self._tickets = 0

    def metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "1.0", ("statistics",))

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        return self.ready

    def is_draining(self) -> bool:
        return self.draining

    def model(self, name: str, version: str = "") -> ModelView | ModelLookup:
        if name in self.lookups:
            return self.lookups[name]
        if name == "asleep":
            raise InferenceError(
                ErrorCode.UNAVAILABLE, "Request for unknown model: 'asleep' version 1 is not at ready state"
            )
        if name not in self.models:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version not in {"", "1"}:
            raise InferenceError(
                ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found"
            )
        return self.models[name]

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        if name == "asleep":
            return False
        return self.model(name, version) is not None

    def infer(self, request: InferenceRequest, on_response: Callable[[InferenceResponse], None]) -> int:
        self._tickets += 1
        self.requests.append(request)
        match request.model_name:
            case "held" | "live":
                self.held[self._tickets] = (request, on_response)
            case "full":
                on_response(failure(request, ErrorCode.UNAVAILABLE, "Exceeds maximum queue size"))
            case "broken":
                on_response(failure(request, ErrorCode.INTERNAL, "the model broke"))
            case "bug":
                raise RuntimeError("a bug with a secret")
            case "chatty":
                on_response(echo(request, final=False))
                on_response(echo(request))
            case _:
                on_response(echo(request))
        return self._tickets

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        if ticket in self.held:
            request, on_response = self.held.pop(ticket)
            on_response(failure(request, ErrorCode.CANCELLED, "cancelled"))

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self.acknowledged += [ticket] * responses

    def release(self) -> None:
        """Answer the oldest held request."""
        request, on_response = self.held.pop(min(self.held))
        on_response(echo(request))

    def give(self, *values: float, final: bool = False, error: InferenceError | None = None) -> None:
        """Send one answer to the oldest `live` request; without values and error it is the end of its answers."""
        ticket = min(self.held)
        request, on_response = self.held.pop(ticket) if final else self.held[ticket]
        data = np.array(values, np.float32)
        outputs = [Tensor("OUT", DataType.FP32, data.shape, data.tobytes())] if values else []
        on_response(InferenceResponse(request.model_name, "1", request.id, outputs, error=error, final=final))

    async def kv_cache(self, model: str) -> KvCache | None:
        if self.kv_gate is not None:
            await self.kv_gate
        return KvCache(1, 4, 64) if model in {"echo", "live"} else None

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name and name not in self.models:
            raise InferenceError(ErrorCode.INVALID_ARG, f"requested model '{name}' is not available")
        return [ModelStatistics(name or "echo", version or "1")]

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        self.calls.append(("index", ready_only))
        return [ModelIndexEntry("echo", "1", ModelReadyState.READY)]

    async def devices(self) -> DeviceReport:
        return DeviceReport((DeviceState(Device(DeviceKind.GPU, 0, "GPU-1")),))

    async def load_model(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        self.calls.append(("load", name, dict(parameters)))
        if self.load_gate is not None:
            await self.load_gate.wait()
        if name == "bug":
            raise RuntimeError("a bug with a secret")
        if name not in self.models:
            raise InferenceError(ErrorCode.INTERNAL, f"failed to load '{name}', failed to poll from model repository")

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.calls.append(("unload", name, unload_dependents))


def echo(request: InferenceRequest, *, final: bool = True) -> InferenceResponse:
    outputs = [Tensor("OUT", tensor.datatype, tensor.shape, tensor.data) for tensor in request.inputs]
    return InferenceResponse(request.model_name, "1", request.id, outputs, final=final)


def failure(request: InferenceRequest, code: ErrorCode, message: str) -> InferenceResponse:
    return InferenceResponse(request.model_name, "1", request.id, error=InferenceError(code, message))


class Running(LoopThread):
    """A running listener."""

    def __init__(
        self,
        make: Callable[[FakeServer, list[str]], Listener],
        loop_factory: Callable[[], asyncio.AbstractEventLoop],
        sockets: Sequence[socket.socket] | None,
    ) -> None:
        super().__init__(loop_factory)
        self.core = FakeServer()
        self.listener: Listener = self.call(lambda: make(self.core, self.log))
        sockets = sockets or bind("127.0.0.1", 0, "HTTP")
        self.port = bound_port(sockets)
        self.call(lambda: self.listener.serve(sockets))

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def exchange(self, data: bytes) -> bytes:
        """Send bytes and read until the server closes."""
        with self.connect() as connection:
            connection.sendall(data)
            return read_all(connection)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> "Answer":
        """Send one request on a new connection."""
        client = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            client.request(method, path, body, headers or {})
            response = client.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            client.close()


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts listeners: `serve()` an HttpServer with a FakeServer, `serve(make=...)` any other listener."""
    started: list[Running] = []

    def start(
        *,
        max_input_size: int = MAX_INPUT_SIZE,
        limits: Limits | None = None,
        port_limits: PortLimits | None = None,
        turns: Turns | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        make: Callable[[FakeServer, list[str]], Listener] | None = None,
        sockets: Sequence[socket.socket] | None = None,
    ) -> Running:
        def http_server(core: FakeServer, log: list[str]) -> HttpServer:
            return HttpServer(
                core,
                max_input_size=max_input_size,
                log=log.append,
                limits=limits,
                port_limits=port_limits,
                turns=turns,
            )

        running = Running(make or http_server, loop_factory, sockets)
        started.append(running)
        return running

    yield start
    for running in started:
        running.run(running.listener.close())
        running.stop()


@pytest.fixture
def http(serve: Serve) -> Running:
    """An HttpServer with the default limits."""
    return serve()
