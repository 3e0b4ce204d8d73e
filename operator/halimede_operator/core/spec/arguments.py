"""Parses `spec.serving.args`: further flags of the server, checked by the server's own table in halimede_spec."""

from collections.abc import Mapping

from halimede_operator.core.spec.field import Field
from halimede_spec.server_flags import flag_problem

_MAX_ARGUMENTS = 64
_MAX_CHARACTERS = 4096

_PODS_ADDRESS = "Services and probes call the pod's own address"
_STATUS = "the status is read from the log"
_SERVES = "the pods serve the model of the spec, and end if it cannot be loaded"
OWNED: Mapping[str, str] = {
    **dict.fromkeys(("--model-repository", "--model-store"), "use spec.model.uri"),
    **dict.fromkeys(("--model-control-mode", "--load-model", "--exit-on-error", "--strict-readiness"), _SERVES),
    "--process-per-device": "use spec.accelerator.processPerDevice",
    "--allow-http": "probes and the operator need HTTP; use spec.serving.protocols",
    "--allow-grpc": "use spec.serving.protocols",
    "--allow-metrics": "autoscaling needs the metrics",
    "--http-port": "use spec.serving.ports.http",
    "--grpc-port": "use spec.serving.ports.grpc",
    "--metrics-port": "use spec.serving.ports.metrics",
    **dict.fromkeys(("--http-address", "--grpc-address", "--metrics-address"), _PODS_ADDRESS),
    **dict.fromkeys(("--http-max-input-size", "--grpc-max-input-size"), "use spec.serving.maxMessageSize"),
    "--drain-delay": "the pod's grace period depends on it",
    "--exit-timeout-secs": "use spec.serving.drainTimeout",
    **dict.fromkeys(("--log-format", "--log-file"), _STATUS),
    **dict.fromkeys(("--help", "-h", "--version"), "the server would not start"),
}
"""The flags that the operator sets, or depends on; each with what to use instead, or the reason."""

_RESTRICTED = "--http-restricted-api"
_CALLED = frozenset({"health", "model-repository"})
"""The APIs that probes and the operator call, without a header."""


def read_arguments(field: Field) -> tuple[str, ...]:
    """The arguments as they are given, each as `--name=value` or `--name`."""
    return tuple(_argument(entry) for entry in field.items(most=_MAX_ARGUMENTS))


def _argument(field: Field) -> str:
    argument = field.required("a flag of the server as --name=value").text("", max_length=_MAX_CHARACTERS)
    name, _, value = argument.partition("=")
    if name in OWNED:
        field.refuse(f"must not have {name}: {OWNED[name]}")
    elif argument and (problem := flag_problem(argument)) is not None:
        field.refuse(f"must be a flag of the server as --name=value: {problem}")
    elif name == _RESTRICTED and (called := _CALLED.intersection(value.partition(":")[0].split(","))):
        apis = " and ".join(sorted(called))
        field.refuse(f"must not restrict {apis}: probes and the operator send no header")
    return argument
