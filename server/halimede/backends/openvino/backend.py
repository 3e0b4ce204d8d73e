"""The backend's plug-in class and the loaded model."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from halimede.backends.api import ModelSource, RunContext, TensorInstance
from halimede.backends.cores import available_cores
from halimede.backends.openvino.graph import fit_shapes, has_batch_layout, read_ports, with_text_as_bytes
from halimede.backends.openvino.instance import OpenVinoInstance
from halimede.backends.openvino.options import PARAMETERS, OpenVinoOptions, Properties, compile_properties, read_options
from halimede.backends.openvino.runtime import compile_model, open_core, read_model, supports
from halimede.backends.openvino.signature import Ports, check_ports, first_batch
from halimede.backends.scalars import with_scalars
from halimede.core.config.autocomplete import ModelSignature, batch_size_setting, complete, find_scalars, is_complete
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import InstanceKind, ModelConfig
from halimede.core.types import InferenceError, Placement, invalid, unavailable

log = logging.getLogger(__name__)

OTHER_FILENAMES = ("model.onnx", "model.pdmodel", "model.tflite", "model.savedmodel")
"""Model files that are found without `default_model_filename`, in this order, if there is no model.xml."""


class OpenVinoBackend:
    """`backend: "openvino"`. The artifact is a model.xml with its model.bin, or any other file that OpenVINO reads."""

    default_model_filename = "model.xml"
    isolation = "thread"
    parameters = PARAMETERS
    settings = ("default-max-batch-size",)

    def default_instance_count(self, kind: str) -> int:
        return 2 if kind == "CPU" else 1

    def supports_gpu(self) -> bool:
        """False: a KIND_GPU instance runs on an NVIDIA GPU. TARGET_DEVICE selects Intel's."""
        return False

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the model file. A complete configuration needs no file."""
        if is_complete(config):
            return config
        most = batch_size_setting("openvino", source.options)
        named = replace(config, name=source.name)
        options = read_options(named, source.name)
        graph = read_model(open_core(options.extension), model_path(config, source))
        signature = _signature_to_complete(graph, named, options, most)
        completed, notes = complete(named, signature, default_max_batch_size=most)
        for note in notes:
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        options = _usable_options(config, source.name)
        path = model_path(config, source)
        if not options.extension:
            # Only the model's own processes open the library without which the file cannot be read.
            _fitted(read_model(open_core(""), path), config, options)

    def load(self, config: ModelConfig, source: ModelSource) -> "OpenVinoModel":
        return OpenVinoModel(config, source)


class OpenVinoModel:
    """One loaded version: a compiled model, of which each instance has an infer request."""

    def __init__(self, config: ModelConfig, source: ModelSource) -> None:
        self._options = options = _usable_options(config, source.name)
        core = open_core(options.extension)
        graph = read_model(core, model_path(config, source))
        ports, self._rows = _fitted(graph, config, options)
        self._first_batch = first_batch(ports)
        self._scalars = find_scalars(config, ports.signature(fixed_batch=self._rows > 0))
        self._has_state = bool(graph.get_sinks())
        if self._has_state and config.sequence_batching is not None:
            raise invalid(
                f"unable to load model '{source.name}': the file has states of its own (ReadValue and Assign), which "
                "every batch begins anew; for sequence_batching they must be inputs and outputs of the model"
            )
        graph, self._plan = with_text_as_bytes(graph, ports)
        properties = compile_properties(options, config, cores=available_cores(), instances=instance_count(config))
        supported = _supported(options.device, properties, source.name)
        self._compiled: Any = compile_model(core, graph, options.device, supported)

    def create_instance(self, placement: Placement) -> TensorInstance:
        instance = OpenVinoInstance(
            self._compiled, self._plan, self._rows, pads=self._options.pads_batches, has_state=self._has_state
        )
        if self._first_batch:
            _warm_up(instance, self._first_batch, placement.name)
        return with_scalars(instance, self._scalars)

    def close(self) -> None:
        self._compiled = None


def model_path(config: ModelConfig, source: ModelSource) -> Path:
    """The model file: the artifact, or a file of another format beside it if the configuration names none."""
    path = source.artifact
    if path.exists():
        return _in_directory(path)
    if config.default_model_filename in ("", OpenVinoBackend.default_model_filename):
        for name in OTHER_FILENAMES:
            if (path.parent / name).exists():
                return _in_directory(path.parent / name)
    raise unavailable(
        f"unable to find '{path}' for model '{source.name}', nor {', '.join(OTHER_FILENAMES)} beside it; "
        "name a file of another name as default_model_filename in config.pbtxt"
    )


def _in_directory(path: Path) -> Path:
    """An ONNX model in a directory, with its data files, as the backend onnxruntime takes it; others unchanged."""
    inside = path / "model.onnx"
    return inside if inside.is_file() else path


def _usable_options(config: ModelConfig, model: str) -> OpenVinoOptions:
    """The options; INVALID_ARG for one, or an instance group or input, that OpenVINO cannot serve."""
    options = read_options(config, model)
    if any(group.kind is InstanceKind.KIND_GPU for group in config.instance_group):
        raise invalid(
            f"unable to load model '{model}': KIND_GPU is a GPU of NVIDIA, which OpenVINO cannot use; for one of "
            "Intel, use KIND_CPU and the parameter TARGET_DEVICE with the value GPU"
        )
    optional = [each.name for each in config.input if each.optional]
    if optional:
        raise invalid(
            f"unable to load model '{model}': input '{optional[0]}' is optional, and OpenVINO needs every input"
        )
    return options


def _fitted(graph: Any, config: ModelConfig, options: OpenVinoOptions) -> tuple[Ports, int]:
    """The ports of the graph after its shapes fit the configuration, and the fixed size of its batches, or 0."""
    rows = fit_shapes(graph, config, options)
    ports = read_ports(graph, config)
    check_ports(config, ports, fixed_batch=rows > 0, reshapes=options.reshapes)
    return ports, rows


def _signature_to_complete(graph: Any, config: ModelConfig, options: OpenVinoOptions, most: int) -> ModelSignature:
    """The tensors from which to complete the configuration: with a batch of any size, if the file has a batch."""
    if not config.max_batch_size and most and has_batch_layout(graph):
        batching = graph.clone()
        try:
            fit_shapes(batching, replace(config, max_batch_size=most), options)
            return read_ports(batching, config).signature()
        except InferenceError as error:
            log.info("model '%s' does not batch: %s", config.name, error.message, extra={"model": config.name})
    rows = fit_shapes(graph, config, options)
    return read_ports(graph, config).signature(fixed_batch=rows > 0)


def _supported(device: str, properties: Properties, model: str) -> Properties:
    """The properties that the device has; a warning names the others, which only change how fast a model is."""
    supported = {key: value for key, value in properties.items() if supports(device, key)}
    for key in properties.keys() - supported.keys():
        log.warning(
            "model '%s': parameter '%s' has no effect on device '%s'", model, key, device, extra={"model": model}
        )
    return supported


def _warm_up(instance: OpenVinoInstance, inputs: Mapping[str, NDArray[Any]], name: str) -> None:
    """Run once: OpenVINO generates the code for a batch of any size in the first run, which takes ten times as long."""
    try:
        instance.run(inputs, (), RunContext([""], [1], []))
    except InferenceError as error:
        # The model does not take zeros, which says nothing about its requests.
        log.info("instance '%s': the run at load failed: %s", name, error.message)
