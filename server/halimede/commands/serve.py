"""`halimede serve`: Triton's flags under their own names, defaults and forms, made into Settings.

Values are read as Triton reads them: `--opt=v` and `--opt v`, booleans as true/on/1/false/off/0 in any case. A mistake
ends the command with code 2 and a text that names the flag.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import click

from halimede.settings import ModelControlMode, Settings

DEFAULTS = Settings()
DEVICE_LIST_VARIABLE = "HALIMEDE_DEVICE_LIST"

TRUE_WORDS = ("true", "on", "1")
FALSE_WORDS = ("false", "off", "0")


def read_boolean(text: str) -> bool:
    word = text.lower()
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise ValueError(f"Invalid option value. Got {text}; right are true, on, 1, false, off, 0")


def integer_reader(low: int, high: int) -> Callable[[str], int]:
    """A reader of integers from `low` to `high`, both included."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"Invalid option value. Got {text}; right is an integer") from None
        if not low <= number <= high:
            raise ValueError(f"Provided option value is out of bound. Got {text}; right is {low} to {high}")
        return number

    return read


def read_verbosity(text: str) -> int:
    """A level, or a boolean as in Triton's older command lines."""
    word = text.lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return int(read_boolean(text))
    return integer_reader(0, INT32_MAX)(text)


def read_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise ValueError(f"Invalid option value. Got {text}; right is a number of seconds") from None
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"Provided option value is out of bound. Got {text}; right is 0 or more")
    return seconds


def read_control_mode(text: str) -> ModelControlMode:
    for mode in ModelControlMode:
        if text == mode.value:
            return mode
    right = ", ".join(mode.value for mode in ModelControlMode)
    raise ValueError(f"Invalid option value. Got {text}; right are {right}")


def read_repository(text: str) -> Path:
    path = Path(text)
    if not text or not path.is_dir():
        raise ValueError(f"repository path is not a valid directory: {text}")
    return path


def read_model_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"a directory, which is no model file: {text}; right for a repository is --model-repository")
    if not path.is_file():
        raise ValueError(f"model file does not exist: {text}")
    return path


@dataclass(frozen=True, slots=True)
class BackendOption:
    """One `--backend-config`; `backend` is "" for a setting that every backend gets."""

    backend: str
    key: str
    value: str


def read_backend_option(text: str) -> BackendOption:
    # The value may hold commas and equals signs, so the name ends at a comma before the first equals sign.
    setting, equals, value = text.partition("=")
    backend, comma, key = setting.rpartition(",")
    if not equals or not key or (comma and not backend):
        raise ValueError(f"option format is '<backend name>,<setting>=<value>' or '<setting>=<value>'. Got {text}")
    return BackendOption(backend, key, value)


class Reader(click.ParamType[object]):
    """A click type around a function from text to value, whose ValueError becomes the usage error."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name = name
        self.read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        # Any is click's own signature; a default comes through here too, and is a value already.
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            where = param.opts[0] if isinstance(param, click.Option) else "FILE"
            raise click.UsageError(f"{where}: {error}", ctx) from None


INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

TEXT = Reader("TEXT", str)
BOOLEAN = Reader("BOOL", read_boolean)
PORT = Reader("PORT", integer_reader(0, 65535))
COUNT = Reader("COUNT", integer_reader(1, INT32_MAX))
BYTES = Reader("BYTES", integer_reader(1, INT64_MAX))
MESSAGE_BYTES = Reader("BYTES", integer_reader(1, INT32_MAX))
MILLISECONDS = Reader("MS", integer_reader(1, INT32_MAX))
SECONDS = Reader("SECONDS", read_seconds)
VERBOSITY = Reader("LEVEL", read_verbosity)
CONTROL_MODE = Reader("MODE", read_control_mode)
REPOSITORY = Reader("DIR", read_repository)
MODEL_FILE = Reader("FILE", read_model_file)
BACKEND_OPTION = Reader("[BACKEND,]KEY=VALUE", read_backend_option)


def option(name: str, reader: Reader, text: str) -> click.Option:
    """A flag that fills the setting of its own name and has that setting's default."""
    field = name.replace("-", "_")
    default = getattr(DEFAULTS, field)
    shown = default.value if isinstance(default, ModelControlMode) else str(default)
    shown = shown.lower() if reader is BOOLEAN else shown
    return click.Option(
        [f"--{name}", field], type=reader, default=default, metavar=reader.name, help=f"{text} [{shown}]"
    )


def repeatable(names: Sequence[str], reader: Reader, text: str) -> click.Option:
    """A flag that may be given several times; the first of `names` is the setting's."""
    field = names[0].replace("-", "_")
    flags = [f"--{name}" for name in names]
    return click.Option([*flags, field], type=reader, multiple=True, metavar=reader.name, help=f"{text} (repeatable)")


GROUPS: dict[str, list[click.Option]] = {
    "Models": [
        repeatable(["model-repository", "model-store"], REPOSITORY, "A folder of models."),
        option("model-control-mode", CONTROL_MODE, "none: load all at start; explicit: load what is asked for."),
        repeatable(["load-model"], TEXT, "A model to load at start in mode explicit, * for all."),
        option("model-load-thread-count", COUNT, "How many models load at once."),
        click.Option(
            ["--disable-auto-complete-config"],
            is_flag=True,
            help="Take config.pbtxt as it is; fill nothing in from the model file.",
        ),
        click.Option(
            ["--strict-model-config"],
            type=BOOLEAN,
            metavar=BOOLEAN.name,
            help="Deprecated: true is --disable-auto-complete-config.",
        ),
        repeatable(["backend-config"], BACKEND_OPTION, "A setting of one backend, or of all."),
    ],
    "Server": [
        option("id", TEXT, "The server's name in its metadata."),
        option("exit-on-error", BOOLEAN, "Exit when a model fails to load at start."),
        option("strict-readiness", BOOLEAN, "Ready means that every wanted model is."),
        option("exit-timeout-secs", SECONDS, "How long a stop waits for requests that run."),
    ],
    "HTTP": [
        option("allow-http", BOOLEAN, "Serve HTTP."),
        option("http-address", TEXT, "The address to listen on."),
        option("http-port", PORT, "The port, 0 for any free one."),
        option("http-max-input-size", BYTES, "The largest request body."),
    ],
    "gRPC": [
        option("allow-grpc", BOOLEAN, "Serve gRPC."),
        option("grpc-address", TEXT, "The address to listen on."),
        option("grpc-port", PORT, "The port, 0 for any free one."),
        option("grpc-max-input-size", MESSAGE_BYTES, "The largest message."),
    ],
    "Metrics": [
        option("allow-metrics", BOOLEAN, "Serve metrics."),
        option("allow-gpu-metrics", BOOLEAN, "Report GPUs."),
        option("allow-cpu-metrics", BOOLEAN, "Report CPU and memory."),
        click.Option(
            ["--metrics-address"], type=TEXT, metavar=TEXT.name, help="The address to listen on [--http-address]"
        ),
        option("metrics-port", PORT, "The port, 0 for any free one."),
        option("metrics-interval-ms", MILLISECONDS, "How often GPU and CPU are read."),
    ],
    "Logging": [
        option("log-verbose", VERBOSITY, "Verbose messages from this level down, 0 for none."),
        option("log-info", BOOLEAN, "Information."),
        option("log-warning", BOOLEAN, "Warnings."),
        option("log-error", BOOLEAN, "Errors."),
    ],
}


def port_collision(settings: Settings) -> str | None:
    """What is wrong when two services listen at the same address and port."""
    listening = [
        (name, address, port)
        for name, allowed, address, port in (
            ("HTTP", settings.allow_http, settings.http_address, settings.http_port),
            ("GRPC", settings.allow_grpc, settings.grpc_address, settings.grpc_port),
            ("metrics", settings.allow_metrics, settings.metrics_address, settings.metrics_port),
        )
        if allowed and port != 0
    ]
    for (one, *place), (other, *other_place) in combinations(listening, 2):
        if place == other_place:
            return (
                f"The server cannot listen to {one} requests and {other} requests at the same address and port "
                f"{place[0]}:{place[1]}"
            )
    return None


def build_settings(values: Mapping[str, Any], environment: Mapping[str, str]) -> Settings:
    """Settings from the parsed flags (by parameter name) and the environment; click.UsageError where they disagree."""
    fields = dict(values)
    if fields.pop("strict_model_config"):
        fields["disable_auto_complete_config"] = True
    if fields["metrics_address"] is None:
        fields["metrics_address"] = fields["http_address"]
    backend_config: dict[str, dict[str, str]] = {}
    for setting in fields["backend_config"]:
        backend_config.setdefault(setting.backend, {})[setting.key] = setting.value
    fields["backend_config"] = backend_config
    if device_list := environment.get(DEVICE_LIST_VARIABLE):
        fields["device_list"] = Path(device_list)
    settings = Settings(**fields)

    if settings.device_list is not None and not settings.device_list.is_file():
        raise click.UsageError(f"{DEVICE_LIST_VARIABLE}: file does not exist: {settings.device_list}")
    if not settings.model_repository and settings.model_file is None:
        raise click.UsageError("--model-repository must be specified")
    if settings.model_repository and settings.model_file is not None:
        raise click.UsageError(f"--model-repository and the model file {settings.model_file} exclude each other")
    if settings.load_model and settings.model_control_mode is not ModelControlMode.EXPLICIT:
        raise click.UsageError("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in settings.load_model and len(settings.load_model) > 1:
        raise click.UsageError("--load-model: '*' loads all models and must be alone")
    if collision := port_collision(settings):
        raise click.UsageError(collision)
    return settings


class ServeCommand(click.Command):
    """A command with grouped help and Triton's complaints about arguments that it does not know."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            unexpected = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = f" Did you mean {error.possibilities[0]}?" if error.possibilities else ""
            raise click.UsageError(f'Bad option: "{error.option_name}".{meant}', ctx) from None
        if unexpected:
            raise click.UsageError(f"Unexpected argument: {unexpected[0]}", ctx)
        return unexpected

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        help_option = self.get_help_option(ctx)
        for title, options in [*GROUPS.items(), ("Help", [help_option] if help_option else [])]:
            with formatter.section(title):
                formatter.write_dl([record for each in options if (record := each.get_help_record(ctx))])


def run_server(**values: Any) -> None:
    """Build the settings, serve until told to stop, and exit with the server's code."""
    # Any: click hands over what each parameter's own reader made.
    settings = build_settings(values, os.environ)
    if values["strict_model_config"] is not None:
        click.echo("Warning: --strict-model-config is deprecated, use --disable-auto-complete-config", err=True)

    # Imported here, so that --help and a mistyped flag answer without the server's libraries.
    from halimede.app import run

    click.get_current_context().exit(run(settings))


serve = ServeCommand(
    "serve",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
        "allow_extra_args": True,
    },
    params=[
        click.Argument(["model_file"], type=MODEL_FILE, required=False, metavar="[FILE.onnx]"),
        *(each for options in GROUPS.values() for each in options),
    ],
    callback=run_server,
    help="Serve the models of a repository, or one model file, over HTTP and gRPC until SIGTERM.\n\n"
    "Booleans are true, on, 1, false, off or 0. Defaults are in brackets.",
)
