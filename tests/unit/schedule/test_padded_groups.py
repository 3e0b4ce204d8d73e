"""Which requests of a padded batch are executed together."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, ModelParameter
from halimede.core.config.validate import validate
from halimede.core.schedule.batch_plan import MAX_PADDED_BYTES, BatchPlan, plan_batches
from halimede.core.types import DataType, Tensor

FP32, BYTES = DataType.FP32, DataType.BYTES
MIB = 1 << 20
X, B = ModelInput("X", FP32, dims=(-1, 2)), ModelInput("B", BYTES, dims=(-1,), optional=True)
MODEL = ModelConfig(
    name="m", platform="p", max_batch_size=64, input=(X, B), output=(ModelOutput("Y", FP32, dims=(-1,)),)
)


def planned(padding: str, **others: str) -> BatchPlan:
    values = {"PADDING": padding, **others}
    config = replace(MODEL, parameters={name: ModelParameter(value) for name, value in values.items()})
    assert validate(config) == ()
    plan = plan_batches(config)
    assert plan is not None
    return plan


def x(length: int, rows: int = 1) -> Tensor:
    """A row has 8 bytes for each of its length. The groups follow from shapes, so that there are no data."""
    return Tensor("X", FP32, (rows, length, 2), b"")


def strings(length: int) -> Tensor:
    return Tensor("B", BYTES, (1, length), b"")


def groups(plan: BatchPlan, *batch: Sequence[Tensor]) -> list[list[int]]:
    return plan.groups(batch, [inputs[0].shape[0] for inputs in batch])


PLAN = planned('[{"input": "X", "axis": 1}]')


def test_one_long_request_does_not_make_63_short_ones_as_long() -> None:
    batch = [[x(1)] for _ in range(64)]
    batch[5] = [x(2 * MIB)]
    assert groups(PLAN, *batch) == [[at for at in range(64) if at != 5], [5]]


def test_requests_that_fit_are_executed_together() -> None:
    assert groups(PLAN, *([x(MIB)] for _ in range(8))) == [[*range(8)]]
    assert groups(PLAN, *([x(MIB)] for _ in range(9))) == [[*range(8)], [8]]
    assert groups(PLAN, [x(1)], [x(8 * MIB)]) == [[0], [1]]


def test_a_request_that_is_too_large_alone_is_executed_alone() -> None:
    assert groups(PLAN, [x(64 * MIB, rows=4)], [x(64 * MIB)]) == [[0], [1]]
    assert groups(PLAN, [x(64 * MIB)]) == [[0]]


def test_a_bucket_counts_with_its_length() -> None:
    plan = planned('[{"input": "X", "axis": 1, "buckets": [16, 4194304]}]')
    assert groups(plan, [x(17)], [x(16)], [x(17)], [x(18)]) == [[0, 1], [2, 3]]


def test_rows_that_fill_an_allowed_size_count() -> None:
    plan = planned('[{"input": "X", "axis": 1}]', BATCH_SIZES="1,2,64")
    assert groups(plan, [x(MIB)], [x(MIB)], [x(MIB)]) == [[0, 1], [2]]


def test_inputs_that_are_padded_count_together() -> None:
    plan = planned('[{"input": "X", "axis": 1}, {"input": "B", "axis": 1}]')
    assert groups(plan, [x(2 * MIB), strings(2 * MIB)], [x(1), strings(1)]) == [[0, 1]]
    assert groups(plan, [x(2 * MIB), strings(1)], [x(1), strings(2 * MIB)]) == [[0, 1]]
    assert groups(plan, [x(3 * MIB), strings(1)], [x(1), strings(3 * MIB)]) == [[0], [1]]
    assert groups(plan, [x(5 * MIB)], [x(1)]) == [[1], [0]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8 * MIB)), min_size=1, max_size=12))
def test_each_request_is_in_one_group_and_groups_are_within_the_bound(requests: list[tuple[int, int]]) -> None:
    found = groups(PLAN, *([x(length, rows)] for rows, length in requests))
    assert sorted(at for group in found for at in group) == [*range(len(requests))]
    for group in found:
        rows, longest = sum(requests[at][0] for at in group), max(requests[at][1] for at in group)
        assert len(group) == 1 or rows * longest * 8 <= MAX_PADDED_BYTES
