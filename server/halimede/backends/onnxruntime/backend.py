"""The backend's plug-in class and the loaded model."""

import logging
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from halimede.backends.api import ModelSource, TensorInstance
from halimede.backends.cores import available_cores
from halimede.backends.onnxruntime.instance import OnnxInstance
from halimede.backends.onnxruntime.options import CPU, CUDA, PARAMETERS, OnnxOptions, Provider, read_options
from halimede.backends.onnxruntime.session import (
    check_available,
    open_session,
    probe_session,
    runtime,
    start_global_pool,
)
from halimede.backends.onnxruntime.signature import check_model, read_signature
from halimede.backends.onnxruntime.threads import ThreadPlan, plan_threads
from halimede.backends.scalars import with_scalars
from halimede.core.config.autocomplete import Scalars, batch_size_setting, complete, is_complete
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import InstanceKind, ModelConfig
from halimede.core.config.parameters import number_setting
from halimede.core.types import Device, DeviceKind, InferenceError, Placement, internal, unavailable

log = logging.getLogger(__name__)


class OnnxRuntimeBackend:
    """`backend: "onnxruntime"`. The artifact is a model file, or a directory with a `model.onnx` and its data files."""

    default_model_filename = "model.onnx"
    isolation = "thread"
    parameters = PARAMETERS
    settings = ("default-max-batch-size", "enable-global-threadpool", "intra-op-thread-count", "inter-op-thread-count")

    def default_instance_count(self, kind: str) -> int:
        return 2 if kind == "CPU" else 1

    def supports_gpu(self) -> bool:
        try:
            return CUDA in runtime().get_available_providers()
        except InferenceError:
            return False

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the model file. A complete configuration needs no session."""
        if is_complete(config):
            return config
        most = batch_size_setting("onnxruntime", source.options)
        path = _model_path(source)
        session = probe_session(path, _use_global_pool(source))
        named = replace(config, name=source.name)
        completed, notes = complete(named, read_signature(session, path, named), default_max_batch_size=most)
        for note in notes:
            log.warning("%s", note, extra={"model": source.name})
        return completed

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        path = _model_path(source)
        _usable_options(config, source.name, *_instance_counts(config))
        check_model(config, path, probe_session(path, _use_global_pool(source)))

    def load(self, config: ModelConfig, source: ModelSource) -> "OnnxModel":
        return OnnxModel(config, source)


class OnnxModel:
    """One loaded version. Its sessions are safe to use from several threads.

    CPU instances share a session if `plan_threads` allows it. GPU instances have one each: a session has one CUDA
    stream, and batches on the same stream run one after another.
    """

    def __init__(self, config: ModelConfig, source: ModelSource) -> None:
        self._config = config
        self._name = source.name
        self._source = source
        self._path = _model_path(source)
        cpu, gpu = _instance_counts(config)
        self._options = options = _usable_options(config, source.name, cpu, gpu)
        self._cpu_threads = self._gpu_threads = None
        if not _use_global_pool(source):
            cores = available_cores()
            intra, inter, parallel = options.intra_op_threads, options.inter_op_threads, options.parallel
            self._cpu_threads = plan_threads(cores, max(1, cpu), intra=intra, inter=inter, parallel=parallel)
            self._gpu_threads = plan_threads(
                cores, max(1, gpu), intra=intra, inter=inter, parallel=parallel, can_share=False
            )
        self._scalars = Scalars()
        self._lock = threading.Lock()
        self._cpu_session: Any = None
        if cpu:
            # Opened here, so that a model that cannot be loaded fails before its instances start.
            self._cpu_session = self._open(options.cpu, self._cpu_threads, self._path)

    def create_instance(self, placement: Placement) -> TensorInstance:
        session = self._gpu_session(placement) if placement.kind == "GPU" else self._next_cpu_session()
        return with_scalars(OnnxInstance(session, self._config, self._options.arena_shrinkage), self._scalars)

    def close(self) -> None:
        self._cpu_session = None

    def _next_cpu_session(self) -> Any:
        with self._lock:
            session = self._cpu_session
            if self._cpu_threads is not None and not self._cpu_threads.share:
                self._cpu_session = None
        return session if session is not None else self._open(self._options.cpu, self._cpu_threads, self._path)

    def _gpu_session(self, placement: Placement) -> Any:
        device = placement.device
        if device is None:
            raise internal(f"instance '{placement.name}' is of KIND_GPU and has no device")
        # A process can open at most one MIG slice, which CUDA then numbers 0.
        number = "0" if device.kind is DeviceKind.MIG else str(device.index)
        providers = tuple(
            (name, options if name == CPU else {"device_id": number} | options) for name, options in self._options.gpu
        )
        return self._open(providers, self._gpu_threads, _model_path(self._source, device))

    def _open(self, providers: tuple[Provider, ...], threads: ThreadPlan | None, path: Path) -> Any:
        session = open_session(path, self._name, self._options, threads, providers)
        self._scalars = check_model(self._config, path, session)
        return session


def _usable_options(config: ModelConfig, model: str, cpu: int, gpu: int) -> OnnxOptions:
    """The options for these numbers of instances, with installed providers only. INVALID_ARG, UNSUPPORTED."""
    options = read_options(config, model, on_gpu=gpu > 0)
    if gpu:
        check_available(options.gpu, model)
    if cpu:
        check_available(options.cpu, model)
    return options


def _model_path(source: ModelSource, device: Device | None = None) -> Path:
    """The model file on the device: the artifact, or the `model.onnx` in it if it is a directory."""
    artifact = source.artifact_on(device)
    path = artifact / "model.onnx" if artifact.is_dir() else artifact
    if not path.is_file():
        raise unavailable(f"unable to find '{path}' for model '{source.name}'{_files_beside(path)}")
    return path


def _files_beside(path: Path) -> str:
    """A hint that names model files with other names in the directory."""
    names = sorted(each.name for each in islice(path.parent.glob("*.onnx"), 100))
    if not names:
        return ""
    listed = ", ".join(f"'{name}'" for name in names[:3])
    return f": there is {listed}; rename it to '{path.name}', or name it as default_model_filename in config.pbtxt"


def _instance_counts(config: ModelConfig) -> tuple[int, int]:
    """Instances on CPUs and on GPUs."""
    on_gpu = tuple(group for group in config.instance_group if group.kind is InstanceKind.KIND_GPU)
    gpu = instance_count(replace(config, instance_group=on_gpu)) if on_gpu else 0
    return instance_count(config) - gpu, gpu


def _use_global_pool(source: ModelSource) -> bool:
    if source.options.get("enable-global-threadpool", "0").lower() not in ("1", "true"):
        return False
    intra = number_setting("onnxruntime", source.options, "intra-op-thread-count", 0)
    inter = number_setting("onnxruntime", source.options, "inter-op-thread-count", 0)
    start_global_pool(intra, inter)
    return True
