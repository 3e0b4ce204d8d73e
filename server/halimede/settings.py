"""Settings of one server process: the command line, parsed and checked. Flags keep Triton's names and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class ModelControlMode(Enum):
    NONE = "none"
    EXPLICIT = "explicit"


@dataclass(frozen=True, slots=True)
class Settings:
    """Ports are TCP ports, 0 for any free one (printed in the `Started …` line). Times are seconds."""

    model_repository: tuple[Path, ...] = ()
    model_file: Path | None = None
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    load_model: tuple[str, ...] = ()
    disable_auto_complete_config: bool = False
    model_load_thread_count: int = 16
    exit_on_error: bool = True
    strict_readiness: bool = True
    exit_timeout_secs: float = 25.0
    id: str = "triton"
    allow_http: bool = True
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    http_max_input_size: int = 64 << 20
    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    grpc_max_input_size: int = 2**31 - 1
    allow_metrics: bool = True
    metrics_address: str = "0.0.0.0"
    metrics_port: int = 8002
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_interval_ms: int = 2000
    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Per backend name, "" for the settings that every backend gets."""
    device_list: Path | None = None
    """A JSON file with the devices to use instead of asking the driver (HALIMEDE_DEVICE_LIST)."""
