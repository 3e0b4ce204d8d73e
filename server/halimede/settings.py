"""Settings of one server process: the parsed and checked command line. Flags keep Triton's names and defaults.

`Settings` is one flat record, however long, because each field has the name of its flag: the table of flags, its
defaults, the help and error texts find a field by that name. Most parts get only the values
they need.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from halimede import __version__

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    # Not at run time: it imports numpy, and --help or an error in a flag must be quick.
    from halimede.core.types import Restrictions


class ModelControlMode(Enum):
    NONE = "none"
    EXPLICIT = "explicit"


class LogFormat(Enum):
    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


class AccessLevel(Enum):
    OFF = "off"
    FAILURES = "failures"
    ALL = "all"


class CompressionLevel(Enum):
    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which metrics are published: the duration counters, and the histogram of first responses."""

    counter_latencies: bool = True
    histogram_latencies: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """Ports are TCP ports, 0 for any free one (the log shows which). Addresses may be `unix:<path>`, and then have no
    port. Times are in seconds unless the name says otherwise; gRPC's are in milliseconds, as in Triton."""

    model_repository: tuple[Path | str, ...] = ()
    """Directories, and URIs of stores whose models are fetched before they are loaded."""
    model_file: Path | None = None
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    load_model: tuple[str, ...] = ()
    model_config_name: str = ""
    has_start_tables: bool = False
    """Whether the log has Triton's tables also on a terminal, because the program is named `tritonserver`."""
    watch: bool = False
    """Whether models are reloaded when their files change."""
    disable_auto_complete_config: bool = False
    model_load_thread_count: int = 16
    model_load_retry_count: int = 0
    unload_wait_secs: float = 60.0
    """How long an unload waits for a load of the model that is in progress (`--unload-wait-secs`)."""
    min_supported_compute_capability: tuple[int, int] = (6, 0)
    process_per_device: bool = False
    """Whether instances on whole GPUs run in worker processes too (`--process-per-device`)."""
    allow_pickle: bool = True
    """Whether models may have files that their backends unpickle (`--allow-pickle`)."""
    exit_on_error: bool = True
    strict_readiness: bool = True
    drain_delay_secs: float = 0.0
    """How long the ports still accept requests after SIGTERM, while the server is not ready (`--drain-delay`)."""
    exit_timeout_secs: float = 25.0
    hang_timeout_secs: float = 10.0
    """How long a process of the server may hang before it is ended and started again, or is not live if it is the core
    (`--hang-timeout-secs`)."""
    frontend_processes: int = 0
    trusted_proxies: "tuple[IPv4Network | IPv6Network, ...]" = ()
    """Peers whose X-Forwarded-For says for whom they make a request."""
    """The number of processes that accept, parse and answer (`--frontend-processes`); 0 for the machine's default."""
    max_sequence_state_size: int = 1 << 30
    """Maximum bytes of all states and ids of sequences."""
    max_sequence_id_size: int = 4096
    """Maximum bytes of a text that identifies a sequence."""
    id: str = "triton"
    server_version: str = __version__
    """The version in the server's metadata (`--server-version`)."""

    allow_http: bool = True
    http_address: str = "0.0.0.0"
    http_port: int = 8000
    reuse_http_port: bool = False
    http_max_input_size: int = 64 << 20
    http_header_forward_pattern: re.Pattern[str] | None = None
    http_restricted_api: "Restrictions" = field(default_factory=dict)
    http_cors_origin: tuple[str, ...] = ()
    """The sites whose pages may call the server from a browser; `*` for all, without control calls."""

    allow_grpc: bool = True
    grpc_address: str = "0.0.0.0"
    grpc_port: int = 8001
    reuse_grpc_port: bool = False
    grpc_max_input_size: int = 64 << 20
    grpc_header_forward_pattern: re.Pattern[str] | None = None
    grpc_restricted_protocol: "Restrictions" = field(default_factory=dict)
    grpc_max_response_pool_size: int = 256
    grpc_use_ssl: bool = False
    grpc_use_ssl_mutual: bool = False
    grpc_server_cert: Path | None = None
    grpc_server_key: Path | None = None
    grpc_root_cert: Path | None = None
    grpc_infer_response_compression_level: CompressionLevel = CompressionLevel.NONE
    grpc_keepalive_time: int = 7_200_000
    grpc_keepalive_timeout: int = 20_000
    grpc_keepalive_permit_without_calls: bool = False
    grpc_http2_min_recv_ping_interval_without_data: int = 300_000
    grpc_http2_max_ping_strikes: int = 2
    grpc_max_connection_age: int | None = None
    grpc_max_connection_age_grace: int | None = None
    grpc_stall_timeout_secs: float = 60.0
    """How long a client may take nothing of its answer, or not begin its request."""
    grpc_message_timeout_secs: float = 60.0
    """How long a request message may take, besides a second for each 64 KiB of it."""

    allow_metrics: bool = True
    metrics_address: str = "0.0.0.0"
    metrics_port: int = 8002
    allow_gpu_metrics: bool = True
    allow_cpu_metrics: bool = True
    metrics_interval_ms: int = 2000
    metrics_config: MetricsConfig = MetricsConfig()

    log_verbose: int = 0
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_format: LogFormat = LogFormat.DEFAULT
    log_file: Path | None = None
    log_access: AccessLevel = AccessLevel.FAILURES
    """Which requests get a log line."""

    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By backend name, "" for settings of all backends."""
    backend_directory: Path = Path("/opt/tritonserver/backends")
    """The directory of backends written in Python, each as `<name>/model.py`. It may not exist."""
    device_list: Path | None = None
    """A JSON file that lists the devices to use, instead of asking the driver (HALIMEDE_DEVICE_LIST)."""
    delay_scheduler: int = 0
    """How many requests a model waits for before its first execution (TRITONSERVER_DELAY_SCHEDULER)."""
    backlog_delay_scheduler: int = 0
    """The same for requests of sequences that wait for a sequence slot (TRITONSERVER_BACKLOG_DELAY_SCHEDULER)."""
    notices: tuple[str, ...] = ()
    """Flags that have no effect here or are deprecated, one line each, for the log."""
