"""The interface that a backend implements. This is all that a plug-in needs to know of the server.

A backend is a class without constructor arguments, named by an entry point of the group `halimede.backends` whose name
is the backend's (`backend: "onnxruntime"` in a model's configuration). It makes models, models make instances, and
instances execute. Import the runtime (torch, onnxruntime, …) inside the methods: a server without such models must
neither import the runtime nor need it.

Threads: `autocomplete` and `load` run on a load thread; `create_instance`, `run`/`execute` and `close` of one instance
run on that instance's own thread, one call at a time; several instances of one model run in parallel.

Errors: raise InferenceError to choose code and text. Any other exception is reported as INTERNAL with its message, but
without its traceback. An exception from `run` or `execute` fails only the requests of that batch; RefusedRequestsError
fails only some of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import Device, InferenceError, ParameterValue, Placement, Tensor


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The files of one version of a model.

    `artifact` is `<model_directory>/<version>/<default_model_filename>`; it may not exist (identity needs none).
    `options` are the `--backend-config` settings of this backend, merged over the global ones. `filenames` are files
    for GPUs of some compute capabilities ("8.9"): `cc_model_filenames`. `device` is that of the model's first instance
    on a GPU, on which `autocomplete` may open the file. Without `allow_pickle` no pickle may be loaded.
    """

    name: str
    version: int
    model_directory: Path
    artifact: Path
    options: Mapping[str, str] = field(default_factory=dict)
    filenames: Mapping[str, str] = field(default_factory=dict)
    device: Device | None = None
    allow_pickle: bool = True

    def artifact_on(self, device: Device | None) -> Path:
        """The artifact for instances on this device: that of its compute capability if there is one."""
        if device is None or (filename := self.filenames.get(device.capability_text)) is None:
            return self.artifact
        return self.model_directory / str(self.version) / filename


class CancelFlag(Protocol):
    """Set when the client has disconnected; a long computation may check it and stop. Access is atomic."""

    cancelled: bool


@dataclass(slots=True)
class RunContext:
    """Information on the batch for a tensor instance: the requests' ids, their row counts and cancel flags.

    `elements` has the element count of each request by ragged input.
    """

    request_ids: Sequence[str]
    rows: Sequence[int]
    cancel_flags: Sequence[CancelFlag]
    elements: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def is_cancelled(self) -> bool:
        """True if every request of the batch has been cancelled, so that the result is not needed."""
        return all(flag.cancelled for flag in self.cancel_flags)


class RefusedRequestsError(Exception):
    """Raised by `TensorInstance.run` before it computes anything: some requests of the batch have unusable inputs.

    `errors` maps positions in `context.rows` to errors. Those requests get their errors, and `run` is called again
    without them: a request must not fail because of another client's input.
    """

    def __init__(self, errors: Mapping[int, InferenceError]) -> None:
        super().__init__(f"{len(errors)} requests of the batch have unusable inputs")
        self.errors = errors


class LostInstanceError(InferenceError):
    """Raised by `run`: the batch fails, and the instance can run no other one, as after a fault in CUDA's context.

    A worker process is replaced by a new one. On a thread the error is like any other.
    """


class TensorInstance(Protocol):
    """An instance that computes outputs from inputs and does not see single requests; this suits most runtimes.

    The server gathers a batch into one array per input before `run` and splits the outputs after it.
    """

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> Mapping[str, NDArray[Any]]:
        """Compute `outputs` (never empty, names from the configuration).

        Arrays have the configuration's datatype and shape (`reshape` applied), rows first if the model batches; BYTES
        are object arrays of `bytes`, BF16 are uint16 bits. Inputs are read-only and valid only during the call. Each
        output of a batching model must have as many rows as the inputs; `str` elements are sent as UTF-8. The result
        omits outputs that the model did not produce. An output array must not be written to after return.

        Inputs with `allow_ragged_batch` are flat, and those of the configuration's `batch_input` are added. With the
        parameter PADDING the requests' lengths, INT64 of shape [rows], are added under the configured name. With
        BATCH_SIZES there may be more rows than `context.rows` has together.
        """

    def close(self) -> None:
        """Free the instance's resources. Called once, after the last `run`."""


class ExecuteRequest(Protocol):
    """One request of a batch, for an instance that responds to each by itself."""

    id: str
    inputs: Mapping[str, Tensor]
    outputs: Sequence[str]
    batch_size: int
    parameters: Mapping[str, ParameterValue]

    def is_cancelled(self) -> bool:
        """True once the client has disconnected."""

    def respond(
        self, outputs: Sequence[Tensor], *, final: bool = True, parameters: Mapping[str, ParameterValue] | None = None
    ) -> None:
        """Send one response; only decoupled models may pass final=False. A second final one raises RuntimeError."""

    def fail(self, error: InferenceError) -> None:
        """Respond to this request alone with an error."""


class RequestInstance(Protocol):
    """An instance that sees requests: it may respond to each by itself, early, several times or (decoupled) after
    `execute`."""

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        """Respond to every request. One without a response on return, unless decoupled, fails as INTERNAL."""

    def close(self) -> None:
        """Free the instance's resources. Called once, after the last `execute`."""


Instance = TensorInstance | RequestInstance


class BackendModel(Protocol):
    """One loaded version: the state that its instances share."""

    def create_instance(self, placement: Placement) -> Instance:
        """Create an instance on the device of `placement`, ready to run."""

    def close(self) -> None:
        """Free the shared resources. Called once, after the last instance is closed."""


@runtime_checkable
class Checks(Protocol):
    """An optional extension of `Backend`: a check of a model without loading it."""

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        """Raise every error that `load` and `create_instance` would find in this configuration and model file.

        Called in a worker process for a model that runs in worker processes, like `autocomplete`.
        """


@runtime_checkable
class Unpickles(Protocol):
    """An optional extension of `Backend`: it unpickles files of a model, which can execute any code."""

    unpickles: tuple[str, ...]
    """Patterns of the names of these files, such as `("*.joblib",)`. A server with --allow-pickle=false refuses models
    with such a file, unless its content shows that it is no pickle. The file may be another one when it is loaded: a
    backend that opens it must not unpickle it without `ModelSource.allow_pickle`."""


@runtime_checkable
class ChoosesIsolation(Protocol):
    """An optional extension of `Backend`: its settings decide where instances run."""

    def isolation_for(self, settings: Mapping[str, str]) -> str:
        """The value of `isolation` with these `--backend-config` settings. InferenceError for a wrong setting."""


@runtime_checkable
class Preloads(Protocol):
    """An optional extension of `Backend`: its runtime takes long to import.

    The import is done once, in a process of its own from which the worker processes of the backend's models are forked.
    So they start at once, and share the runtime's memory.
    """

    def preload(self, source: ModelSource) -> str:
        """`module:function`, which imports what the model needs; models with the same answer share the process.

        The function must start no thread and use no device. An exception of it is ignored: a worker imports the runtime
        again, and reports the error.
        """


@runtime_checkable
class NamesOptions(Protocol):
    """An optional extension of `Backend`: it names its options, and the server warns of others.

    A name that ends in `*` stands for all that begin so.
    """

    parameters: tuple[str, ...]
    """Parameters of a model."""
    settings: tuple[str, ...]
    """Settings of `--backend-config`."""


class Backend(Protocol):
    """One way to run models. Stateless: the server makes one object per backend and calls it from several threads."""

    default_model_filename: str
    """The artifact's name inside a version directory unless the configuration sets it; "" for no artifact."""
    isolation: str
    """Where instances run unless the model's parameter ISOLATION is set: "thread", in the server, for runtimes that
    release the interpreter's lock, or "process", each in a worker process, which the parameter cannot change. Models
    of the latter are completed and loaded by worker processes: `autocomplete` and `load` are not called here."""

    def default_instance_count(self, kind: str) -> int:
        """The number of instances for a group of this kind ("CPU", "GPU", "MODEL") without a count."""

    def supports_gpu(self) -> bool:
        """Whether the installed runtime can use a GPU: decides how KIND_AUTO is resolved."""

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """The configuration completed from the model file; `config` unchanged if the file adds nothing.

        The server only takes over max_batch_size, input, output, the scheduler and model_transaction_policy.
        `core.config.autocomplete` turns a signature read from a file into a configuration.
        """

    def load(self, config: ModelConfig, source: ModelSource) -> BackendModel:
        """Load one version with the complete, validated configuration, which is checked against the model file."""
