"""The interface between a worker process and the code that it hosts.

Worker processes may run any CPython from 3.10 on, in an environment of the model's own. Therefore this module,
`core.types`, `core.shm` and the modules that host python models import only the standard library and numpy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halimede.backends.service_calls import ResultT_co, ServiceCall
from halimede.core.sequences.rows import StateBytes
from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse, ParameterValue, Tensor


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a worker process needs to know about its instance. Sent to it as JSON.

    `kind` is CPU, GPU or MODEL; `device_uuid` is "" except for GPU. `config_json` is the complete configuration as in
    the REST API. `repository` is the model's directory (`<repository>/<model>`), `artifact` the file that the backend
    loads, `options` the backend's `--backend-config` settings. `runner` names the function that hosts the model in the
    process, as `module:function`. `threads` limits the threads of numeric libraries. `decoupled`, `log_verbose` and
    `allow_pickle` are as configured.
    """

    model: str
    version: int
    instance: str
    ordinal: int
    kind: str
    device_id: int
    device_uuid: str
    backend: str
    runner: str
    config_json: str
    repository: str
    artifact: str
    options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    decoupled: bool = False
    log_verbose: int = 0
    allow_pickle: bool = True


@dataclass(slots=True)
class Answer:
    """Outputs of one request, in wire layout, and response parameters."""

    outputs: Sequence[Tensor]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


Reply = Answer | InferenceError | None
"""None: `Host.respond` has answered the request, or will."""


@dataclass(frozen=True, slots=True)
class Rescheduled:
    """The request has no final response yet: the model wants to execute it again."""


RESCHEDULED = Rescheduled()
BatchReply = Reply | Rescheduled


class HostedRequest(Protocol):
    """One request of a batch, as the worker process receives it. Tensors are views of the worker's own memory.

    `sequence_slot` is as in `core.schedule.actions.Execute`.
    """

    key: int
    request: InferenceRequest
    rows: int
    sequence_slot: int


class Call(Protocol):
    """An inference that hosted code requested. Thread-safe; garbage collection before its end cancels it.

    A call of a model that responds once has one final response; a decoupled model sends any number, the last one with
    `final`, which may be empty. Errors of the call are responses with `error`.
    """

    def receive(self) -> InferenceResponse | None:
        """Wait for the next response; None after the final one.

        A response that is not final is acknowledged when it is received: up to 32 of them, or 8 MiB, may be in flight.
        """

    async def receive_async(self) -> InferenceResponse | None:
        """The same, without blocking the running loop."""

    def cancel(self, *, reads_on: bool = False) -> None:
        """Stop the call: its responses are not needed. The final one still comes, at the latest when the model ends.

        `reads_on`: what a decoupled model still sends is needed, also if it ignores that the call is cancelled.
        """


class Host(Protocol):
    """The worker process, as the hosted code sees it. All methods may be called from any thread."""

    def is_cancelled(self, request: HostedRequest) -> bool:
        """True once the request's client has disconnected. Cheap enough to call in a loop."""

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        """Send one response of a request before its batch ends, or after it.

        Blocks while the client does not read and the maximum number of responses is waiting. Responses to a cancelled
        request are dropped. The caller must not send anything after a final one. `reply` may be None only with `final`.
        """

    def log(self, level: str, message: str, origin: str = "") -> None:
        """Write a line to the server's log; `level` is ERROR, WARNING, INFO or VERBOSE, `origin` where it comes from,
        as `model.py:11`."""

    def end(self, why: str) -> None:
        """End and restart this process, because it is no longer usable; the running batch is answered first."""

    def call(self, call: ServiceCall[ResultT_co]) -> ResultT_co:
        """Send a call to the server and wait for its result. InferenceError."""

    def infer(self, request: InferenceRequest) -> Call:
        """Request an inference from a model of the server; inputs in wire layout. InferenceError if it cannot be sent.

        Never blocks: if this process already has the maximum number of calls in flight (256), the request is sent when
        its first response is received. May be called from any thread, including that of an event loop.
        """

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        """`operation` is increment, set or observe; applied in order with calls, without waiting for the server."""

    @property
    def states(self) -> StateBytes:
        """What this process may keep for sequences."""


class Runner(Protocol):
    """A hosted instance. All methods are called on the worker process's main thread."""

    is_async: bool
    """Whether to use `execute_async`, on one event loop that lives as long as the runner."""
    answers_is_ready: bool
    """Whether the model implements `is_ready`."""
    ends_late: bool
    """Whether a batch of a decoupled model that `is_async` ends only after its execution, so that the next request of a
    sequence follows it. Other such batches end at once."""

    def execute(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        """Run a batch; one reply per request, in order. An exception fails them all."""

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        """As `execute`; batches overlap if the worker may take several at a time."""

    async def is_ready(self) -> bool:
        """Whether the model reports that it is ready; only called if `answers_is_ready`."""

    def forget(self, sequence_slot: int) -> None:
        """The sequence of the sequence slot has ended: drop its state. Called on any thread, while no request of it
        executes."""

    def close(self) -> None:
        """Let the model finalize. Called once, after the last batch."""
