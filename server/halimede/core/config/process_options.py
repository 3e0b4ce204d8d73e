"""What a model's parameters say of the processes that its instances run in. Errors are INVALID_ARG and name them."""

from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

THREAD, PROCESS = "thread", "process"

ISOLATION = "ISOLATION"
EXECUTION_TIMEOUT_MS = "EXECUTION_TIMEOUT_MS"
MAX_CONCURRENCY = "MAX_CONCURRENCY"
INTRA_OP_THREAD_COUNT = "INTRA_OP_THREAD_COUNT"
STRICT_OUTPUTS = "STRICT_OUTPUTS"

MOST_MILLISECONDS = 2**31 - 1
MOST_CONCURRENCY = 64
MOST_THREADS = 1024


def isolation_of(config: ModelConfig, backend_isolation: str) -> str:
    """Where the instances of a model run: what its parameter ISOLATION says, else as its backend has it."""
    parameter = config.parameters.get(ISOLATION)
    if parameter is None:
        return backend_isolation
    wanted = parameter.string_value.lower()
    if wanted not in (THREAD, PROCESS):
        raise _wrong(
            config,
            f"parameter '{ISOLATION}' is '{clip(parameter.string_value)}'; it must be '{PROCESS}' or '{THREAD}'",
        )
    if wanted == THREAD and backend_isolation == PROCESS:
        raise _wrong(
            config,
            f"parameter '{ISOLATION}' is '{THREAD}', and instances of backend '{clip(config.backend)}' always run in "
            f"processes of their own; right is '{PROCESS}', or none",
        )
    return wanted


def check_process_options(config: ModelConfig) -> None:
    """Read everything below once, so that what is wrong is found before anything is started."""
    execution_timeout_ms(config)
    max_concurrency(config)
    intra_op_threads(config, 1, 1)
    strict_outputs(config)


def execution_timeout_ms(config: ModelConfig) -> int:
    """How long an instance may take over a batch; 0 where there is no limit."""
    return _number(config, EXECUTION_TIMEOUT_MS, MOST_MILLISECONDS) or 0


def max_concurrency(config: ModelConfig) -> int:
    """How many batches an instance takes at a time."""
    return _number(config, MAX_CONCURRENCY, MOST_CONCURRENCY) or 1


def intra_op_threads(config: ModelConfig, cpus: int, instances: int) -> int:
    """How many threads the numeric libraries of an instance have: the processors are shared unless it says more."""
    return _number(config, INTRA_OP_THREAD_COUNT, MOST_THREADS) or max(1, cpus // max(1, instances))


def strict_outputs(config: ModelConfig) -> bool:
    """Whether outputs that differ from the configuration are refused."""
    parameter = config.parameters.get(STRICT_OUTPUTS)
    if parameter is None:
        return False
    wanted = parameter.string_value.lower()
    if wanted not in ("true", "false"):
        text = f"parameter '{STRICT_OUTPUTS}' is '{clip(parameter.string_value)}'; it must be 'true' or 'false'"
        raise _wrong(config, text)
    return wanted == "true"


def _number(config: ModelConfig, key: str, most: int) -> int | None:
    """The parameter, from 1 to `most`; None when it is not there."""
    parameter = config.parameters.get(key)
    if parameter is None:
        return None
    text = parameter.string_value
    # int() takes other scripts' digits too, and no more than some thousands of any.
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most:
        return int(text)
    raise _wrong(config, f"parameter '{key}' is '{clip(text)}'; it must be a number from 1 to {most}")


def _wrong(config: ModelConfig, what: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, f"model '{clip(config.name)}': {what}")
