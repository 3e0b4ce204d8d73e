"""What a worker process offers to the code that it hosts, and what it wants from it.

Worker processes may run any CPython from 3.10 on, in an environment of the model's own: this module, `core.types`,
`core.shm` and whatever hosts python models import the standard library and numpy only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse, ParameterValue, Tensor


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """All that a worker process must know of the instance that it is to run. Crosses to it as JSON.

    `kind` is CPU, GPU or MODEL; `device_uuid` is "" but for GPU. `config_json` is the complete configuration as the
    REST API shows it. `repository` is the model's directory (`<repository>/<model>`), `artifact` the file that the
    backend loads, `options` the `--backend-config` settings of the backend. `runner` names what hosts the model in the
    process, as `module:function`. `threads` bounds the threads of numeric libraries. `decoupled` and `log_verbose` are
    as configured.
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


@dataclass(slots=True)
class Answer:
    """Outputs of one request, in wire layout, and parameters."""

    outputs: Sequence[Tensor]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)


Reply = Answer | InferenceError | None
"""None: the request is answered by `Host.respond`, has been or will be."""


class HostedRequest(Protocol):
    """One request of a batch as the worker process gets it. Tensors are views of the worker's own memory."""

    key: int
    request: InferenceRequest
    rows: int


class Call(Protocol):
    """An inference that hosted code asked for. Thread-safe; one that is collected before its end is cancelled.

    A call of a model that answers once has one final response; of a decoupled one any number, the last with `final`,
    which may be empty. Errors of the call are responses with `error`.
    """

    def receive(self) -> InferenceResponse | None:
        """Wait for the next answer; None once the final one was given.

        An answer that is not final is acknowledged as it is received: the sender may have 32 or 8 MiB on their way.
        """

    async def receive_async(self) -> InferenceResponse | None:
        """The same, without blocking the running loop."""

    def cancel(self) -> None:
        """Nobody wants the answers any more; the final one still comes, at the latest when the model has ended it."""


class Host(Protocol):
    """The worker process, to the code that it hosts. All methods may be called from any thread."""

    def is_cancelled(self, request: HostedRequest) -> bool:
        """True once the request's client has gone. Cheap enough to ask in a loop."""

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        """Send one answer of a request ahead of its batch's end, or after it.

        Blocks while the client takes nothing and as many answers wait as may. Answers to a request that was cancelled
        are dropped. The caller sees to it that nothing follows a final answer. `reply` None only with `final`.
        """

    def log(self, level: str, message: str, place: str = "") -> None:
        """One line of the server's log; `level` is ERROR, WARNING, INFO or VERBOSE, `place` whose line it is, as
        `model.py:11`."""

    def end(self, why: str) -> None:
        """This process is of no use any more: once the batch that runs is answered it ends, and is started again."""

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Ask the server for something and wait for it; JSON values both ways. Raises InferenceError.

        load_model {model_name, config, files: {name: base64}}, unload_model {model_name, unload_dependents},
        is_model_ready {model_name, model_version} -> bool,
        metric_family_new {name, description, kind: COUNTER|GAUGE|HISTOGRAM} -> id, metric_family_delete {id},
        metric_new {family, labels, buckets} -> id, metric_delete {id}, metric_value {id} -> number.
        """

    def infer(self, request: InferenceRequest) -> Call:
        """Ask a model of the server for an inference; inputs in wire layout. Raises InferenceError when it cannot be
        sent.

        Never waits: where this process has as many calls under way as it may have (256), the request is sent as its
        first answer is received. May be called from any thread, that of an event loop too.
        """

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        """`operation` is increment, set or observe; takes effect in order with calls, without waiting for it."""


class Runner(Protocol):
    """A hosted instance. All methods are called on the worker process's main thread."""

    is_async: bool
    """Whether `execute_async` is to be used, on one event loop that lives as long as the runner."""
    answers_is_ready: bool
    """Whether the model has a say in its readiness."""

    def execute(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        """Run a batch; one reply per request, in order. An exception fails them all."""

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        """As `execute`; batches overlap where the worker was told to take several at a time."""

    async def is_ready(self) -> bool:
        """What the model says of its readiness; only where `answers_is_ready`."""

    def close(self) -> None:
        """Let the model finalize. Called once, after the last batch."""
