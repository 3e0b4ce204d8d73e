"""The requested outputs of an inference body, and their formats."""

from dataclasses import replace
from typing import Any

from halimede.core.config.model_config import ModelOutput
from halimede.core.types import DataType
from halimede.core.wire.destinations import BINARY, JSON, Destinations, Inline
from halimede.core.wire.http_request import decode_infer, decode_large_steps
from halimede.core.wire.steps import run
from support.inference_bodies import VIEW, asking, invalid, refusal, tensor, view
from support.refusals import error_of


def formats(*outputs: Any, **parameters: Any) -> tuple[tuple[str, ...], Destinations]:
    decoded = decode_infer(VIEW, asking(outputs=list(outputs), parameters=parameters), None)
    return decoded.request.outputs, decoded.destinations


def test_all_outputs_are_json_unless_binary_is_requested() -> None:
    assert formats() == ((), Destinations(JSON))
    assert formats(binary_data_output=True) == ((), Destinations(BINARY))


def test_named_output_defaults_to_json_independently_of_others() -> None:
    assert formats({"name": "a"}, binary_data_output=True) == (("a",), Destinations(BINARY, {"a": JSON}))


def test_every_named_output_has_its_format() -> None:
    assert formats(
        {"name": "b", "parameters": {"binary_data": True}},
        {"name": "a", "parameters": {"binary_data": False, "other": {}}},
        {"name": "c", "parameters": {"classification": 3}},
        {"name": "d", "parameters": {"classification": 2, "binary_data": True}},
        {"name": "e", "parameters": {"classification": 0}},
    ) == (
        ("b", "a", "c", "d", "e"),
        Destinations(
            JSON,
            {"b": BINARY, "a": JSON, "c": Inline(False, 3), "d": Inline(True, 2), "e": JSON},
        ),
    )


HALF = view(outputs=(ModelOutput("h", DataType.FP16, dims=(4,)), ModelOutput("y", DataType.FP32, dims=(4,))))


def test_half_floats_are_refused_as_json_before_the_model_runs() -> None:
    error = invalid("sending FP16 data via JSON is not supported. Please use the binary data format for output h")
    assert refusal(asking(), view=HALF) == error
    assert refusal(asking(outputs=[{"name": "h"}]), view=HALF) == error
    python = replace(HALF, config=replace(HALF.config, backend="python"))
    assert decode_infer(python, asking(), None).request.outputs == ()  # it may leave out outputs that are not requested
    assert refusal(asking(outputs=[{"name": "h"}]), view=python) == error
    for body in (
        asking(parameters={"binary_data_output": True}),
        asking(outputs=[{"name": "y"}]),
        asking(outputs=[{"name": "h", "parameters": {"binary_data": True}}]),
    ):
        assert decode_infer(HALF, body, None).request.inputs == []


def test_an_input_at_fault_is_named_before_an_output() -> None:
    body = asking(tensor(datatype="FP16"), outputs=[{"name": "h"}])
    error = invalid("receiving FP16 data via JSON is not supported. Please use the binary data format for input x")
    assert refusal(body, view=HALF) == error
    assert error_of(run, decode_large_steps(HALF, body, None, "")) == error


def test_an_output_without_classes_is_refused_before_the_model_runs() -> None:
    body = asking(outputs=[{"name": "h", "parameters": {"classification": 1}}])
    assert refusal(body, view=HALF) == invalid(
        "class result not available for output due to unsupported type 'FP16', output 'h'"
    )
