"""The identity backend copies inputs to outputs. For tests, demos and measurements of the server without a model.

Input INPUT<x> goes to output OUTPUT<x> if all names have that form, else the i-th input to the i-th output. Parameters:
`execute_delay_ms` per batch, multiplied on instance i by i * `instance_wise_delay_multiplier` (at least 1), and
`creation_delay_sec` per load.
"""

import time
from collections.abc import Mapping, Sequence

from halimede.backends.api import ExecuteRequest, ModelSource
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError, Placement, Tensor, invalid
from halimede.core.types.tensor import concatenate

SLICE_SECONDS = 0.005
"""Interval at which a delay checks the cancel flags."""


class IdentityBackend:
    """Copies inputs to outputs. A model needs no file."""

    default_model_filename = ""
    isolation = "thread"
    # The last three are of Triton's identity backend, and say what its traces have.
    parameters = (
        *("creation_delay_sec", "execute_delay_ms", "instance_wise_delay_multiplier"),
        *("enable_custom_tracing", "nested_span_count", "single_activity_frequency"),
    )
    settings = ()

    def default_instance_count(self, kind: str) -> int:  # noqa: ARG002  # the interface's argument
        return 1

    def supports_gpu(self) -> bool:
        return False

    def autocomplete(self, config: ModelConfig, source: ModelSource) -> ModelConfig:  # noqa: ARG002
        return config

    def check(self, config: ModelConfig, source: ModelSource) -> None:
        self._read(config, source)

    def load(self, config: ModelConfig, source: ModelSource) -> "IdentityModel":
        """Check that each input has its output, wait `creation_delay_sec`."""
        model, creation_delay_seconds = self._read(config, source)
        time.sleep(creation_delay_seconds)
        return model

    def _read(self, config: ModelConfig, source: ModelSource) -> tuple["IdentityModel", float]:
        """The model, and the configured duration of its load."""
        outputs = output_names(config, source.name)
        delay_ms = _number(config, source.name, "execute_delay_ms")
        multiplier = _number(config, source.name, "instance_wise_delay_multiplier")
        delay = _number(config, source.name, "creation_delay_sec")
        return IdentityModel(outputs, delay_ms / 1000, multiplier), delay


class IdentityModel:
    """`outputs` maps an input's name to its output's."""

    def __init__(self, outputs: Mapping[str, str], delay_seconds: float, multiplier: float) -> None:
        self._outputs = outputs
        self._delay_seconds = delay_seconds
        self._multiplier = multiplier

    def create_instance(self, placement: Placement) -> "IdentityInstance":
        return IdentityInstance(self._outputs, self._delay_seconds * max(1, placement.ordinal * self._multiplier))

    def close(self) -> None:
        """Nothing is held."""


class IdentityInstance:
    def __init__(self, outputs: Mapping[str, str], delay_seconds: float) -> None:
        self._outputs = outputs
        self._delay_seconds = delay_seconds

    def execute(self, requests: Sequence[ExecuteRequest]) -> None:
        """Answer each request with its own inputs, still in wire layout."""
        if self._delay_seconds and not self._wait(requests):
            for request in requests:
                request.fail(InferenceError(ErrorCode.CANCELLED, "request was cancelled"))
            return
        outputs = self._outputs
        for request in requests:
            wanted = request.outputs
            request.respond(
                [
                    # A copy, because the response may outlive the buffer of the request.
                    Tensor(outputs[name], tensor.datatype, tensor.shape, concatenate((tensor.data,)))
                    for name, tensor in request.inputs.items()
                    if outputs[name] in wanted
                ]
            )

    def close(self) -> None:
        """Nothing is held."""

    def _wait(self, requests: Sequence[ExecuteRequest]) -> bool:
        """Sleep for the delay; returns early, with False, if all requests are cancelled."""
        end = time.monotonic() + self._delay_seconds
        while (left := end - time.monotonic()) > 0:
            if all(request.is_cancelled() for request in requests):
                return False
            time.sleep(min(left, SLICE_SECONDS))
        return True


def output_names(config: ModelConfig, model: str) -> dict[str, str]:
    """Output name by input name; INVALID_ARG if inputs and outputs do not pair."""
    if len(config.input) != len(config.output):
        raise invalid(
            f"model '{model}': the identity backend needs as many outputs as inputs, "
            f"the configuration has {len(config.input)} inputs and {len(config.output)} outputs"
        )
    by_name = {output.name: output for output in config.output}
    alike = {i.name: "OUTPUT" + i.name.removeprefix("INPUT") for i in config.input if i.name.startswith("INPUT")}
    if len(alike) != len(config.input) or not all(name in by_name for name in alike.values()):
        alike = {i.name: o.name for i, o in zip(config.input, config.output, strict=True)}
    for each in config.input:
        output = by_name[alike[each.name]]
        if each.data_type is not output.data_type:
            raise invalid(
                f"model '{model}': the identity backend needs the same datatype for input '{each.name}' "
                f"({each.data_type.config_name}) and output '{output.name}' ({output.data_type.config_name})"
            )
    return alike


def _number(config: ModelConfig, model: str, key: str) -> float:
    """A numeric parameter, at least 0; 0 if it is not set."""
    parameter = config.parameters.get(key)
    if parameter is None:
        return 0.0
    try:
        number = float(parameter.string_value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 86_400_000:
        raise invalid(
            f"model '{model}': parameter '{key}' is '{parameter.string_value}'; it must be a number from 0 to 86400000"
        )
    return number
