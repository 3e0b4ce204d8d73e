"""Options for TensorFlow from a model's configuration and from `--backend-config`. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from halimede.core.config.model_config import Accelerator, ModelConfig
from halimede.core.config.parameters import MOST_INT32, ValueReader, parameters_of, parse_number
from halimede.core.config.process_options import MOST_THREADS
from halimede.core.types.error import clip

PARAMETERS = (
    "TF_NUM_INTRA_THREADS",
    "TF_NUM_INTER_THREADS",
    "TF_USE_PER_SESSION_THREADS",
    "TF_GRAPH_TAG",
    "TF_SIGNATURE_DEF",
    "TF_INIT_OPS_FILE",
    "MAX_SESSION_SHARE_COUNT",
)
"""All parameters of a model that are read here."""

SWITCH = {**dict.fromkeys(("true", "on", "yes", "1"), True), **dict.fromkeys(("false", "off", "no", "0"), False)}

JIT_LEVELS = {-1: -1, 0: 0, 1: 1, 2: 2}
"""TensorFlow's number for a level of `optimization.graph`: without XLA, TensorFlow's default, XLA, more of XLA."""


@dataclass(frozen=True, slots=True)
class TensorFlowOptions:
    """Thread counts are 0 if not configured, `memory_fraction` is 0 for memory as needed. "" is the default of a tag
    or a signature. `notes` are settings without effect, for the log."""

    intra_threads: int = 0
    inter_threads: int = 0
    per_session_threads: bool = False
    tag: str = ""
    signature: str = ""
    init_ops_file: str = ""
    soft_placement: bool = True
    memory_fraction: float = 0.0
    jit_level: int = 0
    mixed_precision: bool = False
    op_libraries: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_options(
    config: ModelConfig, model: str, backend_options: Mapping[str, str], *, on_gpu: bool
) -> TensorFlowOptions:
    """The options; INVALID_ARG names every setting that is invalid or that TensorFlow does not have.

    Accelerators of GPUs are read only if an instance runs `on_gpu`.
    """
    parameters = ValueReader(parameters_of(config))
    settings = ValueReader(backend_options, "--backend-config tensorflow,{}")
    problems: list[str] = parameters.problems
    notes: list[str] = []
    optimization = config.optimization
    level = optimization.graph.level if optimization and optimization.graph else 0
    # Any number above 1 means the same in Triton, any below -1 nothing.
    if level < -1:
        problems.append(f"optimization.graph.level is {level}; it must be -1, 0, 1 or 2")
    if level > 0 and not on_gpu:
        notes.append(
            f"optimization.graph.level {level} has no effect on CPUs; TF_XLA_FLAGS=--tf_xla_cpu_global_jit in the "
            "server's environment makes XLA compile for them"
        )
    accelerators = optimization.execution_accelerators if optimization else None
    if accelerators and accelerators.cpu_execution_accelerator:
        # Triton's text.
        problems.append("CPU Execution Accelerator is not supported in TensorFlow backend")
    gpu_accelerators = accelerators.gpu_execution_accelerator if accelerators and on_gpu else ()
    _check_accelerators(gpu_accelerators, problems, notes)
    _check_session_share_count(parameters, notes)
    _check_version(settings)
    options = TensorFlowOptions(
        intra_threads=parameters.count("TF_NUM_INTRA_THREADS", MOST_THREADS),
        inter_threads=parameters.count("TF_NUM_INTER_THREADS", MOST_THREADS),
        per_session_threads=parameters.choice("TF_USE_PER_SESSION_THREADS", SWITCH, default=False),
        tag=parameters.text("TF_GRAPH_TAG"),
        signature=parameters.text("TF_SIGNATURE_DEF"),
        init_ops_file=parameters.text("TF_INIT_OPS_FILE"),
        soft_placement=settings.choice("allow-soft-placement", SWITCH, default=True),
        memory_fraction=_memory_fraction(settings),
        jit_level=JIT_LEVELS.get(min(level, 2), 0),
        mixed_precision=any(each.name == "auto_mixed_precision" for each in gpu_accelerators),
        op_libraries=config.model_operations.op_library_filename if config.model_operations else (),
        notes=tuple(notes),
    )
    problems += settings.problems
    parameters.finish(model)
    return options


def _memory_fraction(settings: ValueReader) -> float:
    try:
        fraction = float(settings.text("gpu-memory-fraction") or "0")
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        settings.wrong("gpu-memory-fraction", "a number from 0 to 1")
    return fraction


def _check_version(settings: ValueReader) -> None:
    given = settings.text("version") or "2"
    if given != "2":
        settings.problems.append(
            f"--backend-config tensorflow,version is '{clip(given)}'; only TensorFlow 2 is supported, which also "
            "runs graphs and SavedModels of TensorFlow 1"
        )


def _check_session_share_count(parameters: ValueReader, notes: list[str]) -> None:
    given = parameters.text("MAX_SESSION_SHARE_COUNT") or "1"
    count = parse_number(given, 1, MOST_INT32)
    if count is None:
        parameters.wrong("MAX_SESSION_SHARE_COUNT", "a number, at least 1")
    elif count > 1:
        notes.append(
            f"parameter 'MAX_SESSION_SHARE_COUNT' {given} has no effect: each instance is a process with a session"
        )


def _check_accelerators(given: Iterable[Accelerator], problems: list[str], notes: list[str]) -> None:
    for each in given:
        match each.name:
            case "auto_mixed_precision":
                pass
            case "gpu_io":
                notes.append("gpu_execution_accelerator 'gpu_io' has no effect: tensors come from the host")
            case "tensorrt":
                problems.append(
                    "gpu_execution_accelerator 'tensorrt' is requested; TensorFlow 2.18 and later have no "
                    "TensorRT: remove it, or convert the model to ONNX or to a TensorRT plan"
                )
            case _:
                problems.append(
                    f"unknown Execution Accelerator '{clip(each.name)}' is requested; it must be one of "
                    "auto_mixed_precision, gpu_io"
                )
