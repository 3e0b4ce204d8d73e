"""The backend's plug-in class and the loaded model."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from halimede.backends.api import ModelSource, TensorInstance
from halimede.backends.cores import available_cores
from halimede.backends.scalars import with_scalars
from halimede.backends.tensorflow.files import frozen_graph, is_frozen, saved_model
from halimede.backends.tensorflow.instance import GraphTensors, TensorFlowInstance
from halimede.backends.tensorflow.model_file import PLACEHOLDERS, FileTensor, FrozenGraph, Signature, node_of, tensor_of
from halimede.backends.tensorflow.operations import keepers
from halimede.backends.tensorflow.options import PARAMETERS, TensorFlowOptions, read_options
from halimede.backends.tensorflow.session import (
    OpenedGraph,
    has_cuda,
    load_libraries,
    open_frozen_graph,
    open_saved_model,
    run_init_ops,
    runtime,
    session_settings,
)
from halimede.backends.tensorflow.signature import (
    DATATYPES,
    check_tensors,
    choose_graph,
    choose_signature,
    frozen_outline,
    model_signature,
)
from halimede.backends.tensorflow.threads import SessionThreads, plan_threads
from halimede.core.config.autocomplete import batch_size_setting, complete, find_scalars, is_complete
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import InstanceKind, ModelConfig
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import Placement, internal

log = logging.getLogger(__name__)

ON_CPU = "CPU"


class TensorFlowBackend:
    """`backend: "tensorflow"`. The artifact is a SavedModel's directory, or for the platform `tensorflow_graphdef` the
    file of a frozen graph."""

    default_model_filename = "model.savedmodel"
    isolation = "process"
    parameters = PARAMETERS
    settings = ("allow-soft-placement", "default-max-batch-size", "gpu-memory-fraction", "version")

    def default_instance_count(self, kind: str) -> int:
        return 2 if kind == ON_CPU else 1

    def preload(self, source: ModelSource) -> str:  # noqa: ARG002  # the interface's argument
        return f"{runtime.__module__}:{runtime.__name__}"

    def supports_gpu(self) -> bool:
        return has_cuda()

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the model file. Only a frozen graph needs TensorFlow for it."""
        if is_complete(config):
            return config
        most = batch_size_setting("tensorflow", source.options)
        named = replace(config, name=source.name)
        options = _options(config, source)
        if is_frozen(config, source):
            nodes = frozen_graph(source)
            load_libraries(options.op_libraries, _folders(source), source.name)
            settings = session_settings(options, SessionThreads(1, 1), ON_CPU)
            opened = open_frozen_graph(source.artifact, settings, source.name)
            signature = _frozen_signature(named, nodes, opened.session.graph)
            opened.session.close()
        else:
            signature = _saved_signature(source, options)
        found, notes = model_signature(signature, named)
        completed, more = complete(named, found, default_max_batch_size=most)
        for note in (*notes, *more):
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        """Compare with the model file, without TensorFlow: of a frozen graph, it has no datatypes of outputs."""
        options = _options(config, source)
        if is_frozen(config, source):
            check_tensors(config, frozen_outline(frozen_graph(source), config))
        else:
            check_tensors(config, model_signature(_saved_signature(source, options), config)[0])

    def load(self, config: ModelConfig, source: ModelSource) -> "TensorFlowModel":
        return TensorFlowModel(config, source)


class TensorFlowModel:
    """One loaded version. The process has one instance, which opens the session: its device is known only then."""

    def __init__(self, config: ModelConfig, source: ModelSource) -> None:
        self._config = config
        self._source = source
        self._options = _options(config, source)
        # A wrong file is found before TensorFlow is imported.
        self._nodes: FrozenGraph | None = None
        self._tags: tuple[str, ...] = ()
        self._signature = Signature((), ())
        if is_frozen(config, source):
            self._nodes = frozen_graph(source)
            check_tensors(config, frozen_outline(self._nodes, config))
        else:
            graph = choose_graph(saved_model(source), self._options.tag, source.name)
            self._tags = graph.tags
            self._signature = choose_signature(graph, self._options.signature, source.name)
            check_tensors(config, model_signature(self._signature, config)[0])
        load_libraries(self._options.op_libraries, _folders(source), source.name)

    def create_instance(self, placement: Placement) -> TensorInstance:
        config, source = self._config, self._source
        if placement.ordinal == 0:
            for note in self._options.notes:
                log.warning("model '%s': %s", source.name, note, extra={"model": source.name})
        threads = plan_threads(config, self._options, available_cores())
        settings = session_settings(self._options, threads, placement.kind)
        if self._nodes is None:
            opened = open_saved_model(source.artifact, self._tags, settings, source.name)
            signature = self._signature
        else:
            opened = open_frozen_graph(source.artifact, settings, source.name)
            signature = _frozen_signature(config, self._nodes, opened.session.graph)
        try:
            _check_device(opened.session, placement)
            found = model_signature(signature, config)[0]
            check_tensors(config, found, _fed_always(signature, opened.session.graph))
            if self._options.init_ops_file:
                run_init_ops(opened.session, self._options.init_ops_file, _folders(source), source.name)
            tensors = _graph_tensors(config, signature, opened)
            instance = TensorFlowInstance(opened.session, config, tensors, runs_in_caller=threads.runs_in_caller)
            scalars = find_scalars(config, found)
            instance.prepare(config, source.name, scalars.inputs)
        except BaseException:
            opened.session.close()
            raise
        return with_scalars(instance, scalars)

    def close(self) -> None:
        """Nothing is left: the instance has closed its session."""


def _options(config: ModelConfig, source: ModelSource) -> TensorFlowOptions:
    kinds = {group.kind for group in config.instance_group}
    on_gpu = InstanceKind.KIND_GPU in kinds or (InstanceKind.KIND_MODEL in kinds and has_cuda())
    return read_options(config, source.name, source.options, on_gpu=on_gpu)


def _folders(source: ModelSource) -> tuple[Path, ...]:
    """Where files of the model lie: its version, its directory, and the server's own folder."""
    return source.artifact.parent, source.model_directory, Path()


def _saved_signature(source: ModelSource, options: TensorFlowOptions) -> Signature:
    graph = choose_graph(saved_model(source), options.tag, source.name)
    return choose_signature(graph, options.signature, source.name)


def _frozen_signature(config: ModelConfig, nodes: FrozenGraph, graph: Any) -> Signature:
    """The tensors of a frozen graph that the configuration names, the placeholders that its outputs need, and its ends.

    Any tensor of a graph can be an input or an output, so a name that is not one of those is no mistake.
    """
    outputs = tuple(each.name for each in model_outputs(config))
    ends = tuple(name for name in nodes.ends() if graph.get_operation_by_name(name).outputs)
    inputs = dict.fromkeys(
        (*(each.name for each in model_inputs(config)), *(each.name for each in made_inputs(config)))
    )
    needed = nodes.needed(outputs or ends, frozenset(node_of(name) for name in inputs))
    names = (*inputs, *(name for name in nodes.placeholders() if name in needed))
    return Signature(
        tuple(found for name in names if (found := _frozen_tensor(name, graph))),
        tuple(found for name in dict.fromkeys((*outputs, *ends)) if (found := _frozen_tensor(name, graph))),
    )


def _frozen_tensor(name: str, graph: Any) -> FileTensor | None:
    try:
        tensor = graph.get_tensor_by_name(tensor_of(name))
    except (KeyError, ValueError):
        return None
    shape = (
        None if tensor.shape.rank is None else tuple(-1 if size is None else size for size in tensor.shape.as_list())
    )
    return FileTensor(name, tensor.name, tensor.dtype.as_datatype_enum, shape)


def _fed_always(signature: Signature, graph: Any) -> list[str]:
    """The inputs that are placeholders without a default."""
    return [each.name for each in signature.inputs if graph.get_tensor_by_name(each.tensor).op.type in PLACEHOLDERS]


def _graph_tensors(config: ModelConfig, signature: Signature, opened: OpenedGraph) -> GraphTensors:
    outputs = {each.name: each.tensor for each in signature.outputs}
    wanted = [outputs[each.name] for each in model_outputs(config)]
    registry = runtime().registry

    def is_stateful(op: str) -> bool:
        known = registry.get(op)
        return known is not None and bool(known.is_stateful)

    return GraphTensors(
        inputs={each.name: each.tensor for each in signature.inputs},
        outputs=outputs,
        input_types={each.name: DATATYPES[each.number] for each in signature.inputs},
        keeps_inputs=bool(keepers(opened.graph_def, wanted, is_stateful)),
    )


def _check_device(session: Any, placement: Placement) -> None:
    """INTERNAL if an instance for a GPU would run on the CPU, because TensorFlow cannot open the device."""
    if placement.kind != "GPU" or any(device.device_type == "GPU" for device in session.list_devices()):
        return
    raise internal(
        f"instance '{placement.name}' is of KIND_GPU, and TensorFlow {runtime().version} cannot open its GPU: "
        "the driver or its libraries are missing, or do not fit it"
    )
