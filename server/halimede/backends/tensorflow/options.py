"""Options for TensorFlow from a model's configuration and from `--backend-config`. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from halimede.core.config.model_config import Accelerator, ModelConfig
from halimede.core.config.process_options import MOST_THREADS
from halimede.core.types import ErrorCode, InferenceError
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

YES, NO = ("true", "on", "yes", "1"), ("false", "off", "no", "0")

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
    reader = _Reader(config, backend_options)
    optimization = config.optimization
    level = optimization.graph.level if optimization and optimization.graph else 0
    # Any number above 1 means the same in Triton, any below -1 nothing.
    if level < -1:
        reader.problems.append(f"optimization.graph.level is {level}; it must be -1, 0, 1 or 2")
    if level > 0 and not on_gpu:
        reader.notes.append(
            f"optimization.graph.level {level} has no effect on CPUs; TF_XLA_FLAGS=--tf_xla_cpu_global_jit in the "
            "server's environment makes XLA compile for them"
        )
    accelerators = optimization.execution_accelerators if optimization else None
    if accelerators and accelerators.cpu_execution_accelerator:
        # Triton's text.
        reader.problems.append("CPU Execution Accelerator is not supported in TensorFlow backend")
    mixed = reader.accelerators(accelerators.gpu_execution_accelerator) if accelerators and on_gpu else False
    reader.check_version()
    reader.check_session_share_count()
    options = TensorFlowOptions(
        intra_threads=reader.count("TF_NUM_INTRA_THREADS"),
        inter_threads=reader.count("TF_NUM_INTER_THREADS"),
        per_session_threads=reader.flag(
            "parameter 'TF_USE_PER_SESSION_THREADS'", reader.text("TF_USE_PER_SESSION_THREADS"), default=False
        ),
        tag=reader.text("TF_GRAPH_TAG"),
        signature=reader.text("TF_SIGNATURE_DEF"),
        init_ops_file=reader.text("TF_INIT_OPS_FILE"),
        soft_placement=reader.flag(
            "--backend-config tensorflow,allow-soft-placement",
            backend_options.get("allow-soft-placement", ""),
            default=True,
        ),
        memory_fraction=reader.memory_fraction(),
        jit_level=JIT_LEVELS.get(min(level, 2), 0),
        mixed_precision=mixed,
        op_libraries=config.model_operations.op_library_filename if config.model_operations else (),
    )
    if reader.problems:
        raise InferenceError(ErrorCode.INVALID_ARG, f"model '{model}': {'; '.join(reader.problems)}")
    return replace(options, notes=tuple(reader.notes))


def max_batch_size(backend_options: Mapping[str, str], default: int) -> int:
    """The batch size to complete a configuration with. INVALID_ARG."""
    given = backend_options.get("default-max-batch-size", str(default))
    if not _is_number(given, 2**31 - 1):
        raise InferenceError(
            ErrorCode.INVALID_ARG,
            f"--backend-config tensorflow,default-max-batch-size={clip(given)}: it must be a number, at least 0",
        )
    return int(given)


class _Reader:
    """Reads settings and collects problems and notes."""

    def __init__(self, config: ModelConfig, backend_options: Mapping[str, str]) -> None:
        self._parameters = {key: value.string_value for key, value in config.parameters.items()}
        self._backend_options = backend_options
        self.problems: list[str] = []
        self.notes: list[str] = []

    def text(self, key: str) -> str:
        return self._parameters.get(key, "")

    def count(self, key: str) -> int:
        given = self.text(key) or "0"
        if not _is_number(given, MOST_THREADS):
            self.problems.append(f"parameter '{key}' is '{clip(given)}'; it must be a number from 0 to {MOST_THREADS}")
            return 0
        return int(given)

    def flag(self, what: str, given: str, *, default: bool) -> bool:
        if given.lower() in ("", *YES, *NO):
            return default if not given else given.lower() in YES
        self.problems.append(f"{what} is '{clip(given)}'; it must be one of {', '.join((*YES, *NO))}")
        return default

    def memory_fraction(self) -> float:
        given = self._backend_options.get("gpu-memory-fraction", "0")
        try:
            fraction = float(given)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            self.problems.append(
                f"--backend-config tensorflow,gpu-memory-fraction is '{clip(given)}'; it must be a number from 0 to 1"
            )
        return fraction

    def check_version(self) -> None:
        given = self._backend_options.get("version", "2")
        if given != "2":
            self.problems.append(
                f"--backend-config tensorflow,version is '{clip(given)}'; only TensorFlow 2 is supported, which also "
                "runs graphs and SavedModels of TensorFlow 1"
            )

    def check_session_share_count(self) -> None:
        given = self.text("MAX_SESSION_SHARE_COUNT") or "1"
        if not _is_number(given, 2**31 - 1) or int(given) == 0:
            self.problems.append(
                f"parameter 'MAX_SESSION_SHARE_COUNT' is '{clip(given)}'; it must be a number, at least 1"
            )
        elif int(given) > 1:
            self.notes.append(
                f"parameter 'MAX_SESSION_SHARE_COUNT' {given} has no effect: each instance is a process with a session"
            )

    def accelerators(self, given: tuple[Accelerator, ...]) -> bool:
        """Whether one of them is mixed precision."""
        for each in given:
            match each.name:
                case "auto_mixed_precision":
                    pass
                case "gpu_io":
                    self.notes.append("gpu_execution_accelerator 'gpu_io' has no effect: tensors come from the host")
                case "tensorrt":
                    self.problems.append(
                        "gpu_execution_accelerator 'tensorrt' is requested; TensorFlow 2.18 and later have no "
                        "TensorRT: remove it, or convert the model to ONNX or to a TensorRT plan"
                    )
                case _:
                    self.problems.append(
                        f"unknown Execution Accelerator '{clip(each.name)}' is requested; it must be one of "
                        "auto_mixed_precision, gpu_io"
                    )
        return any(each.name == "auto_mixed_precision" for each in given)


def _is_number(given: str, most: int) -> bool:
    # int() also accepts digits of other scripts, and refuses texts of thousands of digits.
    return given.isascii() and given.isdecimal() and len(given) <= len(str(most)) and int(given) <= most
