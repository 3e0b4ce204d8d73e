"""Open plan files, and executions of an engine with one optimization profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halimede.backends.tensorrt.cuda import Stream
from halimede.backends.tensorrt.libraries import Libraries
from halimede.backends.tensorrt.options import BackendOptions
from halimede.backends.tensorrt.plan_file import HEADER_BYTES, read_header, version_hint
from halimede.backends.tensorrt.profiles import Profile, Shape
from halimede.backends.tensorrt.signature import EngineSignature, read_signature
from halimede.core.types import InferenceError, internal, invalid, unavailable


@dataclass(frozen=True, slots=True)
class Engine:
    """A deserialized engine, which several instances on its device use at once. The runtime must outlive it."""

    libraries: Libraries
    runtime: Any
    engine: Any
    signature: EngineSignature
    model: str


def check_plan(path: Path, model: str) -> None:
    """Raise if the file is missing or is no plan. Opens nothing but the file."""
    _check_header(_read(path, model, HEADER_BYTES), path, model)


def open_engine(libraries: Libraries, path: Path, model: str, options: BackendOptions) -> Engine:
    """The engine in a plan file, on the current device. Raises an error that says what differs from this server."""
    data = _read(path, model)
    made_by = _check_header(data[:HEADER_BYTES], path, model)
    trt = libraries.trt
    libraries.errors.clear()
    _open_plugins(libraries, options.plugins)
    try:
        runtime = trt.Runtime(libraries.logger)
        if options.version_compatible:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(data)
    except (RuntimeError, TypeError) as error:
        # A runtime that cannot start, as without a device, is a null pointer for the binding.
        reason = f"{libraries.errors.text()} ({error})"
        raise internal(f"model '{model}': TensorRT cannot start: {reason}") from error
    if engine is None:
        reason, hint = libraries.errors.text(), version_hint(made_by, str(trt.__version__))
        raise internal(f"model '{model}': TensorRT cannot load '{path}': {reason}{hint}")
    return Engine(libraries, runtime, engine, read_signature(trt, engine, model), model)


def _read(path: Path, model: str, most: int = -1) -> bytes:
    try:
        # Not mapped: a file that is cut while it is mapped would end the server.
        with path.open("rb") as file:
            return file.read(most)
    except FileNotFoundError as error:
        raise unavailable(f"unable to find '{path}' for model '{model}'{_files_beside(path)}") from error
    except OSError as error:
        raise internal(f"model '{model}': '{path}' cannot be read: {error.strerror}") from error


def _files_beside(path: Path) -> str:
    """A hint that names plan files with other names in the directory."""
    names = sorted(each.name for pattern in ("*.plan", "*.engine", "*.trt") for each in path.parent.glob(pattern))
    if not names:
        return ""
    listed = ", ".join(f"'{name}'" for name in names[:3])
    return f": there is {listed}; rename it to '{path.name}', or name it as default_model_filename in config.pbtxt"


def _check_header(head: bytes, path: Path, model: str) -> tuple[int, ...]:
    header = read_header(head)
    if header.problem:
        raise invalid(f"model '{model}': '{path}' is not a TensorRT plan: {header.problem}")
    return header.version


def _open_plugins(libraries: Libraries, paths: Sequence[str]) -> None:
    for path in paths:
        if path in libraries.plugins:
            continue
        try:
            handle = libraries.trt.get_plugin_registry().load_library(path)
        except (RuntimeError, TypeError):
            handle = None
        if handle is None:
            raise invalid(f"--backend-config tensorrt,plugins: '{path}' cannot be opened: {libraries.errors.text()}")
        libraries.plugins.add(path)


class Execution:
    """A context of an engine that stays with one profile. It repeats what changes from one batch to the next."""

    def __init__(self, engine: Engine, profile: Profile, strategy: str, stream: Stream) -> None:
        self.profile = profile
        self._errors = engine.libraries.errors
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, Shape] = {}
        self._errors.clear()
        kind = getattr(engine.libraries.trt.ExecutionContextAllocationStrategy, strategy)
        self._context = engine.engine.create_execution_context(kind)
        if self._context is None:
            raise unavailable(f"no execution context for profile {profile.index}: {self._errors.text()}")
        if not self._context.set_optimization_profile_async(profile.index, stream.handle):
            raise self._failure(f"profile {profile.index} cannot be selected")
        stream.wait()

    def shape(self, name: str, shape: Shape) -> None:
        """Set the shape of an input. It must be one that the profile allows."""
        if self._shapes.get(name) == shape:
            return
        if not self._context.set_input_shape(name, shape):
            raise self._failure(f"input '{name}' cannot have the shape {list(shape)}")
        self._shapes[name] = shape

    def bind(self, name: str, address: int) -> None:
        """Set where a tensor lies."""
        if self._addresses.get(name) != address:
            self.bind_values(name, address)

    def bind_values(self, name: str, address: int) -> None:
        """The same for a tensor that TensorRT reads on the CPU: it reads new values only after this call."""
        if not self._context.set_tensor_address(name, address):
            raise self._failure(f"tensor '{name}' cannot be set")
        self._addresses[name] = address

    def allocate_by(self, name: str, allocator: Any) -> None:
        """Set who makes room for an output whose size is known only after its computation."""
        if not self._context.set_output_allocator(name, allocator):
            raise self._failure(f"output '{name}' cannot have an allocator")

    def output_shape(self, name: str) -> Shape:
        """The output's shape for the inputs' shapes; -1 where it depends on their values."""
        self._errors.clear()
        try:
            return tuple(self._context.get_tensor_shape(name))
        except (RuntimeError, ValueError) as error:
            # If the inputs do not fit each other, the shape has -1 dimensions, which Python cannot represent.
            raise self._failure(f"output '{name}' has no shape for these inputs") from error

    def start(self, stream: Stream) -> None:
        """Begin the execution."""
        self._errors.clear()
        if not self._context.execute_async_v3(stream.handle):
            raise self._failure("the execution failed")

    def _failure(self, what: str) -> InferenceError:
        return internal(f"TensorRT: {what}: {self._errors.text()}")
