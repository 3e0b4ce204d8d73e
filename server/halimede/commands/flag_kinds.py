"""The forms that the values of flags have: how each is shown in --help, and how it is read."""

from enum import Enum
from pathlib import Path

from halimede.commands.flag import FlagKind
from halimede.commands.readers import (
    Choice,
    read_address,
    read_backend_option,
    read_cache_setting,
    read_compute_capability,
    read_config_name,
    read_directory,
    read_file,
    read_grpc_restriction,
    read_header_pattern,
    read_http_restriction,
    read_log_file,
    read_networks,
    read_origin,
    read_repository,
    settings_reader,
)
from halimede.settings import AccessLevel, CompressionLevel, LogFormat, ModelControlMode
from halimede_spec.flag_values import (
    INT32_MAX,
    INT64_MAX,
    Form,
    Integers,
    Seconds,
    Words,
    read_age,
    read_boolean,
    read_milliseconds,
    read_text,
    read_verbosity,
)


def as_written(value: object) -> str:
    """A setting in its command line form; "" for one that has none."""
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return str(value.value)
        case float():
            return f"{value:g}"
        case (major, minor):
            return f"{major}.{minor}"
        case int() | str() | Path():
            return str(value)
        case _:
            return ""


class PollMode(Enum):
    """A mode of Triton's that is parsed only to name it in a warning."""

    POLL = "poll"


_read_known_mode = Choice(ModelControlMode)


def read_control_mode(text: str) -> Enum:
    return PollMode.POLL if text.lower() == PollMode.POLL.value else _read_known_mode(text)


BOOLEAN = FlagKind("BOOL", read_boolean, bare="true")
SWITCH = FlagKind("", read_boolean, bare="true")
TEXT = FlagKind("TEXT", read_text)
ADDRESS = FlagKind("ADDRESS", read_address)
NETWORKS = FlagKind("ADDRESS[/BITS],...", read_networks)
PORT = FlagKind("PORT", Integers(0, 65535))
COUNT = FlagKind("COUNT", Integers(1, INT32_MAX))
COUNT_OR_NONE = FlagKind("COUNT", Integers(0, INT32_MAX))
PROCESSES = FlagKind("COUNT", Integers(0, 64))
BYTES = FlagKind("BYTES", Integers(1, INT64_MAX))
BYTES_OR_NONE = FlagKind("BYTES", Integers(0, INT64_MAX))
MESSAGE_BYTES = FlagKind("BYTES", Integers(1, INT32_MAX))
MILLISECONDS = FlagKind("MS", Integers(1, INT32_MAX))
DECIMAL_MILLISECONDS = FlagKind("MS", read_milliseconds)
AGE = FlagKind("MS", read_age)
MILLISECONDS_OR_NONE = FlagKind("MS", Integers(0, INT32_MAX))
SECONDS = FlagKind("SECONDS", Seconds(1))
SECONDS_OR_NONE = FlagKind("SECONDS", Seconds(0))
WHOLE_SECONDS = FlagKind("SECONDS", Integers(0, INT32_MAX))
VERBOSITY = FlagKind("LEVEL", read_verbosity, bare="1")
CONTROL_MODE = FlagKind("MODE", read_control_mode)
CAPABILITY = FlagKind("MAJOR.MINOR", read_compute_capability)
REPOSITORY = FlagKind("DIR|URI", read_repository)
DIRECTORY = FlagKind("DIR", read_directory)
CONFIG_NAME = FlagKind("NAME", read_config_name)
FILE = FlagKind("FILE", read_file)
LOG_FILE = FlagKind("FILE", read_log_file)
PATTERN = FlagKind("REGEX", read_header_pattern)
LOG_FORMAT = FlagKind("FORMAT", Choice(LogFormat))
ACCESS = FlagKind("LEVEL", Choice(AccessLevel))
COMPRESSION = FlagKind("LEVEL", Choice(CompressionLevel))
BACKEND_OPTION = FlagKind("[BACKEND,]KEY=VALUE", read_backend_option)
ORIGIN = FlagKind("ORIGIN|*", read_origin)
HTTP_RESTRICTION = FlagKind("API[,API]...:KEY=VALUE", read_http_restriction)
GRPC_RESTRICTION = FlagKind("API[,API]...:KEY=VALUE", read_grpc_restriction)
METRICS_SETTING = FlagKind(
    "SETTING=VALUE",
    settings_reader(
        {
            "counter_latencies": read_boolean,
            "summary_latencies": read_boolean,
            "histogram_latencies": read_boolean,
            "summary_quantiles": Form(
                "<quantile>:<error>[,<quantile>:<error>]*", r"[0-9.]+:[0-9.]+(,[0-9.]+:[0-9.]+)*"
            ),
        }
    ),
)
TRACE_LEVEL = FlagKind("LEVEL", Words(("OFF", "TIMESTAMPS", "TENSORS", "MIN", "MAX")))
TRACE_COUNT = FlagKind("COUNT", Integers(-1, INT32_MAX))
TRACE_SETTING = FlagKind(
    "[MODE,]SETTING=VALUE",
    settings_reader(
        {
            "level": TRACE_LEVEL.read,
            "rate": COUNT_OR_NONE.read,
            "count": TRACE_COUNT.read,
            "mode": Words(("triton", "opentelemetry")),
            "triton,file": read_text,
            "triton,log-frequency": COUNT_OR_NONE.read,
            "opentelemetry,*": read_text,
        }
    ),
)
CACHE_SETTING = FlagKind("NAME,KEY=VALUE", read_cache_setting)
RATE_LIMIT = FlagKind("MODE", Words(("off", "execution_count")))
RATE_RESOURCE = FlagKind(
    "NAME:COUNT[:DEVICE]", Form("<resource>:<count>[:<device>]", r"[^:]+:[0-9]{1,10}(:[0-9]{1,10})?")
)
DEVICE_BYTES = FlagKind("GPU:BYTES", Form("<gpu>:<bytes>", r"[0-9]{1,10}:[0-9]{1,19}"))
DEVICE_FRACTION = FlagKind("GPU:FRACTION", Form("<gpu>:<0.0 to 1.0>", r"[0-9]{1,10}:(0(\.[0-9]*)?|1(\.0*)?|\.[0-9]+)"))
HOST_POLICY = FlagKind(
    "POLICY,SETTING=VALUE",
    Form("<policy>,numa-node=<number> or <policy>,cpu-cores=<list>", r"[^,=]+,(numa-node|cpu-cores)=[0-9,-]+"),
)
PORT_RANGE = FlagKind("LOW-HIGH", Form("<low port>-<high port>", r"[0-9]{1,5}-[0-9]{1,5}"))
SERVER_VERSION = FlagKind(
    "VERSION", Form("<major>.<minor>[.<patch>]", r"[0-9]{1,5}\.[0-9]{1,5}(\.[0-9]{1,5})?([-+.][0-9A-Za-z.]{1,20})?")
)
GRPC_THREADS = FlagKind("COUNT", Integers(2, 128))
