"""The backend's plug-in class and the loaded model."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from halimede.backends.api import ModelSource, TensorInstance
from halimede.backends.scalars import with_scalars
from halimede.backends.tensorrt.cuda import Cuda
from halimede.backends.tensorrt.engine import Engine, check_plan, open_engine
from halimede.backends.tensorrt.instance import TensorRtInstance
from halimede.backends.tensorrt.libraries import Libraries, installed
from halimede.backends.tensorrt.options import (
    MULTI_DEVICE,
    SETTINGS,
    STRATEGY,
    ModelOptions,
    read_backend_options,
    read_model_options,
)
from halimede.backends.tensorrt.profiles import read_indices
from halimede.backends.tensorrt.signature import check_engine, complete_config, usable_profiles
from halimede.core.config.autocomplete import find_scalars, is_complete
from halimede.core.config.model_config import InstanceKind, ModelConfig
from halimede.core.types import Device, DeviceKind, InferenceError, Placement
from halimede.core.types.error import clip, invalid

log = logging.getLogger(__name__)


class TensorRtBackend:
    """`backend: "tensorrt"`. The artifact is a plan: an engine, built for a version of TensorRT and a kind of GPU."""

    default_model_filename = "model.plan"
    isolation = "thread"
    parameters = (STRATEGY, MULTI_DEVICE)
    settings = SETTINGS

    def __init__(self, libraries: Callable[[], Libraries] = installed) -> None:
        self._libraries = libraries

    def isolation_for(self, settings: Mapping[str, str]) -> str:
        """Libraries, and plans that contain native code, are opened in processes of their own only."""
        return "process" if read_backend_options(settings).opens_libraries else self.isolation

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # one of every kind
        return 1

    def supports_gpu(self) -> bool:
        # It supports nothing else. Whether TensorRT is installed is said when an engine is opened.
        return True

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the engine. A complete configuration needs no engine."""
        if is_complete(config):
            return config
        options = read_backend_options(source.options)
        engine = self._probe(source)
        named = replace(config, name=source.name)
        completed, notes = complete_config(named, engine.signature, options.default_max_batch_size)
        for note in notes:
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        options = read_backend_options(source.options)
        _check_config(config, source.name)
        check_plan(source.artifact, source.name)
        # This runs in the process of the command or the server, which opens no native code of models.
        if not options.opens_libraries:
            check_engine(config, self._probe(source).signature)

    def load(self, config: ModelConfig, source: ModelSource) -> "TensorRtModel":
        return TensorRtModel(config, source, self._libraries())

    def _probe(self, source: ModelSource) -> Engine:
        """The engine on the device of the first instance, to read its tensors."""
        check_plan(source.artifact, source.name)
        libraries = self._libraries()
        Cuda(libraries.cudart).use(_cuda_number(source.device))
        return open_engine(libraries, source.artifact, source.name, read_backend_options(source.options))


class TensorRtModel:
    """One loaded version. Its instances on a device share one engine, which holds the weights."""

    def __init__(self, config: ModelConfig, source: ModelSource, libraries: Libraries) -> None:
        self._config = config
        self._source = source
        self._libraries = libraries
        self._backend_options = read_backend_options(source.options)
        self._options = _check_config(config, source.name)
        for note in self._backend_options.notes:
            log.warning("model '%s': --backend-config tensorrt,%s", source.name, note, extra={"model": source.name})
        self._lock = threading.Lock()
        self._engines: dict[int, Engine] = {}

    def create_instance(self, placement: Placement) -> TensorInstance:
        device = placement.device
        if placement.kind != "GPU" or device is None:
            raise _gpu_only(self._source.name, placement.name)
        number = _cuda_number(device)
        cuda = Cuda(self._libraries.cudart)
        cuda.use(number)
        with self._lock:
            engine = self._engines.get(number)
            if engine is None:
                path = self._source.artifact_on(device)
                engine = open_engine(self._libraries, path, self._source.name, self._backend_options)
                check_engine(self._config, engine.signature)
                self._engines[number] = engine
        indices = read_indices(placement.profile, len(engine.signature.profiles), placement.name)
        profiles = usable_profiles(self._config, engine.signature, indices)
        instance = TensorRtInstance(engine, profiles, self._config, self._options, cuda, placement.name)
        return with_scalars(instance, find_scalars(self._config, engine.signature.as_model()))

    def close(self) -> None:
        self._engines.clear()


def _cuda_number(device: Device | None) -> int:
    """CUDA's number of the device. A process can open at most one MIG slice, which CUDA then numbers 0."""
    return 0 if device is None or device.kind is DeviceKind.MIG else device.index


def _check_config(config: ModelConfig, model: str) -> ModelOptions:
    """The model's options. InferenceError for a configuration that no engine can serve."""
    options = read_model_options(config, model)
    for group in config.instance_group:
        if group.kind is not InstanceKind.KIND_GPU:
            raise _gpu_only(model, group.name)
    return options


def _gpu_only(model: str, instance: str) -> InferenceError:
    return invalid(
        f"model '{clip(model)}': TensorRT backend supports only GPU device, and '{clip(instance)}' is not on one: use "
        "instance_group { kind: KIND_GPU } on a server that has a GPU"
    )
