"""The interface that a backend implements. This is all that a plug-in needs to know of the server.

A backend is a class without constructor arguments, named by an entry point of the group `halimede.backends` whose name
is the backend's (`backend: "onnxruntime"` in a model's configuration). It makes models, models make instances, and
instances execute. Import the runtime (torch, onnxruntime, …) inside the methods: a server that serves no such model
must neither import it nor need it.

Threads: `autocomplete` and `load` run on a load thread; `create_instance`, `run`/`execute` and `close` of one instance
run on that instance's own thread, one call at a time; several instances of one model run side by side.

Errors: raise InferenceError to choose code and text; any other exception is answered as INTERNAL with its message (no
traceback goes to a client). Whatever is raised from `run` or `execute` fails the requests of that batch alone;
RefusedRequestsError fails some of them, and spares the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import InferenceError, ParameterValue, Placement, Tensor


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where one version of a model lies.

    `artifact` is `<model_directory>/<version>/<default_model_filename>`; it may not exist (identity needs none).
    `options` are the `--backend-config` settings of this backend over the global ones.
    """

    name: str
    version: int
    model_directory: Path
    artifact: Path
    options: Mapping[str, str] = field(default_factory=dict)


class CancelFlag(Protocol):
    """Set when the client has gone; a long computation may look at it and stop. Reading and setting are atomic."""

    cancelled: bool


@dataclass(slots=True)
class RunContext:
    """What a tensor instance may know of the batch it runs: the requests' ids, their row counts and cancel flags."""

    request_ids: Sequence[str]
    rows: Sequence[int]
    cancel_flags: Sequence[CancelFlag]

    def is_cancelled(self) -> bool:
        """True when every request of the batch has been cancelled, so that nobody waits for the result."""
        return all(flag.cancelled for flag in self.cancel_flags)


class RefusedRequestsError(Exception):
    """Raised by `TensorInstance.run` before it computes anything: some requests of the batch have unusable inputs.

    `errors` says why, by position in `context.rows`. Those requests are answered so, and `run` is called again without
    them: nobody's request may fail for what another client sent.
    """

    def __init__(self, errors: Mapping[int, InferenceError]) -> None:
        super().__init__(f"{len(errors)} requests of the batch have unusable inputs")
        self.errors = errors


class TensorInstance(Protocol):
    """An instance that computes outputs from inputs and need not know of requests: most runtimes.

    The server gathers a batch into one array per input before `run` and scatters the outputs after it.
    """

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> Mapping[str, NDArray[Any]]:
        """Compute `outputs` (never empty, names from the configuration).

        Arrays have the configuration's datatype and shape (`reshape` applied), rows first when the model batches;
        BYTES are object arrays of `bytes`, BF16 are uint16 bits. Inputs are read-only and valid during the call only.
        Each output of a batching model must have as many rows as the inputs; `str` elements are sent as UTF-8. An
        output that the model did not produce is left out of the result. An output array must not be written to after
        return.
        """

    def close(self) -> None:
        """Free what the instance holds. Called once, after the last `run`."""


class ExecuteRequest(Protocol):
    """One request of a batch, for an instance that answers each on its own."""

    id: str
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]
    batch_size: int
    parameters: Mapping[str, ParameterValue]

    def is_cancelled(self) -> bool:
        """True once the client has gone."""

    def respond(
        self, outputs: Sequence[Tensor], *, final: bool = True, parameters: Mapping[str, ParameterValue] | None = None
    ) -> None:
        """Send one answer; only decoupled models may pass final=False. A second final answer raises RuntimeError."""

    def fail(self, error: InferenceError) -> None:
        """Answer this request alone with an error."""


class RequestInstance(Protocol):
    """An instance that sees requests: it may answer one by one, early, several times or (decoupled) after `execute`."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        """Answer every request. One that is unanswered on return, without decoupled policy, fails as INTERNAL."""

    def close(self) -> None:
        """Free what the instance holds. Called once, after the last `execute`."""


Instance = TensorInstance | RequestInstance


class BackendModel(Protocol):
    """One loaded version: what its instances share."""

    def create_instance(self, placement: Placement) -> Instance:
        """Make an instance on the device that `placement` says, ready to run."""

    def close(self) -> None:
        """Free what the instances shared. Called once, after the last instance is closed."""


@runtime_checkable
class Checks(Protocol):
    """What a backend may have beside `Backend`: a look at a model that stops short of loading it."""

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        """Raise what `load` and the making of instances would find wrong with this configuration and model file."""


class Backend(Protocol):
    """One way to run models. Stateless: the server makes one of these per backend and asks it from several threads."""

    default_model_filename: str
    """The artifact's name inside a version directory where the configuration does not say; "" when there is none."""
    isolation: str
    """Where instances run unless the model's parameter ISOLATION says otherwise: "thread", in the server, for runtimes
    that release the interpreter's lock, or "process", in a worker process each, which the parameter cannot change.
    Models of the latter are completed and loaded by worker processes: `autocomplete` and `load` are not called here."""

    def default_instance_count(self, kind: str) -> int:
        """How many instances a group of this kind ("CPU", "GPU", "MODEL") gets that gives no count."""

    def supports_gpu(self) -> bool:
        """Whether the installed runtime can use a GPU: decides what KIND_AUTO means."""

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """The configuration with what the model file itself says filled in; `config` unchanged if it says nothing.

        The server takes over max_batch_size, input, output, the scheduler and model_transaction_policy, nothing else.
        `core.config.autocomplete` turns a signature read from a file into a configuration.
        """

    def load(self, config: ModelConfig, source: ModelSource) -> BackendModel:
        """Load one version under the complete, validated configuration. Checks the configuration against the file."""
