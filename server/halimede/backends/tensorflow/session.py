"""Import TensorFlow, open sessions over models, and convert its errors.

Models run in sessions of TensorFlow 1, which also run SavedModels of TensorFlow 2. A session has what Triton's
parameters set (threads, placement, memory, XLA), and a call from Python takes a tenth of the time of a call of a
signature as a function: 14 us against 200 us for a small model.
"""

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from itertools import islice
from pathlib import Path
from typing import Any

from halimede.backends.extras import install_extra
from halimede.backends.tensorflow.options import TensorFlowOptions
from halimede.backends.tensorflow.threads import SessionThreads
from halimede.core.types import InferenceError
from halimede.core.types.error import clip, internal, invalid, unavailable, unsupported

TEXT_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class Runtime:
    """The modules of TensorFlow that the backend uses; none of them has types."""

    session: Any
    loader: Any
    importer: Any
    ops: Any
    errors: Any
    libraries: Any
    registry: Any
    config: Any
    graph: Any
    saved_model: Any
    version: str


@cache
def runtime() -> Runtime:
    """Import TensorFlow; UNSUPPORTED if it is not installed."""
    # Read when the libraries are loaded: errors alone are printed, and nothing is reported to TensorFlow's authors.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("ENABLE_RUNTIME_UPTIME_TELEMETRY", "0")
    os.environ["TF2_BEHAVIOR"] = "1"
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    try:
        _provide_package()
        return Runtime(
            session=import_module("tensorflow.python.client.session"),
            loader=import_module("tensorflow.python.saved_model.loader_impl"),
            importer=import_module("tensorflow.python.framework.importer"),
            ops=import_module("tensorflow.python.framework.ops"),
            errors=import_module("tensorflow.python.framework.errors_impl"),
            libraries=import_module("tensorflow.python.framework.load_library"),
            registry=import_module("tensorflow.python.framework.op_def_registry"),
            config=import_module("tensorflow.core.protobuf.config_pb2"),
            graph=import_module("tensorflow.core.framework.graph_pb2"),
            saved_model=import_module("tensorflow.core.protobuf.saved_model_pb2"),
            version=import_module("tensorflow.python.framework.versions").VERSION,
        )
    except ImportError as error:
        raise unsupported(
            f"tensorflow cannot be imported ({error}); {install_extra('tensorflow')}; "
            "for GPUs install tensorflow[and-cuda]"
        ) from error


def _provide_package() -> None:
    """Put the package `tensorflow` into sys.modules without running its `__init__`.

    That imports the whole interface for training, with Keras: 10 s of CPU time and 620 MiB, in place of 2 s and 400 MiB
    for what is needed here. The process has no other user of the package.
    """
    if "tensorflow" in sys.modules:
        return
    spec = find_spec("tensorflow")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("there is no package of this name")
    sys.modules["tensorflow"] = module_from_spec(spec)


def has_cuda() -> bool:
    """Whether the installed TensorFlow is built for CUDA. Does not import it."""
    spec = find_spec("tensorflow")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            written = (Path(location) / "python" / "platform" / "build_info.py").read_text()
        except OSError:
            continue
        return "('is_cuda_build', True)" in written
    return False


def load_libraries(names: Sequence[str], folders: Sequence[Path], model: str) -> None:
    """Load libraries with custom operations. UNAVAILABLE for one that is not there, INTERNAL for one that fails."""
    for name in names:
        paths = [folder / name for folder in folders]
        found = next((path for path in paths if path.is_file()), None)
        if found is None:
            looked = ", ".join(f"'{path}'" for path in dict.fromkeys(paths))
            text = f"model '{clip(model)}': there is no operation library '{clip(name)}': looked for {looked}"
            raise unavailable(text)
        with as_inference_errors(f"model '{clip(model)}': operation library '{found}' cannot be loaded"):
            runtime().libraries.load_op_library(str(found.resolve()))


@dataclass(slots=True)
class OpenedGraph:
    """A session over a graph, and the graph in TensorFlow's format, which is large: use it, then drop it."""

    session: Any
    graph_def: Any


def open_saved_model(path: Path, tags: Iterable[str], settings: Any, model: str) -> OpenedGraph:
    """Load the graph with exactly these tags and its variables. InferenceError."""
    tf = runtime()
    session = tf.session.Session(graph=tf.ops.Graph(), config=settings)
    try:
        with session.graph.as_default(), as_inference_errors(f"model '{clip(model)}': '{path}' cannot be loaded"):
            try:
                meta_graph = tf.loader.load(session, list(tags), str(path))
            except tf.errors.NotFoundError:
                _check_operations(_saved_graphs(path), model)
                raise
    except BaseException:
        session.close()
        raise
    return OpenedGraph(session, meta_graph.graph_def)


def open_frozen_graph(path: Path, settings: Any, model: str) -> OpenedGraph:
    """Import a GraphDef. InferenceError."""
    tf = runtime()
    graph, graph_def = tf.ops.Graph(), tf.graph.GraphDef()
    with graph.as_default(), as_inference_errors(f"model '{clip(model)}': '{path}' cannot be loaded"):
        graph_def.ParseFromString(path.read_bytes())
        try:
            tf.importer.import_graph_def(graph_def, name="")
        except tf.errors.NotFoundError:
            _check_operations([graph_def], model)
            raise
    return OpenedGraph(tf.session.Session(graph=graph, config=settings), graph_def)


def session_settings(options: TensorFlowOptions, threads: SessionThreads, kind: str) -> Any:
    """A ConfigProto for an instance of this kind."""
    settings = runtime().config.ConfigProto(
        intra_op_parallelism_threads=threads.intra,
        inter_op_parallelism_threads=threads.inter,
        use_per_session_threads=options.per_session_threads,
        allow_soft_placement=options.soft_placement,
        device_count={"GPU": 0} if kind == "CPU" else {},
    )
    settings.graph_options.optimizer_options.global_jit_level = options.jit_level
    settings.gpu_options.allow_growth = options.memory_fraction == 0
    settings.gpu_options.per_process_gpu_memory_fraction = options.memory_fraction
    if options.mixed_precision and kind == "GPU":
        rewriting = settings.graph_options.rewrite_options
        rewriting.auto_mixed_precision = type(rewriting).ON
    return settings


def run_init_ops(session: Any, file: str, folders: Sequence[Path], model: str) -> None:
    """Run the operations that the JSON file names in `init_ops`. The first folder that has the file is used."""
    found = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if found is None:
        looked = ", ".join(f"'{folder / file}'" for folder in folders)
        raise unavailable(
            f"model '{clip(model)}': there is no file '{clip(file)}' (parameter TF_INIT_OPS_FILE): looked for {looked}"
        )
    try:
        names = json.loads(found.read_bytes())["init_ops"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("init_ops is not a list of names")
    except (ValueError, KeyError, TypeError) as error:
        text = f"model '{clip(model)}': '{found}' must be JSON like {{\"init_ops\": [\"init\"]}}: {error!r}"
        raise invalid(text) from error
    with as_inference_errors(f"model '{clip(model)}': the operations of '{found}' failed"):
        for name in names:
            session.run(session.graph.get_operation_by_name(name))


@contextmanager
def as_inference_errors(what: str) -> Iterator[None]:
    """Turn every exception of TensorFlow into an InferenceError that begins with `what`."""
    try:
        yield
    except InferenceError:
        raise
    except Exception as error:
        raise internal(f"{what}: {error_text(error)}") from error


def error_text(error: Exception) -> str:
    """The error in one line, with the name of TensorFlow's status, as in `INVALID_ARGUMENT: …`."""
    message = getattr(error, "message", None) or str(error)
    text = " ".join(f"{_status(error)}: {message}".split())
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."


def _status(error: Exception) -> str:
    errors = runtime().errors
    if isinstance(error, errors.OpError):
        codes = {code: name for name, code in vars(errors).items() if name.isupper() and isinstance(code, int)}
        return str(codes.get(error.error_code, type(error).__name__))
    return type(error).__name__


def _saved_graphs(path: Path) -> list[Any]:
    saved = runtime().saved_model.SavedModel()
    saved.ParseFromString((path / "saved_model.pb").read_bytes())
    return [each.graph_def for each in saved.meta_graphs]


def _check_operations(graphs: Iterable[Any], model: str) -> None:
    """INVALID_ARG with all operations of the graphs that this TensorFlow does not have."""
    tf = runtime()
    operations: set[str] = set()
    own: set[str] = set()
    for graph in graphs:
        own |= {function.signature.name for function in graph.library.function}
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        operations |= {node.op for node in nodes}
    missing = sorted(name for name in operations - own if tf.registry.get(name) is None)
    if missing:
        listed = ", ".join(f"'{name}'" for name in islice(missing, 10))
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise invalid(
            f"model '{clip(model)}': TensorFlow {tf.version} has no operation {listed}{more}; name the library that "
            'has it in model_operations { op_library_filename: "..." }'
        )
