"""The backend's plug-in class and the loaded model."""

import logging
from dataclasses import replace
from typing import Any

from halimede.backends.api import ModelSource, TensorInstance
from halimede.backends.cores import available_cores
from halimede.backends.pytorch.complete import complete_config
from halimede.backends.pytorch.files import ModelFiles, find_files
from halimede.backends.pytorch.form import Form
from halimede.backends.pytorch.instance import TorchInstance
from halimede.backends.pytorch.loading import (
    Bound,
    check_exported,
    input_names,
    open_program,
    paths_of,
    single_elements,
)
from halimede.backends.pytorch.options import PARAMETERS, TorchOptions, plan_threads, read_options
from halimede.backends.pytorch.runtime import configure, export_runtime, has_gpu_build, omp_limit, runtime
from halimede.backends.pytorch.samples import Shapes, configured_shapes, exported_shapes, zeros
from halimede.backends.pytorch.script import cause_of
from halimede.backends.read_memory import MEMORY_SETTING
from halimede.backends.scalars import with_scalars
from halimede.core.config.autocomplete import Scalars
from halimede.core.config.instances import instance_count
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError, Placement
from halimede.core.types.error import clip, internal

log = logging.getLogger(__name__)

PROFILED_RUNS = 2
"""Runs after which TorchScript's executor has recorded types and compiled for them."""


class PyTorchBackend:
    """`backend: "pytorch"`. The artifact is `model.pt`, `model.pt2`, or with `runtime: "model.py"` a module's code."""

    default_model_filename = "model.pt"
    isolation = "process"
    parameters = PARAMETERS
    settings = ("default-max-batch-size", MEMORY_SETTING)

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # the interface's argument
        return 1

    def preload(self, source: ModelSource) -> str:
        function = export_runtime if source.artifact.suffix == ".pt2" else runtime
        return f"{function.__module__}:{function.__name__}"

    def supports_gpu(self) -> bool:
        return has_gpu_build()

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:
        """Complete tensors and batching from the model file. A complete configuration needs no PyTorch."""
        return complete_config(config, source)

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        """What `load` finds without PyTorch: the file, the parameters, and the signature of a `.pt2` file."""
        PyTorchModel(config, source)

    def load(self, config: ModelConfig, source: ModelSource) -> "PyTorchModel":
        return PyTorchModel(config, source)


class PyTorchModel:
    """One version. Its instances share nothing: each is in a process of its own, and loads the file for its device."""

    def __init__(self, config: ModelConfig, source: ModelSource) -> None:
        self._config = replace(config, name=source.name)
        self._model = source.name
        self._files = find_files(config, source)
        self._options = read_options(config, source.name, self._files.form)
        for note in self._options.notes:
            log.warning("model '%s': %s", self._model, note)
        inputs: frozenset[str] = frozenset()
        if self._files.form in (Form.EXPORTED, Form.PACKAGE):
            inputs = check_exported(self._config, self._files, self._model).inputs
        # Of the results of a program, only runs show the shapes.
        self._scalars = Scalars(inputs, single_elements(self._config))

    def create_instance(self, placement: Placement) -> TensorInstance:
        config, files, options = self._config, self._files, self._options
        torch = runtime()
        configure(options, *plan_threads(options, available_cores(), instance_count(config), omp_limit()))
        # The process sees only the device of its instance.
        device = {"CPU": torch.device("cpu"), "GPU": torch.device("cuda", 0)}.get(placement.kind)
        bound = open_program(config, files, self._model, device, options)
        instance = TorchInstance(placement.name, config, bound, options)
        try:
            _run_before_requests(config, files, bound, options, instance)
        except BaseException:
            instance.close()
            raise
        return with_scalars(instance, self._scalars)

    def close(self) -> None:
        """No effect: the instances share nothing."""


def _run_before_requests(
    config: ModelConfig, files: ModelFiles, bound: Bound, options: TorchOptions, instance: TorchInstance
) -> None:
    """Runs with zeros, so that the first requests find everything compiled. A model that does not take zeros is served
    without them. INVALID_ARG if the outputs are not those of the configuration."""
    is_compiled = options.compile is not None
    if bound.program.is_stateful and not is_compiled:
        return
    runs = PROFILED_RUNS if files.form is Form.SCRIPT else 1
    most = max(1, config.max_batch_size)
    # torch.compile makes code for one row, then for a number of rows, then for any number.
    batches = sorted({1, min(2, most), min(3, most), most}) if is_compiled else [1]
    before = _buffers(bound.program) if is_compiled else {}
    try:
        for rows in batches:
            shapes = _shapes(config, files, rows)
            arrays = zeros(shapes) if shapes is not None else None
            if arrays is None:
                log.info("model '%s' is not run before the first request: its inputs have no fixed sizes", config.name)
                return
            for _ in range(runs):
                instance.run_zeros(arrays, rows)
    except InferenceError as error:
        if error.code is ErrorCode.INVALID_ARG:
            raise
        log.info("model '%s' is not run before the first request: %s", config.name, error.message)
    except Exception as error:
        if is_compiled:
            text = f"model '{clip(config.name)}': torch.compile failed: {clip(cause_of(error))}"
            hint = "; compiling needs a C++ compiler; TORCH_COMPILE 'false' serves the model without it"
            raise internal(text + hint) from error
        log.info(
            "model '%s' is not run before the first request: it does not take zeros: %s", config.name, cause_of(error)
        )
    finally:
        _restore(bound.program, before)


def _shapes(config: ModelConfig, files: ModelFiles, rows: int) -> Shapes | None:
    paths = paths_of(files, config.name) if files.form in (Form.EXPORTED, Form.PACKAGE) else None
    if paths is None or paths.tensors is None:
        return configured_shapes(config, rows)
    return exported_shapes(paths.tensors, paths.bind_inputs(config.name, input_names(config)), rows)


def _buffers(program: Any) -> dict[str, Any]:  # Any: torch.Tensor
    return {name: buffer.clone() for name, buffer in program.plain.named_buffers()}


def _restore(program: Any, before: dict[str, Any]) -> None:
    """The buffers of a module as they were: a run at load must not count."""
    if before:
        with runtime().no_grad():
            for name, buffer in program.plain.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
