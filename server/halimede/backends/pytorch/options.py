"""Options for PyTorch from a model's configuration. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from halimede.backends.pytorch.form import Form
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.parameters import ValueReader, parameters_of
from halimede.core.types.error import clip

MOST_THREADS = 1024

SCRIPT_ONLY = ("DISABLE_OPTIMIZED_EXECUTION", "ENABLE_JIT_EXECUTOR", "ENABLE_JIT_PROFILING", "ENABLE_TENSOR_FUSER")
MODULE_ONLY = ("TORCH_COMPILE", "TORCH_COMPILE_OPTIONAL_PARAMETERS")

PARAMETERS = (
    "NUM_THREADS",
    "INTRA_OP_THREAD_COUNT",
    "NUM_INTEROP_THREADS",
    "INTER_OP_THREAD_COUNT",
    "INFERENCE_MODE",
    "DISABLE_CUDNN",
    "ENABLE_CACHE_CLEANING",
    "ENABLE_WEIGHT_SHARING",
    "ENABLE_NVFUSER",
    *SCRIPT_ONLY,
    *MODULE_ONLY,
)
"""All parameters of a model that are read here."""

COMPILE_ARGUMENTS: Mapping[str, tuple[type, ...]] = {
    "backend": (str,),
    "disable": (bool,),
    "dynamic": (bool, type(None)),
    "fullgraph": (bool,),
    "mode": (str, type(None)),
    "options": (dict, type(None)),
}
"""The arguments of torch.compile that JSON can express, with their types."""

WEIGHT_SHARING_NOTE = (
    "parameter 'ENABLE_WEIGHT_SHARING' has no effect: each instance runs in a process with its own weights; to save "
    "memory, configure fewer instances with more threads each (INTRA_OP_THREAD_COUNT)"
)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Thread counts are 0 and executor settings None if not configured; then PyTorch's defaults apply.

    `compile` are the arguments of torch.compile, None for a model that is not compiled. `notes` are for the log.
    """

    intra_op_threads: int = 0
    inter_op_threads: int = 0
    inference_mode: bool = True
    optimized_execution: bool = True
    cudnn: bool = True
    cache_cleaning: bool = False
    jit_executor: bool | None = None
    jit_profiling: bool | None = None
    tensor_fuser: bool | None = None
    compile: Mapping[str, object] | None = None
    notes: tuple[str, ...] = field(default=())


def read_options(config: ModelConfig, model: str, form: Form) -> TorchOptions:
    """The options in `config` for a model file of this form; INVALID_ARG names every invalid parameter."""
    given = parameters_of(config)
    reader = ValueReader(given, reads_empty=True)

    if form is not Form.SCRIPT:
        reader.problems += _refused(given, SCRIPT_ONLY, f"it is for TorchScript, and this model is {form.value}")
    if form is not Form.MODULE:
        reader.problems += _refused(
            given,
            MODULE_ONLY,
            f'it is for a module written in Python (runtime: "model.py"), and this model is {form.value}; '
            "torch._inductor.aoti_compile_and_package compiles a model before it is served",
        )
    reader.problems += _refused(
        given,
        ("ENABLE_NVFUSER",),
        "PyTorch has no NvFuser for TorchScript any more; export the model as .pt2 to have it compiled",
    )
    options = TorchOptions(
        intra_op_threads=_threads(reader, "NUM_THREADS") or _threads(reader, "INTRA_OP_THREAD_COUNT"),
        inter_op_threads=_threads(reader, "NUM_INTEROP_THREADS") or _threads(reader, "INTER_OP_THREAD_COUNT"),
        inference_mode=reader.flag("INFERENCE_MODE", default=True),
        optimized_execution=not reader.flag("DISABLE_OPTIMIZED_EXECUTION", default=False),
        cudnn=not reader.flag("DISABLE_CUDNN", default=False),
        cache_cleaning=reader.flag("ENABLE_CACHE_CLEANING", default=False),
        jit_executor=reader.flag("ENABLE_JIT_EXECUTOR", None),
        jit_profiling=reader.flag("ENABLE_JIT_PROFILING", None),
        tensor_fuser=reader.flag("ENABLE_TENSOR_FUSER", None),
        compile=_compile_arguments(reader, given),
        notes=(WEIGHT_SHARING_NOTE,) if reader.flag("ENABLE_WEIGHT_SHARING", default=False) else (),
    )
    accelerators = config.optimization.execution_accelerators if config.optimization is not None else None
    if accelerators is not None and (accelerators.gpu_execution_accelerator or accelerators.cpu_execution_accelerator):
        each = (*accelerators.gpu_execution_accelerator, *accelerators.cpu_execution_accelerator)[0]
        reader.problems.append(f"execution accelerator '{clip(each.name)}': the backend pytorch has none; remove it")
    reader.finish(model)
    return options


def plan_threads(options: TorchOptions, cores: int, instances: int, limit: int | None) -> tuple[int, int]:
    """Threads of one instance, intra-op and inter-op. `limit` is OMP_NUM_THREADS, None if it is not set.

    By default the instances share the cores. A configured number is taken as it is.
    """
    share = max(1, cores // instances)
    intra = options.intra_op_threads or min(share, limit or share)
    return intra, options.inter_op_threads or min(intra, cores)


def _refused(given: Mapping[str, str], keys: tuple[str, ...], why: str) -> list[str]:
    return [f"parameter '{key}' cannot be used: {why}" for key in keys if key in given]


def _threads(reader: ValueReader, key: str) -> int:
    return reader.count(key, MOST_THREADS, least=1)


def _compile_arguments(reader: ValueReader, given: Mapping[str, str]) -> dict[str, object] | None:
    """The arguments for torch.compile. A model with such arguments is compiled unless TORCH_COMPILE is false."""
    wanted = reader.flag("TORCH_COMPILE", None)
    key = "TORCH_COMPILE_OPTIONAL_PARAMETERS"
    text = given.get(key)
    arguments: dict[str, object] = {}
    if text is not None:
        try:
            found = json.loads(text)
        except ValueError as error:
            reader.problems.append(f"parameter '{key}' is not JSON ({error}); write an object as {{\"dynamic\": true}}")
            return None
        if not isinstance(found, dict):
            reader.problems.append(f"parameter '{key}' must be a JSON object, as {{\"dynamic\": true}}")
            return None
        arguments = {name: _compile_argument(reader, key, name, value) for name, value in found.items()}
    if wanted is False or (wanted is None and text is None) or arguments.get("disable") is True:
        return None
    return arguments


def _compile_argument(reader: ValueReader, key: str, name: str, value: object) -> object:
    types = COMPILE_ARGUMENTS.get(name)
    # Triton's documentation writes booleans as texts.
    if types is not None and bool in types and isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if types is None:
        known = ", ".join(COMPILE_ARGUMENTS)
        reader.problems.append(f"parameter '{key}' has '{clip(name)}'; it may have {known}")
    elif not isinstance(value, types):
        expected = " or ".join("null" if each is type(None) else each.__name__ for each in types)
        reader.problems.append(f"parameter '{key}': '{name}' must be {expected}")
    return value
