"""Forms: what requests have in common is one object, and the table of forms is bounded."""

import tracemalloc
from typing import Any

import pytest

from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.types.request import form_of

FP32 = DataType.FP32


def asked(model_name: str = "m", rows: int = 1, **fields: Any) -> InferenceRequest:
    return InferenceRequest(model_name, inputs=[Tensor("x", FP32, (rows, 2), bytes(8 * rows))], **fields)


def test_requests_that_differ_in_what_is_their_own_have_one_form():
    first = asked()
    others = [asked(id="1"), asked(sequence_id=7, sequence_start=True), asked(parameters={"k": 1})]

    assert all(other.form is first.form for other in others)
    assert all(other != first for other in others)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_name": "other"},
        {"model_version": "1"},
        {"rows": 2},
        {"outputs": ("y",)},
        {"priority": 1},
        {"timeout_us": 1},
        {"wants_one": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_requests_that_differ_in_another_field_have_other_forms(fields: dict[str, Any]):
    assert asked(**fields).form != asked().form


def test_a_call_of_a_step_keeps_what_the_client_asked_for():
    step = asked(priority=2, timeout_us=3, wants_one=True).form.of_step("step", "4", (("a", FP32, (1,)),), ("b",))

    assert step is form_of("step", "4", (("a", FP32, (1,)),), ("b",), 2, 3)


def test_long_forms_are_equal_though_they_are_not_kept():
    first, second = asked("m" * 10_000), asked("m" * 10_000)

    assert first.form is not second.form
    assert first == second


@pytest.mark.parametrize("size", [3_000, 100_000])
def test_forms_of_clients_take_bounded_memory(size: int):
    def send(number: int) -> None:
        asked("m" * size, rows=1 + number % 3, timeout_us=number)

    tracemalloc.start()
    try:
        for number in range(5_000):
            send(number)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert kept < 8 << 20
