"""Ragged and padded batches against slow, obvious computations."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.model_config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelParameter,
)
from halimede.core.config.validate import validate
from halimede.core.schedule.batch_plan import BatchPlan, make_batch_input, plan_batches
from halimede.core.types import DataType, ErrorCode, Tensor
from halimede.core.types.tensor import tensor_from_array
from support.refusals import error_of

FP32, INT32, INT64, BYTES = DataType.FP32, DataType.INT32, DataType.INT64, DataType.BYTES
X = ModelInput("X", FP32, dims=(-1,))
Y = ModelOutput("Y", FP32, dims=(-1,))
MODEL = ModelConfig(name="m", platform="p", max_batch_size=8, input=(X,), output=(Y,))
RAGGED = replace(MODEL, input=(replace(X, allow_ragged_batch=True),))


def parameters(**values: str) -> dict[str, ModelParameter]:
    return {name: ModelParameter(value) for name, value in values.items()}


def planned(config: ModelConfig) -> BatchPlan:
    assert validate(config) == ()
    plan = plan_batches(config)
    assert plan is not None
    return plan


def floats(*rows: list[float], name: str = "X") -> Tensor:
    return tensor_from_array(name, FP32, np.array(rows, dtype=np.float32))


def rows_of(batch: list[list[Tensor]]) -> list[int]:
    return [inputs[0].shape[0] for inputs in batch]


def lists(arrays) -> dict[str, list]:
    return {name: array.tolist() for name, array in arrays.items()}


def refusal(work) -> tuple[ErrorCode, str]:
    error = error_of(work)
    return error.code, error.message


def test_a_model_without_such_settings_has_no_plan():
    assert plan_batches(MODEL) is None
    python = replace(MODEL, backend="python", parameters=parameters(PADDING="my own", BATCH_SIZES="mine"))
    assert plan_batches(python) is None


def test_elements_of_a_ragged_input_are_flat_also_for_one_request():
    plan = planned(RAGGED)
    alone = plan.gather([[floats([1, 2], [3, 4])]], [2])
    assert (lists(alone.inputs), alone.elements) == ({"X": [1, 2, 3, 4]}, {"X": [4]})
    both = plan.gather([[floats([1, 2, 3])], [floats([4])]], [1, 1])
    assert (lists(both.inputs), both.elements) == ({"X": [1, 2, 3, 4]}, {"X": [3, 1]})


def test_ragged_strings_are_flat():
    config = replace(RAGGED, input=(ModelInput("X", BYTES, dims=(-1,), allow_ragged_batch=True),))
    batch = [[tensor_from_array("X", BYTES, np.array([row], dtype=object))] for row in ([b"a", b""], [b"c"])]
    assert lists(planned(config).gather(batch, [1, 1]).inputs) == {"X": [b"a", b"", b"c"]}


def test_inputs_that_are_not_ragged_are_stacked_beside_ragged_ones():
    config = replace(RAGGED, input=(*RAGGED.input, ModelInput("Z", FP32, dims=(1,))))
    batch = [[floats([1, 2]), floats([9], name="Z")], [floats([8], name="Z"), floats([3])]]
    assert lists(planned(config).gather(batch, [1, 1]).inputs) == {"X": [1, 2, 3], "Z": [[9], [8]]}


def slow_batch_input(kind: BatchInputKind, shapes: list[tuple[int, ...]]) -> list | int:
    """The values of a batch input, or the length for the kind whose values have no meaning."""
    counts = []
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        counts.append(count)
    sums = [sum(counts[: at + 1]) for at in range(len(counts))]
    items = [list(shape[1:]) for shape in shapes for _ in range(shape[0])]
    return {
        "BATCH_ELEMENT_COUNT": counts,
        "BATCH_ACCUMULATED_ELEMENT_COUNT": sums,
        "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, *sums],
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": max(counts),
        "BATCH_ITEM_SHAPE": items,
        "BATCH_ITEM_SHAPE_FLATTEN": [size for item in items for size in item],
    }[kind.name]


@given(st.data(), st.sampled_from(BatchInputKind), st.sampled_from([FP32, INT32]), st.integers(1, 3))
def test_batch_inputs_are_those_of_the_slow_computation(data, kind, datatype, rank):
    shape = st.tuples(st.integers(1, 3), *[st.integers(0, 4)] * rank)
    shapes = data.draw(st.lists(shape, min_size=1, max_size=4))
    config = replace(
        RAGGED,
        input=(ModelInput("X", FP32, dims=(-1,) * rank, allow_ragged_batch=True),),
        max_batch_size=100,
        batch_input=(BatchInput(kind, ("A", "B"), datatype, ("X",)),),
    )
    batch = [[tensor_from_array("X", FP32, np.zeros(shape, np.float32))] for shape in shapes]
    inputs = planned(config).gather(batch, rows_of(batch)).inputs
    expected = slow_batch_input(kind, shapes)
    for name in ("A", "B"):
        assert inputs[name].dtype == datatype.dtype
        if kind is BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
            assert inputs[name].shape == (expected,)
        else:
            assert inputs[name].tolist() == expected


def test_a_size_above_int32_does_not_fail_the_other_requests():
    """An empty tensor may have any other dimension."""
    made = BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("A",), INT32, ("X",))
    assert make_batch_input(made, [(1, 0, 5), (1, 0, 2**40)]).tolist()[0] == [0, 5]


def test_a_batch_input_of_an_omitted_input_is_refused_by_name():
    made = BatchInput(BatchInputKind.BATCH_ELEMENT_COUNT, ("A",), INT32, ("X",))
    other = ModelInput("Z", FP32, dims=(1,))
    config = replace(RAGGED, input=(replace(RAGGED.input[0], optional=True), other), batch_input=(made,))
    assert refusal(lambda: planned(config).gather([[floats([1], name="Z")]], [1])) == (
        ErrorCode.INVALID_ARG,
        "input 'X' is missing: batch input 'A' is made from it",
    )


SCATTERED = replace(RAGGED, batch_output=(BatchOutput(("Y",), source_input=("X",)),))


def test_a_scattered_output_gets_the_shape_of_each_requests_input():
    plan = planned(SCATTERED)
    gathered = plan.gather([[floats([1, 2], [3, 4])], [floats([5])]], [2, 1])
    replies = plan.scatter({"Y": gathered.inputs["X"] * 2}, {"Y": FP32}, gathered, [2, 1], [(), ()])
    assert replies == [[floats([2, 4], [6, 8], name="Y")], [floats([10], name="Y")]]


def test_a_scattered_output_of_another_size_is_refused():
    plan = planned(SCATTERED)
    gathered = plan.gather([[floats([1, 2])], [floats([5])]], [1, 1])
    wrong = {"Y": np.zeros((4, 1), np.float32)}
    assert refusal(lambda: plan.scatter(wrong, {"Y": FP32}, gathered, [1, 1], [(), ()])) == (
        ErrorCode.INTERNAL,
        "output 'Y': the model returned shape [4,1] with 4 elements; input 'X', whose shape it gets, has 3 elements in "
        "this batch",
    )
    assert refusal(lambda: plan.scatter({}, {"Y": FP32}, gathered, [1, 1], [(), ()])) == (
        ErrorCode.INTERNAL,
        "output 'Y': the model returned nothing, not an array",
    )


def test_a_scattered_output_of_an_omitted_input_is_refused_by_name():
    other = ModelInput("Z", FP32, dims=(1,))
    plan = planned(replace(SCATTERED, input=(replace(RAGGED.input[0], optional=True), other)))
    gathered = plan.gather([[floats([1], name="Z")]], [1])
    outputs = {"Y": np.zeros((1, 1), np.float32)}
    assert refusal(lambda: plan.scatter(outputs, {"Y": FP32}, gathered, [1], [()])) == (
        ErrorCode.INVALID_ARG,
        "input 'X' is missing: output 'Y' is made from it",
    )


def test_a_model_that_does_not_batch_may_have_batch_inputs_and_outputs():
    made = BatchInput(BatchInputKind.BATCH_ELEMENT_COUNT, ("A",), INT32, ("X",))
    plan = planned(
        replace(SCATTERED, max_batch_size=0, input=(X,), output=(Y, replace(Y, name="N")), batch_input=(made,))
    )
    gathered = plan.gather([[Tensor("X", FP32, (2,), bytes(8))]], [1])
    assert lists(gathered.inputs) == {"X": [0, 0], "A": [2]}
    outputs = {"Y": np.zeros((2, 1), np.float32), "N": np.zeros(3, np.float32)}
    (reply,) = plan.scatter(outputs, {"Y": FP32, "N": FP32}, gathered, [1], [()])
    assert [tensor.shape for tensor in reply] == [(2,), (3,)]


def padded_model(entry: str, **changes) -> ModelConfig:
    return replace(MODEL, parameters=parameters(PADDING=f"[{entry}]"), **changes)


def test_rows_are_padded_to_the_longest_with_the_value_and_their_lengths():
    plan = planned(padded_model('{"input": "X", "axis": 1, "value": -1, "lengths": "L", "outputs": {"Y": 1}}'))
    gathered = plan.gather([[floats([1], [2])], [floats([3, 4, 5])]], [2, 1])
    assert lists(gathered.inputs) == {"X": [[1, -1, -1], [2, -1, -1], [3, 4, 5]], "L": [1, 1, 3]}
    assert gathered.inputs["L"].dtype == np.int64
    replies = plan.scatter({"Y": gathered.inputs["X"] + 1}, {"Y": FP32}, gathered, [2, 1], [(), ()])
    assert replies == [[floats([2], [3], name="Y")], [floats([4, 5, 6], name="Y")]]


@pytest.mark.parametrize(("longest", "length"), [(1, 2), (2, 2), (3, 6), (6, 6)])
def test_the_smallest_bucket_that_fits_is_the_length(longest: int, length: int):
    plan = planned(padded_model('{"input": "X", "axis": 1, "buckets": [2, 6]}'))
    gathered = plan.gather([[floats([1])], [floats([5] * longest)]], [1, 1])
    assert gathered.inputs["X"].shape == (2, length)
    assert gathered.inputs["X"].sum() == 1 + 5 * longest


def test_one_request_that_needs_no_padding_is_not_copied():
    plan = planned(padded_model('{"input": "X", "axis": 1}'))
    tensor = floats([1, 2])
    array = plan.gather([[tensor]], [1]).inputs["X"]
    assert np.shares_memory(array, np.frombuffer(tensor.data, np.uint8))


def test_a_cut_output_without_the_padded_length_is_refused():
    plan = planned(padded_model('{"input": "X", "axis": 1, "outputs": {"Y": 1}}'))
    gathered = plan.gather([[floats([1])], [floats([3, 4])]], [1, 1])
    wrong = {"Y": np.zeros((2, 3), np.float32)}
    assert refusal(lambda: plan.scatter(wrong, {"Y": FP32}, gathered, [1, 1], [(), ()])) == (
        ErrorCode.INTERNAL,
        "output 'Y': the model returned shape [2,3] for input 'X' of length 2; its dimension 1 must be 2",
    )


def test_strings_are_padded_with_the_configured_text():
    config = padded_model(
        '{"input": "X", "axis": 1, "value": "<pad>\\u0000"}', input=(ModelInput("X", BYTES, dims=(-1,)),)
    )
    batch = [[tensor_from_array("X", BYTES, np.array([row], dtype=object))] for row in ([b"a", b"b"], [b"c"])]
    assert lists(planned(config).gather(batch, [1, 1]).inputs) == {"X": [[b"a", b"b"], [b"c", b"<pad>\0"]]}


def test_padded_inputs_have_lengths_of_their_own_and_cut_their_own_outputs():
    config = replace(
        MODEL,
        input=(X, replace(X, name="Z")),
        output=(ModelOutput("Y", FP32, dims=(-1, -1)),),
        parameters=parameters(
            PADDING='[{"input": "X", "axis": 1, "outputs": {"Y": 1}}, {"input": "Z", "axis": 1, "outputs": {"Y": 2}}]'
        ),
    )
    plan = planned(config)
    batch = [[floats([1]), floats([1, 2], name="Z")], [floats([1, 2, 3]), floats([4], name="Z")]]
    gathered = plan.gather(batch, [1, 1])
    assert {name: array.shape for name, array in gathered.inputs.items()} == {"X": (2, 3), "Z": (2, 2)}
    products = gathered.inputs["X"][:, :, None] * gathered.inputs["Z"][:, None, :]
    (first,), (second,) = plan.scatter({"Y": products}, {"Y": FP32}, gathered, [1, 1], [(), ()])
    assert (first.array().tolist(), second.array().tolist()) == ([[[1, 2]]], [[[4], [8], [12]]])


FIXED = [datatype for datatype in DataType if datatype.itemsize]


@given(st.data(), st.sampled_from([*FIXED, BYTES]), st.integers(1, 2), st.booleans(), st.booleans())
def test_padded_rows_are_those_of_the_slow_computation(data, datatype, axis, has_buckets, has_sizes):
    other = data.draw(st.integers(0, 3))
    requests = data.draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), min_size=1, max_size=4))
    dims = (-1, other) if axis == 1 else (other, -1)
    buckets = '"buckets": [4, 9], ' if has_buckets else ""
    config = replace(
        MODEL,
        max_batch_size=16,
        input=(ModelInput("X", datatype, dims=tuple(dim or -1 for dim in dims)),),
        output=(ModelOutput("Y", datatype, dims=(-1, -1)),),
        parameters=parameters(
            PADDING=f'[{{"input": "X", "axis": {axis}, {buckets} "lengths": "L", "outputs": {{"Y": {axis}}}}}]',
            **({"BATCH_SIZES": "5,16"} if has_sizes else {}),
        ),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    batch, originals = [], []
    for rows, length in requests:
        shape = (rows, length, other) if axis == 1 else (rows, other, length)
        array = rng.integers(0, 2, shape).astype(datatype.dtype)
        if datatype is BYTES:
            array = np.array([str(n).encode() for n in array.reshape(-1)], dtype=object).reshape(shape)
        originals.append(array)
        batch.append([tensor_from_array("X", datatype, array)])
    longest = max(length for _, length in requests)
    length = (4 if longest <= 4 else 9) if has_buckets else longest
    total = sum(rows for rows, _ in requests)
    rows = (5 if total <= 5 else 16) if has_sizes else total

    expected, lengths = [], []
    for array in originals:
        for row in array:
            full = [[b"" if datatype is BYTES else 0 for _ in range(other)] for _ in range(length)]
            for at in np.ndindex(row.shape):
                place, rest = at if axis == 1 else at[::-1]
                full[place][rest] = row[at]
            expected.append(np.array(full, dtype=object).reshape(length, other).T.tolist() if axis == 2 else full)
            lengths.append(row.shape[axis - 1])
    expected += [expected[-1]] * (rows - total)
    lengths += [lengths[-1]] * (rows - total)

    plan = planned(config)
    gathered = plan.gather(batch, [rows for rows, _ in requests])
    assert gathered.inputs["L"].tolist() == lengths
    assert gathered.inputs["X"].shape == ((rows, length, other) if axis == 1 else (rows, other, length))
    assert gathered.inputs["X"].tolist() == expected
    replies = plan.scatter(
        {"Y": gathered.inputs["X"]}, {"Y": datatype}, gathered, [rows for rows, _ in requests], [()] * len(requests)
    )
    assert [(reply.shape, bytes(reply.data)) for (reply,) in replies] == [
        (tensor.shape, bytes(tensor.data)) for (tensor,) in batch
    ]


def test_the_last_row_is_repeated_up_to_an_allowed_size():
    plan = planned(replace(MODEL, parameters=parameters(BATCH_SIZES="1, 4, 8")))
    alone = plan.gather([[floats([1, 2])]], [1])
    assert (alone.rows, lists(alone.inputs)) == (1, {"X": [[1, 2]]})
    gathered = plan.gather([[floats([1, 2])], [floats([3, 4])]], [1, 1])
    assert (gathered.rows, lists(gathered.inputs)) == (4, {"X": [[1, 2], [3, 4], [3, 4], [3, 4]]})
    replies = plan.scatter({"Y": gathered.inputs["X"]}, {"Y": FP32}, gathered, [1, 1], [(), ()])
    assert replies == [[floats([1, 2], name="Y")], [floats([3, 4], name="Y")]]
    few = {"Y": np.zeros((2, 2), np.float32)}
    assert refusal(lambda: plan.scatter(few, {"Y": FP32}, gathered, [1, 1], [(), ()])) == (
        ErrorCode.INTERNAL,
        "output 'Y': the model returned shape [2,2] for a batch of 4 rows; its first dimension must be 4",
    )


def test_each_request_gets_the_outputs_it_wants():
    plan = planned(replace(SCATTERED, output=(Y, replace(Y, name="N"))))
    gathered = plan.gather([[floats([1, 2])], [floats([5])]], [1, 1])
    outputs = {"Y": gathered.inputs["X"], "N": np.array([[7], [8]], np.float32)}
    replies = plan.scatter(outputs, {"Y": FP32, "N": FP32}, gathered, [1, 1], [("N",), ("N", "Y")])
    assert replies == [[floats([7], name="N")], [floats([5], name="Y"), floats([8], name="N")]]
    assert plan.scatter({"N": outputs["N"]}, {"Y": FP32, "N": FP32}, gathered, [1, 1], [("N",), ("N",)]) == [
        [floats([7], name="N")],
        [floats([8], name="N")],
    ]


def test_requests_that_differ_elsewhere_cannot_share_a_batch():
    config = padded_model('{"input": "X", "axis": 1}', input=(ModelInput("X", FP32, dims=(-1, -1)),))
    batch = [[Tensor("X", FP32, (1, 1, 2), bytes(8))], [Tensor("X", FP32, (1, 2, 1), bytes(8))]]
    assert refusal(lambda: planned(config).gather(batch, [1, 1])) == (
        ErrorCode.INTERNAL,
        "input 'X': <Tensor X FP32[1, 1, 2]> and <Tensor X FP32[1, 2, 1]> cannot share a batch",
    )
