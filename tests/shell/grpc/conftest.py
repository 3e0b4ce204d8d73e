"""A real GrpcServer on a loop in a thread, with a fake server whose models behave as their names describe."""

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import tritonclient.grpc as client_module
import uvloop

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelTransactionPolicy
from halimede.core.config.model_view import ModelView
from halimede.core.types import (
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    ModelIndexEntry,
    ModelReadyState,
    ServerMetadata,
)
from halimede.core.types.statistics import Duration, InferStatistics, ModelStatistics
from halimede.facade.lookup import ModelLookup
from halimede.facade.server import LoadParameter, OnResponse
from halimede.frontends.grpc.server import GrpcServer
from halimede.frontends.sockets import bind, bound_port

WAIT_SECS = 20


def config(name: str, max_batch_size: int = 8, decoupled: bool = False) -> ModelConfig:
    return ModelConfig(
        name=name,
        backend="identity",
        max_batch_size=max_batch_size,
        input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(-1,)),),
        output=(ModelOutput(name="OUT", data_type=DataType.FP32, dims=(-1,)),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=True) if decoupled else None,
    )


WINDOW = 3


@dataclass(slots=True)
class Waiting:
    """A request of `waiting`: the number of sent answers and of acknowledged ones."""

    request: InferenceRequest
    on_response: OnResponse
    sent: int = 0
    acknowledged: int = 0


class FakeServer:
    """A Server of a few models, version 1 each.

    `ident` and `flat` (no batching) return their inputs as outputs, IN as OUT. `held` keeps requests until
    `release`. `broken` fails in execution. `repeat` is decoupled: it sends as many answers as the request's parameter
    `count`, and then a final one without outputs; with `fails` the answer before the final one is an error. `odd` answers
    with a text that no message can contain, `parameters` with parameters.

    `waiting` is decoupled, too, and sends at most WINDOW of its `count` answers ahead of those that were acknowledged.
    `endless` answers once and never ends. `turned` was not decoupled when its configuration was read.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_up = True
        self.views = {
            name: ModelView(name, "1", ("1",), config(name), {"OUT": ("cat", "dog", "cow")})
            for name in ("ident", "held", "broken", "odd", "parameters", "turned")
        }
        self.views["flat"] = ModelView("flat", "1", ("1",), config("flat", max_batch_size=0), {})
        for name in ("repeat", "waiting", "endless"):
            self.views[name] = ModelView(name, "1", ("1",), config(name, decoupled=True), {})
        self.lookups: dict[str, ModelLookup] = {}
        """Models that are not known yet."""
        self.looks = 0
        self.requests: list[InferenceRequest] = []
        self.held: dict[int, tuple[InferenceRequest, OnResponse]] = {}
        self.cancelled: list[int] = []
        self.waiting: dict[int, Waiting] = {}
        self.acknowledged: list[int] = []
        self.loads: list[tuple[str, dict[str, LoadParameter] | bool]] = []
        self.load_may_end = asyncio.Event()
        self.load_may_end.set()
        self._tickets = itertools.count(1)

    def wait_for(self, predicate: Callable[["FakeServer"], bool]) -> None:
        """Wait in the test's thread until the predicate holds."""
        with self.changed:
            assert self.changed.wait_for(lambda: predicate(self), WAIT_SECS)

    def metadata(self) -> ServerMetadata:
        return ServerMetadata("triton", "9.9", ("parameters", "statistics"))

    def is_live(self) -> bool:
        return True

    def is_ready(self) -> bool:
        self.looks += 1
        return self.is_up

    def is_draining(self) -> bool:
        return False

    def model(self, name: str, version: str = "") -> ModelView | ModelLookup:
        if name in self.lookups:
            return self.lookups[name]
        if name not in self.views:
            raise InferenceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if not version.isdigit() and version:
            raise InferenceError(
                ErrorCode.INVALID_ARG,
                f"failed to get model version from specified version string '{version}' (details: stol), version should"
                " be an integral value > 0",
            )
        if version not in {"", "1"}:
            raise InferenceError(
                ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found"
            )
        return self.views[name]

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        return self.model(name, version).name != "broken"

    def infer(self, request: InferenceRequest, on_response: OnResponse) -> int:
        ticket = next(self._tickets)
        with self.changed:
            self.requests.append(request)
            if request.model_name in ("held", "endless"):
                self.held[ticket] = (request, on_response)
                if request.model_name == "endless":
                    on_response(replace(self.answer_to(request), final=False))
            elif request.model_name == "waiting":
                self.waiting[ticket] = Waiting(request, on_response)
                self.go_on(ticket)
            else:
                self.answer(request, on_response)
            self.changed.notify_all()
        return ticket

    def answer_to(self, request: InferenceRequest) -> InferenceResponse:
        outputs = [replace(each, name=each.name.replace("IN", "OUT")) for each in request.inputs]
        return InferenceResponse(request.model_name, "1", request.id, outputs)

    def go_on(self, ticket: int) -> None:
        """Send as many answers as the client's window allows."""
        waiting = self.waiting[ticket]
        response = replace(self.answer_to(waiting.request), final=False)
        while waiting.sent < min(waiting.acknowledged + WINDOW, int(waiting.request.parameters["count"])):
            waiting.sent += 1
            waiting.on_response(response)
        # A response may be acknowledged, and continued here, before `on_response` returns.
        if waiting.sent == waiting.request.parameters["count"] and self.waiting.pop(ticket, None) is not None:
            waiting.on_response(replace(response, outputs=[], final=True))

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        with self.changed:
            self.acknowledged += [ticket] * responses
            if ticket in self.waiting:
                self.waiting[ticket].acknowledged += responses
                self.go_on(ticket)
            self.changed.notify_all()

    def answer(self, request: InferenceRequest, on_response: OnResponse) -> None:
        response = self.answer_to(request)
        match request.model_name:
            case "broken":
                error = InferenceError(ErrorCode.INTERNAL, "boom " * 5000)
                on_response(InferenceResponse("broken", "1", request.id, error=error))
            case "repeat":
                for _ in range(int(request.parameters.get("count", 0))):
                    on_response(replace(response, final=False))
                if request.parameters.get("fails"):
                    error = InferenceError(ErrorCode.INTERNAL, "no more")
                    on_response(InferenceResponse("repeat", "1", request.id, error=error, final=False))
                on_response(replace(response, outputs=[]))
            case "parameters":
                on_response(replace(response, parameters={"flag": True, "count": -2, "share": 0.5, "text": "a"}))
            case "turned":
                on_response(replace(response, final=False))
                on_response(response)
            case "odd":
                on_response(replace(response, parameters={"text": "\ud800"}))
            case _:
                on_response(response)

    def release(self, count: int | None = None, newest_first: bool = False) -> None:
        """Answer held requests. Call it only on the loop's thread."""
        tickets = sorted(self.held, reverse=newest_first)[:count]
        for ticket in tickets:
            request, on_response = self.held.pop(ticket)
            self.answer(request, on_response)

    def cancel(self, ticket: int) -> None:
        with self.changed:
            self.cancelled.append(ticket)
            self.waiting.pop(ticket, None)
            if ticket in self.held:
                request, on_response = self.held.pop(ticket)
                error = InferenceError(ErrorCode.CANCELLED, "")
                on_response(InferenceResponse(request.model_name, "", request.id, error=error))
            self.changed.notify_all()

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        if name and name not in self.views:
            raise InferenceError(ErrorCode.INVALID_ARG, f"requested model '{name}' is not available")
        assert name or not version
        inference = InferStatistics(success=Duration(len(self.requests), 5))
        return [ModelStatistics(each, "1", inference=inference) for each in ([name] if name else self.views)]

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        loaded = [ModelIndexEntry("ident", "1", ModelReadyState.READY)]
        return loaded if ready_only else [*loaded, ModelIndexEntry("new")]

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        with self.changed:
            self.loads.append((name, dict(parameters)))
            self.changed.notify_all()
        await self.load_may_end.wait()
        if name == "nope":
            raise InferenceError(ErrorCode.INTERNAL, "failed to load 'nope', failed to poll from model repository")

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self.loads.append((name, unload_dependents))


class LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.begin(coroutine).result(WAIT_SECS)

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECS)
        self.loop.close()


@dataclass
class Served:
    """A running front end: its address, its fake server, and the loop of both."""

    core: FakeServer
    front: GrpcServer
    address: str
    port: int
    thread: LoopThread

    @property
    def url(self) -> str:
        return f"{self.address}:{self.port}" if self.port else self.address

    def do(self, action: Callable[[], Any]) -> Any:
        """Run a plain call on the loop's thread."""

        async def call() -> Any:
            return action()

        return self.thread.run(call())


async def make(address: str, *options: Any, **named: Any) -> tuple[FakeServer, GrpcServer, int]:
    core = FakeServer()
    front = GrpcServer(core, *options, **named)
    sockets = bind(address, 0, "GRPC", any_family=True)
    port = bound_port(sockets)
    front.serve(sockets)
    return core, front, port


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def serve(loop_thread: LoopThread) -> Iterator[Callable[..., Served]]:
    """Starts a front end with these options; it is stopped after the test."""
    fronts = []

    def start(*options: Any, address: str = "127.0.0.1", **named: Any) -> Served:
        core, front, port = loop_thread.run(make(address, *options, **named))
        fronts.append(front)
        return Served(core, front, address, port, loop_thread)

    yield start

    async def end() -> None:
        while fronts:
            await fronts.pop().close()
        # grpc's objects must be freed on the thread of their loop: a garbage collection on another test's thread would
        # free them there, which has crashed the process. A real process has one server and one loop.
        gc.collect()

    loop_thread.run(end())


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve()


@pytest.fixture
def client(served: Served) -> Iterator[client_module.InferenceServerClient]:
    with client_module.InferenceServerClient(served.url) as made:
        yield made


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.url) as made:
        yield made
