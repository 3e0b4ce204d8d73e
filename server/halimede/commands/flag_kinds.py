"""The forms that the values of flags have: how each is shown in --help, and how it is read."""

from enum import Enum

from halimede.commands.flag import Kind
from halimede.commands.readers import (
    INT32_MAX,
    INT64_MAX,
    choice_reader,
    form_reader,
    integer_reader,
    read_address,
    read_age,
    read_backend_option,
    read_boolean,
    read_cache_setting,
    read_compute_capability,
    read_config_name,
    read_directory,
    read_file,
    read_grpc_restriction,
    read_header_pattern,
    read_http_restriction,
    read_log_file,
    read_milliseconds,
    read_repository,
    read_seconds,
    read_text,
    read_verbosity,
    settings_reader,
    word_reader,
)
from halimede.settings import AccessLevel, CompressionLevel, LogFormat, ModelControlMode


class PollMode(Enum):
    """A mode of Triton's that is parsed only to refuse it by name."""

    POLL = "poll"


_read_known_mode = choice_reader(list(ModelControlMode))


def read_control_mode(text: str) -> Enum:
    return PollMode.POLL if text.lower() == PollMode.POLL.value else _read_known_mode(text)


BOOLEAN = Kind("BOOL", read_boolean, bare="true")
SWITCH = Kind("", read_boolean, bare="true")
TEXT = Kind("TEXT", read_text)
ADDRESS = Kind("ADDRESS", read_address)
PORT = Kind("PORT", integer_reader(0, 65535))
COUNT = Kind("COUNT", integer_reader(1, INT32_MAX))
COUNT_OR_NONE = Kind("COUNT", integer_reader(0, INT32_MAX))
BYTES = Kind("BYTES", integer_reader(1, INT64_MAX))
BYTES_OR_NONE = Kind("BYTES", integer_reader(0, INT64_MAX))
MESSAGE_BYTES = Kind("BYTES", integer_reader(1, INT32_MAX))
MILLISECONDS = Kind("MS", integer_reader(1, INT32_MAX))
DECIMAL_MILLISECONDS = Kind("MS", read_milliseconds)
AGE = Kind("MS", read_age)
MILLISECONDS_OR_NONE = Kind("MS", integer_reader(0, INT32_MAX))
SECONDS = Kind("SECONDS", read_seconds)
WHOLE_SECONDS = Kind("SECONDS", integer_reader(0, INT32_MAX))
VERBOSITY = Kind("LEVEL", read_verbosity, bare="1")
CONTROL_MODE = Kind("MODE", read_control_mode)
CAPABILITY = Kind("MAJOR.MINOR", read_compute_capability)
REPOSITORY = Kind("DIR|URI", read_repository)
DIRECTORY = Kind("DIR", read_directory)
CONFIG_NAME = Kind("NAME", read_config_name)
FILE = Kind("FILE", read_file)
LOG_FILE = Kind("FILE", read_log_file)
PATTERN = Kind("REGEX", read_header_pattern)
LOG_FORMAT = Kind("FORMAT", choice_reader(list(LogFormat)))
ACCESS = Kind("LEVEL", choice_reader(list(AccessLevel)))
COMPRESSION = Kind("LEVEL", choice_reader(list(CompressionLevel)))
BACKEND_OPTION = Kind("[BACKEND,]KEY=VALUE", read_backend_option)
HTTP_RESTRICTION = Kind("API[,API]...:KEY=VALUE", read_http_restriction)
GRPC_RESTRICTION = Kind("API[,API]...:KEY=VALUE", read_grpc_restriction)
METRICS_SETTING = Kind(
    "SETTING=VALUE",
    settings_reader(
        {
            "counter_latencies": read_boolean,
            "summary_latencies": read_boolean,
            "histogram_latencies": read_boolean,
            "summary_quantiles": form_reader(
                "<quantile>:<error>[,<quantile>:<error>]*", r"[0-9.]+:[0-9.]+(,[0-9.]+:[0-9.]+)*"
            ),
        }
    ),
)
TRACE_LEVEL = Kind("LEVEL", word_reader("OFF", "TIMESTAMPS", "TENSORS", "MIN", "MAX"))
TRACE_COUNT = Kind("COUNT", integer_reader(-1, INT32_MAX))
TRACE_SETTING = Kind(
    "[MODE,]SETTING=VALUE",
    settings_reader(
        {
            "level": TRACE_LEVEL.read,
            "rate": COUNT_OR_NONE.read,
            "count": TRACE_COUNT.read,
            "mode": word_reader("triton", "opentelemetry"),
            "triton,file": read_text,
            "triton,log-frequency": COUNT_OR_NONE.read,
            "opentelemetry,*": read_text,
        }
    ),
)
CACHE_SETTING = Kind("NAME,KEY=VALUE", read_cache_setting)
RATE_LIMIT = Kind("MODE", word_reader("off", "execution_count"))
RATE_RESOURCE = Kind(
    "NAME:COUNT[:DEVICE]", form_reader("<resource>:<count>[:<device>]", r"[^:]+:[0-9]{1,10}(:[0-9]{1,10})?")
)
DEVICE_BYTES = Kind("GPU:BYTES", form_reader("<gpu>:<bytes>", r"[0-9]{1,10}:[0-9]{1,19}"))
DEVICE_FRACTION = Kind(
    "GPU:FRACTION", form_reader("<gpu>:<0.0 to 1.0>", r"[0-9]{1,10}:(0(\.[0-9]*)?|1(\.0*)?|\.[0-9]+)")
)
HOST_POLICY = Kind(
    "POLICY,SETTING=VALUE",
    form_reader("<policy>,numa-node=<number> or <policy>,cpu-cores=<list>", r"[^,=]+,(numa-node|cpu-cores)=[0-9,-]+"),
)
PORT_RANGE = Kind("LOW-HIGH", form_reader("<low port>-<high port>", r"[0-9]{1,5}-[0-9]{1,5}"))
SERVER_VERSION = Kind(
    "VERSION",
    form_reader("<major>.<minor>[.<patch>]", r"[0-9]{1,5}\.[0-9]{1,5}(\.[0-9]{1,5})?([-+.][0-9A-Za-z.]{1,20})?"),
)
GRPC_THREADS = Kind("COUNT", integer_reader(2, 128))
