"""Make Settings from parsed flags, and check flags against each other."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from halimede import __version__
from halimede.backends.access import repository_problem
from halimede.commands.flag import Flag
from halimede.commands.parse import Given
from halimede.commands.readers import UNIX
from halimede.core.repository.file_kinds import is_served_alone
from halimede.settings import ModelControlMode, Settings

DEVICE_LIST_VARIABLE = "HALIMEDE_DEVICE_LIST"
HOLDS = {
    "TRITONSERVER_DELAY_SCHEDULER": "delay_scheduler",
    "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "backlog_delay_scheduler",
}
"""Settings by environment variable."""
MOST_DELAYED = 2**31 - 1

STRICT_MODEL_CONFIG = "--strict-model-config"
VERTEX_AI = "--allow-vertex-ai"


def assemble(
    given: Given, environment: Mapping[str, str], *, server_version: str = __version__
) -> tuple[Settings, list[str]]:
    """The settings and every problem. Flags are checked against each other only if each of them could be read.
    `server_version` is the default of its flag."""
    problems = list(given.problems)
    fields = _fields(given, problems)
    # Also with --exit-on-error=false, which is about models: a server without its repository would never be ready.
    problems += _repository_problems(fields)
    if given.positional:
        file, *unexpected = given.positional
        if os.path.isfile(file) or _is_model_directory(file):
            fields["model_file"] = Path(file)
        else:
            problems.append(_no_model_file(file))
        problems += [f"Unexpected argument: {each}" for each in unexpected]
    if device_list := environment.get(DEVICE_LIST_VARIABLE):
        fields["device_list"] = Path(device_list)
        if not os.path.isfile(device_list):
            problems.append(f"{DEVICE_LIST_VARIABLE}: file does not exist: {device_list}")
    ignored = []
    for variable, field in HOLDS.items():
        delay = environment.get(variable, "")
        if delay.isascii() and delay.isdecimal() and len(delay) <= len(str(MOST_DELAYED)):
            fields[field] = min(int(delay), MOST_DELAYED)
        elif delay:
            # Triton reads it with atoi, for which this is 0.
            ignored.append(f"{variable}: '{delay[:40]}' is not a number of requests; it is ignored")
    if environment.get("AIP_MODE") == "PREDICTION" and not any(
        flag.name == VERTEX_AI for flag in (*given.values, *given.without_effect)
    ):
        text = "AIP_MODE=PREDICTION has no effect: the Vertex AI endpoint is not supported yet"
        ignored.append(f"{text}; {VERTEX_AI}=false turns this warning off")
    if problems:
        return Settings(), problems

    fields.setdefault("metrics_address", fields.get("http_address", Settings().http_address))
    fields.setdefault("server_version", server_version)
    settings = Settings(**fields)
    # Mutual authentication implies encryption, as in Triton.
    settings = replace(settings, grpc_use_ssl=settings.grpc_use_ssl or settings.grpc_use_ssl_mutual)
    notices = [*given.notices, *_deprecations(given), *_tls_notices(settings), *ignored]
    settings = replace(settings, notices=tuple(notices))
    return settings, [*_model_problems(settings), *_tls_problems(settings), *_address_problems(settings)]


def _fields(given: Given, problems: list[str]) -> dict[str, Any]:
    """Settings by name, from all flags that set one; conflicts between flags for one setting become problems."""
    by_field: dict[str, tuple[Flag, list[object]]] = {}
    for flag, values in given.values.items():
        if flag.field:
            _, before = by_field.get(flag.field, (flag, []))
            by_field[flag.field] = (flag, [*before, *values])
    fields: dict[str, Any] = {}
    for field, (flag, values) in by_field.items():
        try:
            fields[field] = flag.combine(values)
        except ValueError as error:
            problems.append(f"{flag.name}: {error}")
    return fields


def _repository_problems(fields: Mapping[str, Any]) -> Iterator[str]:
    for repository in fields.get("model_repository", ()):
        if isinstance(repository, Path) and (problem := repository_problem(repository)):
            yield f"--model-repository: {problem}"


def _is_model_directory(path: str) -> bool:
    """Whether this directory is the file of a model, such as a SavedModel."""
    return os.path.isdir(path) and is_served_alone(_listed(path))


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _is_folder_of_model(path: str) -> bool:
    # Imported here, because it imports numpy, and other mistakes must be quick.
    from halimede.core.repository.layout import is_model_directory

    return is_model_directory(_listed(path))


def _no_model_file(text: str) -> str:
    if os.path.isdir(text):
        if _is_folder_of_model(text):
            above = os.path.dirname(os.path.abspath(text))
            return f"Unexpected argument: {text} (a model's folder; serve the folder above: --model-repository={above})"
        inside = [each for name in _listed(text) if _is_model_directory(each := os.path.join(text, name))]
        hint = f", or give the model in it: {inside[0]}" if len(inside) == 1 else ""
        return f"Unexpected argument: {text} (a directory; use --model-repository for a repository{hint})"
    if "://" in text:
        return f"Unexpected argument: {text} (a URI; use --model-repository for a store, `halimede fetch` for a model)"
    if not os.path.exists(text):
        return f"Unexpected argument: {text} (no such file or directory)"
    return f"Unexpected argument: {text} (neither a flag nor a model file)"


def _deprecations(given: Given) -> Iterator[str]:
    if any(flag.name == STRICT_MODEL_CONFIG for flag in given.values):
        yield f"{STRICT_MODEL_CONFIG} is deprecated, use --disable-auto-complete-config"


def _model_problems(settings: Settings) -> Iterator[str]:
    if not settings.model_repository and settings.model_file is None:
        yield "--model-repository must be specified"
    if settings.model_repository and settings.model_file is not None:
        yield f"--model-repository and the model file {settings.model_file} exclude each other"
    if settings.load_model and settings.model_control_mode is not ModelControlMode.EXPLICIT:
        yield "Use of '--load-model' requires setting '--model-control-mode=explicit' as well."
    if settings.watch and any(isinstance(each, str) for each in settings.model_repository):
        yield "--watch checks folders, not stores: every --model-repository must be a folder"
    if "*" in settings.load_model and len(settings.load_model) > 1:
        yield "--load-model: '*' loads all models and must be alone"


def _tls_problems(settings: Settings) -> Iterator[str]:
    """Report encryption flags that would have no effect, because the user would wrongly expect protection."""
    certificates = {
        "--grpc-server-cert": settings.grpc_server_cert,
        "--grpc-server-key": settings.grpc_server_key,
        "--grpc-root-cert": settings.grpc_root_cert,
    }
    if not settings.grpc_use_ssl:
        for name, file in certificates.items():
            if file is not None:
                yield f"{name} requires --grpc-use-ssl (or --grpc-use-ssl-mutual), without which nothing is encrypted"
        return
    switch = "--grpc-use-ssl-mutual" if settings.grpc_use_ssl_mutual else "--grpc-use-ssl"
    needed = [name for name in certificates if name != "--grpc-root-cert" or settings.grpc_use_ssl_mutual]
    for name in needed:
        if certificates[name] is None:
            yield f"{switch} requires {name}"


def _tls_notices(settings: Settings) -> Iterator[str]:
    # Not an error: such command lines work with Triton, which does not ask clients for certificates either.
    if settings.grpc_root_cert is not None and settings.grpc_use_ssl and not settings.grpc_use_ssl_mutual:
        yield "--grpc-root-cert has no effect without --grpc-use-ssl-mutual: clients are not asked for a certificate"


def _address_problems(settings: Settings) -> Iterator[str]:
    services = [
        ("HTTP", settings.allow_http, settings.http_address, settings.http_port),
        ("GRPC", settings.allow_grpc, settings.grpc_address, settings.grpc_port),
        ("metrics", settings.allow_metrics, settings.metrics_address, settings.metrics_port),
    ]
    listening = [(name, _address_of(address, port)) for name, allowed, address, port in services if allowed]
    for (one, address), (other, other_address) in combinations(listening, 2):
        if address is None or address != other_address:
            continue
        is_socket = address.startswith(UNIX)
        what = "address" if is_socket else "address and port"
        # The metrics port uses HTTP's address by default: right for TCP, but unexpected for a socket.
        hint = "; set a --metrics-address for metrics" if is_socket and other == "metrics" else ""
        yield f"The server cannot listen to {one} requests and {other} requests at the same {what} {address}{hint}"


def _address_of(address: str, port: int) -> str | None:
    """Where a service listens, in normalized form; None for a port chosen by the system, which cannot conflict."""
    if address.startswith(UNIX):
        return f"{UNIX}{os.path.abspath(address.removeprefix(UNIX))}"
    return f"{address}:{port}" if port != 0 else None
