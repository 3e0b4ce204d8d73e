"""The model parameters that configure worker processes. Errors are INVALID_ARG and name the parameter."""

from collections.abc import Iterator
from contextlib import contextmanager

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.parameters import MOST_INT32, ValueReader, parameters_of
from halimede.core.inventory import Inventory
from halimede.core.types import DeviceKind, InferenceError
from halimede.core.types.error import clip, invalid

THREAD, PROCESS = "thread", "process"

ISOLATION = "ISOLATION"
EXECUTION_TIMEOUT_MS = "EXECUTION_TIMEOUT_MS"
BLS_TIMEOUT_MS = "BLS_TIMEOUT_MS"
MAX_CONCURRENCY = "MAX_CONCURRENCY"
INTRA_OP_THREAD_COUNT = "INTRA_OP_THREAD_COUNT"
STRICT_OUTPUTS = "STRICT_OUTPUTS"
SPIN = "SPIN"

MOST_MILLISECONDS = MOST_INT32
DEFAULT_BLS_TIMEOUT_MS = 300_000
MOST_CONCURRENCY = 64
MOST_THREADS = 1024


def isolation_of(config: ModelConfig, backend_isolation: str) -> str:
    """Where the model's instances run: the value of its parameter ISOLATION, else the backend's default."""
    with _read(config) as reader:
        wanted = reader.choice(
            ISOLATION, {THREAD: THREAD, PROCESS: PROCESS}, backend_isolation, f"'{PROCESS}' or '{THREAD}'"
        )
    if wanted == THREAD and backend_isolation == PROCESS:
        raise _wrong(
            config,
            f"parameter '{ISOLATION}' is '{THREAD}', and instances of backend '{clip(config.backend)}' always run in "
            f"processes of their own; expected '{PROCESS}', or none",
        )
    return wanted


def isolation_on_devices(config: ModelConfig, isolation: str, inventory: Inventory, *, process_per_device: bool) -> str:
    """Where a model with instances on devices runs. `isolation` is what `isolation_of` returned.

    CUDA lets a process use only one MIG slice, whatever it can see. So with a slice and another device, each instance
    is in a process that sees its device alone. `process_per_device` is the server's default for whole GPUs.
    """
    has_slice = any(device.kind is DeviceKind.MIG for device in inventory.devices)
    if isolation == PROCESS or (has_slice and len(inventory.devices) > 1):
        if isolation == THREAD and ISOLATION in config.parameters:
            raise _wrong(
                config,
                f"parameter '{ISOLATION}' is '{THREAD}', but a process can use only one MIG slice, and this server has "
                f"{len(inventory.devices)} devices; expected '{PROCESS}', or none",
            )
        return PROCESS
    return PROCESS if process_per_device and ISOLATION not in config.parameters else isolation


def check_process_options(config: ModelConfig) -> None:
    """Read all options below once, so that errors are found before anything starts."""
    execution_timeout_ms(config)
    bls_timeout_ms(config)
    max_concurrency(config)
    intra_op_threads(config, 1, 1)
    strict_outputs(config)
    spins(config)


def execution_timeout_ms(config: ModelConfig) -> int:
    """Time limit for a batch in milliseconds; 0 for no limit."""
    return number(config, EXECUTION_TIMEOUT_MS, MOST_MILLISECONDS, 0)


def bls_timeout_ms(config: ModelConfig) -> int:
    """How long a call of the model's code may be queued at the called model; 0 for no limit."""
    return number(config, BLS_TIMEOUT_MS, MOST_MILLISECONDS, DEFAULT_BLS_TIMEOUT_MS, least=0)


def max_concurrency(config: ModelConfig) -> int:
    """Maximum number of batches that an instance executes at a time."""
    return number(config, MAX_CONCURRENCY, MOST_CONCURRENCY, 1)


def intra_op_threads(config: ModelConfig, cpus: int, instances: int) -> int:
    """Number of threads for an instance's numeric libraries: an equal share of the CPUs unless configured."""
    return number(config, INTRA_OP_THREAD_COUNT, MOST_THREADS, max(1, cpus // max(1, instances)))


def strict_outputs(config: ModelConfig) -> bool:
    """Whether outputs that differ from the configuration are refused."""
    return _flag(config, STRICT_OUTPUTS, default=False)


def spins(config: ModelConfig) -> bool:
    """Whether the server and the processes of the model may spin for each other's next frame; see `core.spin`."""
    return _flag(config, SPIN, default=True)


def number(config: ModelConfig, key: str, most: int, default: int, least: int = 1) -> int:
    """The value of a parameter, from `least` to `most`."""
    with _read(config) as reader:
        return reader.count(key, most, least, default)


def _flag(config: ModelConfig, key: str, *, default: bool) -> bool:
    with _read(config) as reader:
        return reader.choice(key, {"false": False, "true": True}, default, "'true' or 'false'")


@contextmanager
def _read(config: ModelConfig) -> Iterator[ValueReader]:
    reader = ValueReader(parameters_of(config), reads_empty=True)
    yield reader
    reader.finish(clip(config.name))


def _wrong(config: ModelConfig, what: str) -> InferenceError:
    return invalid(f"model '{clip(config.name)}': {what}")
