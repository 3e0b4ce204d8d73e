import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from halimede.backends.api import ModelSource
from halimede.backends.identity import IdentityBackend
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, ErrorCode, InferenceError, Placement, Tensor
from support.refusals import error_of

SOURCE = ModelSource("echo", 1, Path("/nowhere"), Path("/nowhere/1"))
BYTES, FP32 = DataType.BYTES, DataType.FP32


def config(pairs: dict[str, str], types: dict[str, DataType] | None = None, **parameters: object) -> ModelConfig:
    types = types or {}
    return ModelConfig(
        name="echo",
        max_batch_size=8,
        input=tuple(ModelInput(name, types.get(name, FP32), dims=(-1,)) for name in pairs),
        output=tuple(ModelOutput(name, types.get(name, FP32), dims=(-1,)) for name in pairs.values()),
        parameters={key: ModelParameter(str(value)) for key, value in parameters.items()},
    )


def instance(config: ModelConfig, ordinal: int = 0):
    return IdentityBackend().load(config, SOURCE).create_instance(Placement(f"echo_{ordinal}", ordinal, "CPU"))


@dataclass
class Request:
    """An ExecuteRequest that keeps its answer; it is cancelled after `patience` looks."""

    inputs: dict[str, Tensor]
    outputs: tuple[str, ...]
    patience: float = float("inf")
    id: str = ""
    batch_size: int = 1
    parameters: dict[str, object] = field(default_factory=dict)
    answer: object = None

    def is_cancelled(self) -> bool:
        self.patience -= 1
        return self.patience < 0

    def respond(self, outputs, *, final=True, parameters=None) -> None:
        self.answer = list(outputs)

    def fail(self, error: InferenceError) -> None:
        self.answer = error


def test_each_request_gets_its_inputs_back_under_the_outputs_names():
    echo = instance(config({"a": "b", "s": "t"}, {"s": BYTES, "t": BYTES}))
    a, s = Tensor("a", FP32, (1, 1), b"1234"), Tensor("s", BYTES, (1, 1), memoryview(b"\1\0\0\0x"))
    everything = Request({"s": s, "a": a}, ("b", "t"))
    one = Request({"a": a, "s": s}, ("t",))
    echo.execute([everything, one])
    assert everything.answer == [Tensor("t", BYTES, (1, 1), b"\1\0\0\0x"), Tensor("b", FP32, (1, 1), b"1234")]
    assert one.answer == [Tensor("t", BYTES, (1, 1), b"\1\0\0\0x")]


def test_numbered_names_pair_by_number_in_any_order():
    echo = instance(config({"INPUT1": "OUTPUT0", "INPUT0": "OUTPUT1"}))
    request = Request({"INPUT1": Tensor("INPUT1", FP32, (1,), b"1234")}, ("OUTPUT0", "OUTPUT1"))
    echo.execute([request])
    assert request.answer == [Tensor("OUTPUT1", FP32, (1,), b"1234")]


def test_the_answer_does_not_share_the_requests_memory():
    body = bytearray(b"1234")
    request = Request({"a": Tensor("a", FP32, (1,), memoryview(body))}, ("b",))
    instance(config({"a": "b"})).execute([request])
    body[:] = b"5678"
    assert request.answer == [Tensor("b", FP32, (1,), b"1234")]


@pytest.mark.parametrize(("ordinal", "least_ms"), [(0, 20), (1, 80), (2, 160)])
def test_a_batch_takes_its_delay_times_the_instances_multiplier(ordinal, least_ms):
    echo = instance(config({"a": "b"}, execute_delay_ms=20, instance_wise_delay_multiplier=4), ordinal)
    requests = [Request({}, ()), Request({}, (), patience=0)]
    begun = time.monotonic()
    echo.execute(requests)
    took_ms = (time.monotonic() - begun) * 1000
    assert [request.answer for request in requests] == [[], []]
    assert took_ms >= least_ms


def test_delay_ends_when_all_requests_are_cancelled():
    echo = instance(config({"a": "b"}, execute_delay_ms=60_000))
    requests = [Request({}, (), patience=3), Request({}, (), patience=1)]
    begun = time.monotonic()
    echo.execute(requests)
    assert time.monotonic() - begun < 30
    assert [r.answer for r in requests] == [InferenceError(ErrorCode.CANCELLED, "request was cancelled")] * 2


def test_loading_takes_the_creation_delay():
    begun = time.monotonic()
    IdentityBackend().load(config({"a": "b"}, creation_delay_sec="0.05"), SOURCE)
    assert time.monotonic() - begun >= 0.05


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (
            ModelConfig(input=(ModelInput("a", FP32),)),
            "model 'echo': the identity backend needs as many outputs as inputs, "
            "the configuration has 1 inputs and 0 outputs",
        ),
        (
            config({"a": "b"}, {"a": BYTES}),
            "model 'echo': the identity backend needs the same datatype for input 'a' (TYPE_STRING) "
            "and output 'b' (TYPE_FP32)",
        ),
        (
            config({"a": "b"}, execute_delay_ms="soon"),
            "model 'echo': parameter 'execute_delay_ms' is 'soon'; it must be a number from 0 to 86400000",
        ),
        (
            config({"a": "b"}, creation_delay_sec="nan"),
            "model 'echo': parameter 'creation_delay_sec' is 'nan'; it must be a number from 0 to 86400000",
        ),
    ],
)
def test_an_invalid_configuration_is_refused_at_load(broken, text):
    assert error_of(IdentityBackend().load, broken, SOURCE) == InferenceError(ErrorCode.INVALID_ARG, text)
