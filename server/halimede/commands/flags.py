"""The table of all flags of the server: name, value, meaning, and how this server treats each.

It contains every flag of Triton. An honoured flag sets a field of Settings. A flag without effect here (models compute
the same without it, or without the feature that is not supported yet) is accepted, its value is checked, and a warning
explains why it has no effect. A flag that keeps code or data from somebody is honoured, never ignored. The parser,
--help and the documentation read only this table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any

from halimede.commands.flag import Combine, Flag, FlagKind, FlagTreatment, last
from halimede.commands.flag_kinds import (
    ACCESS,
    ADDRESS,
    AGE,
    BACKEND_OPTION,
    BOOLEAN,
    BYTES,
    BYTES_OR_NONE,
    CACHE_SETTING,
    CAPABILITY,
    COMPRESSION,
    CONFIG_NAME,
    CONTROL_MODE,
    COUNT,
    COUNT_OR_NONE,
    DECIMAL_MILLISECONDS,
    DEVICE_BYTES,
    DEVICE_FRACTION,
    DIRECTORY,
    FILE,
    GRPC_RESTRICTION,
    GRPC_THREADS,
    HOST_POLICY,
    HTTP_RESTRICTION,
    LOG_FILE,
    LOG_FORMAT,
    MESSAGE_BYTES,
    METRICS_SETTING,
    MILLISECONDS,
    MILLISECONDS_OR_NONE,
    NETWORKS,
    ORIGIN,
    PATTERN,
    PORT,
    PORT_RANGE,
    PROCESSES,
    RATE_LIMIT,
    RATE_RESOURCE,
    REPOSITORY,
    SECONDS,
    SECONDS_OR_NONE,
    SERVER_VERSION,
    SWITCH,
    TEXT,
    TRACE_COUNT,
    TRACE_LEVEL,
    TRACE_SETTING,
    VERBOSITY,
    WHOLE_SECONDS,
    PollMode,
    as_written,
)
from halimede.commands.readers import Setting, merge_backend_options, merge_restrictions
from halimede.settings import Settings

TRITON_VERSION = "2.51.0"
"""The version of Triton that this server is compatible with: clients that check it require at least some 2.x."""

DEFAULTS = Settings()


def _honoured(
    name: str,
    kind: FlagKind,
    text: str,
    *,
    field: str = "",
    combine: Combine = last,
    treat: Callable[[Any], FlagTreatment] | None = None,
    why: str = "",
) -> Flag:
    """A flag that sets the field of its own name, or `field`, and has that field's default."""
    field = field or name.removeprefix("--").replace("-", "_")
    default = as_written(getattr(DEFAULTS, field))
    return Flag((name,), kind, text, default=default, field=field, combine=combine, treat=treat, why=why)


def _repeatable(
    names: str, kind: FlagKind, text: str, *, combine: Combine = tuple, field: str = "", is_secret: bool = False
) -> Flag:
    every = tuple(names.split())
    field = field or every[0].removeprefix("--").replace("-", "_")
    return Flag(every, kind, text, field=field, combine=combine, repeatable=True, is_secret=is_secret)


def _no_effect(
    name: str, kind: FlagKind, text: str, why: str, *, repeatable: bool = False, is_secret: bool = False
) -> Flag:
    return Flag(
        (name,), kind, text, treatment=FlagTreatment.NO_EFFECT, why=why, repeatable=repeatable, is_secret=is_secret
    )


def _not_yet(name: str, kind: FlagKind, text: str, why: str, *, off: str = "", repeatable: bool = False) -> Flag:
    """A flag whose feature is missing. The server serves without it, with a warning; the value `off` needs none."""
    taken = kind.read(off) if off else None

    def treat(value: object) -> FlagTreatment:
        return FlagTreatment.HONOURED if off and value == taken else FlagTreatment.NO_EFFECT

    return Flag((name,), kind, text, off, FlagTreatment.NO_EFFECT, why, treat=treat, repeatable=repeatable)


def _treat_control_mode(mode: Enum) -> FlagTreatment:
    return FlagTreatment.NO_EFFECT if mode is PollMode.POLL else FlagTreatment.HONOURED


_METRICS_SETTINGS = frozenset(each.name for each in fields(DEFAULTS.metrics_config))


def _treat_metrics(setting: Setting) -> FlagTreatment:
    is_off = setting.name == "summary_latencies" and setting.value is False
    return FlagTreatment.HONOURED if is_off or setting.name in _METRICS_SETTINGS else FlagTreatment.NO_EFFECT


def _metrics_config(settings: Sequence[Setting]) -> object:
    # If a setting is repeated its last value counts.
    return replace(DEFAULTS.metrics_config, **{s.name: s.value for s in settings if s.name in _METRICS_SETTINGS})


def _treat_trace(setting: Setting) -> FlagTreatment:
    is_off = setting.name == "level" and setting.value == "OFF"
    return FlagTreatment.HONOURED if is_off else FlagTreatment.NO_EFFECT


_POOL = "memory comes from the system and from each model's runtime, not from pools of the server"
_UNLESS_NAMED = (
    "Authorization and the headers of restricted APIs are left out unless one alternative of the pattern is the "
    "whole name, as in x-.*|authorization."
)
_ONE_LOOP = "event loops serve all connections, without a pool of threads; see --frontend-processes"
_PACKAGES = "these plug-ins are Python packages, found by their entry points and not in a directory"
_SAGEMAKER = "the SageMaker endpoint is not supported yet"
_VERTEX = "the Vertex AI endpoint is not supported yet"
_TRACING = "tracing is not supported yet"
_CACHE = "the response cache is not supported yet, models run for every request"
_RATE = "executions cannot be rate limited yet"

HELP = Flag(("--help", "-h"), SWITCH, "Show this message and exit.")
VERSION = Flag(("--version",), SWITCH, "Show the version and exit.")

GROUPS: Mapping[str, tuple[Flag, ...]] = {
    "Models": (
        _repeatable(
            "--model-repository --model-store", REPOSITORY, "A folder of models, or the URI of one in a store (s3://…)."
        ),
        _honoured(
            "--model-control-mode",
            CONTROL_MODE,
            "none: load all models at start; explicit: load only requested models; poll is served as none.",
            treat=_treat_control_mode,
            why="mode poll is not supported yet; the models that are there at the start are served, as in mode none, "
            "and with --watch also what changes later",
        ),
        _repeatable("--load-model", TEXT, "A model to load at start in mode explicit, * for all."),
        _no_effect(
            "--repository-poll-secs",
            WHOLE_SECONDS,
            "How often mode poll checks the repository.",
            "the repository is not polled, because mode poll is not supported yet",
        ),
        _honoured(
            "--watch", BOOLEAN, "Reload models whose files change; in mode none, also load new and unload removed ones."
        ),
        _honoured("--model-config-name", CONFIG_NAME, "Prefer configs/NAME.pbtxt to config.pbtxt."),
        _honoured("--model-load-thread-count", COUNT, "How many models load in parallel."),
        _honoured("--model-load-retry-count", COUNT_OR_NONE, "How often a failed load is tried again."),
        _honoured("--unload-wait-secs", SECONDS_OR_NONE, "How long an unload waits for a load of the model to end."),
        _not_yet(
            "--model-load-gpu-limit",
            DEVICE_FRACTION,
            "The share of a GPU's memory above which no model is loaded.",
            "a GPU's memory is not checked before a load yet",
            repeatable=True,
        ),
        _not_yet(
            "--model-namespacing",
            BOOLEAN,
            "Allow models of the same name in several repositories.",
            "models of the same name in several repositories are not loaded, whatever their repository",
            off="false",
        ),
        _honoured(
            "--disable-auto-complete-config",
            SWITCH,
            "Use config.pbtxt unchanged; do not complete it from the model file.",
            combine=any,
        ),
        _honoured(
            "--strict-model-config",
            BOOLEAN,
            "Deprecated: true means --disable-auto-complete-config.",
            field="disable_auto_complete_config",
            combine=any,
        ),
        _honoured("--min-supported-compute-capability", CAPABILITY, "Do not use GPUs of a lower compute capability."),
        _honoured("--process-per-device", BOOLEAN, "Run instances on whole GPUs in worker processes too."),
        _honoured("--allow-pickle", BOOLEAN, "Load models with pickles, which can execute any code in their workers."),
        _no_effect(
            "--enable-peer-access", BOOLEAN, "Copies from GPU to GPU.", "the server copies nothing between GPUs"
        ),
        _no_effect(
            "--host-policy",
            HOST_POLICY,
            "CPUs and memory of instances.",
            "instances are not bound to processors or memory",
            repeatable=True,
        ),
    ),
    "Backends": (
        _repeatable(
            "--backend-config",
            BACKEND_OPTION,
            "A setting of one backend, or of all backends if none is named.",
            combine=merge_backend_options,
        ),
        _honoured(
            "--backend-directory",
            DIRECTORY,
            "The directory of python-based backends, each as NAME/model.py; native backends cannot be run.",
        ),
        _no_effect("--repoagent-directory", DIRECTORY, "Where repository agents are installed.", _PACKAGES),
    ),
    "Server": (
        _honoured("--id", TEXT, "The server's name in its metadata."),
        Flag(
            ("--server-version",),
            SERVER_VERSION,
            f"The version in the server's metadata: {TRITON_VERSION} under the name tritonserver, else Halimede's own.",
            field="server_version",
        ),
        _honoured("--exit-on-error", BOOLEAN, "Exit when a model fails to load at start."),
        _honoured("--strict-readiness", BOOLEAN, "Be ready only when every model that is to be loaded is ready."),
        _honoured(
            "--drain-delay",
            SECONDS_OR_NONE,
            "How long the ports still accept requests after SIGTERM, while the server is not ready.",
            field="drain_delay_secs",
        ),
        _honoured(
            "--exit-timeout-secs",
            SECONDS_OR_NONE,
            "How long a stop waits for requests in flight, after the drain delay.",
        ),
        _honoured(
            "--hang-timeout-secs",
            SECONDS,
            "How long a front end, or a model's process that is stopped, may hang; then it is ended and started again. "
            "A core that hangs for so long is not live to its front-end processes.",
        ),
        _honoured(
            "--frontend-processes",
            PROCESSES,
            "Processes that accept, parse and answer: 1 is the server's own, 0 is 1 below 4 cores, 2 below 16, else 4.",
        ),
        _honoured(
            "--trusted-proxies",
            NETWORKS,
            "Addresses of proxies. Under load their requests take turns by the address in X-Forwarded-For.",
        ),
        _honoured("--max-sequence-state-size", BYTES, "The largest size of all implicit states and ids of sequences."),
        _honoured("--max-sequence-id-size", BYTES, "The largest sequence_id that is a text."),
    ),
    "HTTP": (
        _honoured("--allow-http", BOOLEAN, "Serve HTTP."),
        _honoured("--http-address", ADDRESS, "The address to listen on, or unix:PATH, without a port."),
        _honoured("--http-port", PORT, "The port; 0 for any free port."),
        _honoured(
            "--reuse-http-port", BOOLEAN, "Let other servers with this flag listen on the same port (SO_REUSEPORT)."
        ),
        _honoured("--http-max-input-size", BYTES, "The largest request body."),
        _honoured(
            "--http-header-forward-pattern",
            PATTERN,
            "Headers that become request parameters: a regular expression for whole names, ignoring case. "
            + _UNLESS_NAMED,
        ),
        _repeatable(
            "--http-restricted-api",
            HTTP_RESTRICTION,
            "APIs that need the header KEY with this value: health, metadata, inference, shared-memory, model-config, "
            "model-repository, statistics, trace, logging.",
            combine=merge_restrictions,
            is_secret=True,
        ),
        _repeatable(
            "--http-cors-origin", ORIGIN, "A site whose pages may call the server from a browser; * for all, to infer."
        ),
        _no_effect("--http-thread-count", COUNT, "Threads that serve HTTP.", _ONE_LOOP),
    ),
    "gRPC": (
        _honoured("--allow-grpc", BOOLEAN, "Serve gRPC."),
        _honoured("--grpc-address", ADDRESS, "The address to listen on, or unix:PATH, without a port."),
        _honoured("--grpc-port", PORT, "The port; 0 for any free port."),
        _honoured(
            "--reuse-grpc-port", BOOLEAN, "Let other servers with this flag listen on the same port (SO_REUSEPORT)."
        ),
        _honoured(
            "--grpc-max-input-size", MESSAGE_BYTES, "The largest request message, before and after decompression."
        ),
        _honoured(
            "--grpc-header-forward-pattern",
            PATTERN,
            "Metadata that become request parameters: a regular expression for whole names, ignoring case. "
            + _UNLESS_NAMED,
        ),
        _repeatable(
            "--grpc-restricted-protocol",
            GRPC_RESTRICTION,
            "APIs that need the metadata triton-grpc-protocol-KEY with this value; the same APIs as for "
            "--http-restricted-api.",
            combine=merge_restrictions,
            is_secret=True,
        ),
        _honoured(
            "--grpc-max-response-pool-size",
            COUNT,
            "How many requests and responses of one stream may wait; then the server stops reading the stream.",
        ),
        _honoured("--grpc-infer-response-compression-level", COMPRESSION, "none, low, medium or high."),
        _no_effect("--grpc-infer-thread-count", GRPC_THREADS, "Threads that serve inference over gRPC.", _ONE_LOOP),
        _no_effect(
            "--grpc-infer-allocation-pool-size",
            COUNT_OR_NONE,
            "Request and response messages that are kept for reuse.",
            "messages are not kept for reuse",
        ),
    ),
    "gRPC encryption": (
        _honoured("--grpc-use-ssl", BOOLEAN, "Use TLS, with --grpc-server-cert and --grpc-server-key."),
        _honoured(
            "--grpc-use-ssl-mutual", BOOLEAN, "Use TLS and require client certificates that --grpc-root-cert signed."
        ),
        _honoured("--grpc-server-cert", FILE, "The server's certificate (PEM)."),
        _honoured("--grpc-server-key", FILE, "The server's private key (PEM)."),
        _honoured("--grpc-root-cert", FILE, "The root certificate for client certificates (PEM)."),
    ),
    "gRPC connections": (
        _honoured("--grpc-keepalive-time", MILLISECONDS, "Ping a connection after this time without data."),
        _honoured("--grpc-keepalive-timeout", MILLISECONDS_OR_NONE, "How long to wait for the answer to a ping."),
        _honoured("--grpc-keepalive-permit-without-calls", BOOLEAN, "Send and accept pings without a call in flight."),
        _no_effect(
            "--grpc-http2-max-pings-without-data",
            COUNT_OR_NONE,
            "Pings in a row without other data.",
            "gRPC limits only a client's pings by it; a server's are paced by --grpc-keepalive-time, in Triton too",
        ),
        _honoured(
            "--grpc-http2-min-recv-ping-interval-without-data",
            MILLISECONDS_OR_NONE,
            "Clients that ping more often without data get a strike.",
        ),
        _honoured(
            "--grpc-http2-max-ping-strikes", COUNT_OR_NONE, "Strikes until the connection is closed; 0 for no limit."
        ),
        _honoured("--grpc-max-connection-age", AGE, "Close a connection after this time; 0 for never."),
        _honoured("--grpc-max-connection-age-grace", AGE, "How long its calls may then still run; 0 for no limit."),
        _honoured(
            "--grpc-stall-timeout-secs", SECONDS, "How long a client may read nothing, or not begin its request."
        ),
        _honoured("--grpc-message-timeout-secs", SECONDS, "Time for a request message, and a second for each 64 KiB."),
    ),
    "Metrics": (
        _honoured("--allow-metrics", BOOLEAN, "Serve metrics."),
        _honoured("--allow-gpu-metrics", BOOLEAN, "Publish GPU metrics."),
        _honoured("--allow-cpu-metrics", BOOLEAN, "Publish CPU and memory metrics."),
        Flag(
            ("--metrics-address",),
            ADDRESS,
            "The address to listen on, or unix:PATH, without a port.",
            default="--http-address",
            field="metrics_address",
        ),
        _honoured("--metrics-port", PORT, "The port; 0 for any free port."),
        _honoured("--metrics-interval-ms", DECIMAL_MILLISECONDS, "How often GPU and CPU metrics are read."),
        Flag(
            ("--metrics-config",),
            METRICS_SETTING,
            "counter_latencies=BOOL: publish the duration counters; histogram_latencies=BOOL: publish "
            "the histogram of first responses. summary_latencies and summary_quantiles have no effect: there are "
            "histograms of requests and of queueing, and no summaries.",
            default="counter_latencies=true, histogram_latencies=true",
            why="durations are published as counters and histograms, see halimede_request_duration_seconds and "
            "halimede_queue_duration_seconds, and not as summaries",
            field="metrics_config",
            combine=_metrics_config,
            treat=_treat_metrics,
            repeatable=True,
        ),
    ),
    "Logging": (
        _honoured("--log-verbose", VERBOSITY, "Log verbose messages up to this level; 0 for none."),
        _honoured("--log-info", BOOLEAN, "Log information."),
        _honoured("--log-warning", BOOLEAN, "Log warnings."),
        _honoured("--log-error", BOOLEAN, "Log errors."),
        _honoured("--log-format", LOG_FORMAT, "default, ISO8601 or json."),
        _honoured("--log-file", LOG_FILE, "Log to this file instead of standard error."),
        _honoured("--log-access", ACCESS, "Which requests get a log line: off (none), failures or all."),
    ),
    "Tracing": (
        Flag(
            ("--trace-config",),
            TRACE_SETTING,
            "Traces of requests.",
            default="level=OFF",
            treatment=FlagTreatment.NO_EFFECT,
            why=_TRACING,
            treat=_treat_trace,
            repeatable=True,
        ),
        _no_effect("--trace-file", TEXT, "Deprecated: --trace-config triton,file=FILE.", _TRACING),
        _not_yet("--trace-level", TRACE_LEVEL, "Deprecated: --trace-config level=LEVEL.", _TRACING, off="OFF"),
        _no_effect("--trace-rate", COUNT_OR_NONE, "Deprecated: --trace-config rate=COUNT.", _TRACING),
        _no_effect("--trace-count", TRACE_COUNT, "Deprecated: --trace-config count=COUNT.", _TRACING),
        _no_effect(
            "--trace-log-frequency", COUNT_OR_NONE, "Deprecated: --trace-config triton,log-frequency=COUNT.", _TRACING
        ),
    ),
    "Response cache": (
        _no_effect(
            "--cache-config", CACHE_SETTING, "A setting of the response cache.", _CACHE, repeatable=True, is_secret=True
        ),
        _no_effect("--response-cache-byte-size", BYTES_OR_NONE, "Deprecated: --cache-config local,size=BYTES.", _CACHE),
        _no_effect("--cache-directory", DIRECTORY, "Where caches are installed.", _PACKAGES),
    ),
    "Rate limiter": (
        _not_yet("--rate-limit", RATE_LIMIT, "Whether executions wait for resources.", _RATE, off="off"),
        _no_effect("--rate-limit-resource", RATE_RESOURCE, "The amount of a resource.", _RATE, repeatable=True),
    ),
    "Memory": (
        _no_effect("--pinned-memory-pool-byte-size", BYTES_OR_NONE, "The pool of pinned memory.", _POOL),
        _no_effect("--cuda-memory-pool-byte-size", DEVICE_BYTES, "A GPU's memory pool.", _POOL, repeatable=True),
        _no_effect(
            "--cuda-virtual-address-size", DEVICE_BYTES, "A GPU's virtual address space.", _POOL, repeatable=True
        ),
        _no_effect(
            "--buffer-manager-thread-count",
            COUNT_OR_NONE,
            "Threads that copy inputs and outputs.",
            "the thread of the instance copies them",
        ),
        _not_yet(
            "--allow-client-shm",
            BOOLEAN,
            "Tensors in shared memory of clients.",
            "shared memory cannot be registered yet",
            off="false",
        ),
    ),
    "Cloud endpoints": (
        _not_yet("--allow-sagemaker", BOOLEAN, "Serve SageMaker's protocol.", _SAGEMAKER, off="false"),
        _no_effect("--sagemaker-port", PORT, "Its port.", _SAGEMAKER),
        _no_effect("--sagemaker-safe-port-range", PORT_RANGE, "The ports that it may use.", _SAGEMAKER),
        _no_effect("--sagemaker-thread-count", COUNT, "Threads that serve it.", _SAGEMAKER),
        _not_yet("--allow-vertex-ai", BOOLEAN, "Serve Vertex AI's protocol.", _VERTEX, off="false"),
        _no_effect("--vertex-ai-port", PORT, "Its port.", _VERTEX),
        _no_effect("--vertex-ai-thread-count", COUNT, "Threads that serve it.", _VERTEX),
        _no_effect("--vertex-ai-default-model", TEXT, "The model that it calls.", _VERTEX),
    ),
    "Help": (HELP, VERSION),
}
"""By the title of their group, in the order of --help."""


def all_flags() -> Iterator[Flag]:
    for flags in GROUPS.values():
        yield from flags


BY_NAME: Mapping[str, Flag] = {name: flag for flag in all_flags() for name in flag.names}
