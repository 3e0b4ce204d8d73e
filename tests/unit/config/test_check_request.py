from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.config.model_config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelTensorReshape,
)
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.core.types.datatype import FROM_WIRE
from halimede.core.types.tensor import join_bytes
from support.refusals import error_of
from support.request_checks import BAD_PREFIX, BYTES, FP32, fp32, model, refusal, request, strings

NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting"
    " max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


IN = ModelInput("IN", FP32, dims=(4,))
SIMPLE = model(IN)
PAIR = model(ModelInput("A", FP32, dims=(4,)), ModelInput("B", FP32, dims=(-1,)))


def test_a_request_that_fits_is_measured():
    assert SIMPLE.check(request(fp32("IN", 3, 4))) == Checked(batch_size=3, size_bytes=48)
    assert SIMPLE.check(request(fp32("IN", 3, 4), outputs=("OUT",))) == Checked(batch_size=3, size_bytes=48)
    assert PAIR.check(request(fp32("B", 2, 5), fp32("A", 2, 4))) == Checked(2, 72, ((4,), (5,)))


def test_a_model_that_does_not_batch_takes_the_whole_shape():
    checker = model(ModelInput("A", FP32, dims=(2, -1)), max_batch_size=0)

    assert checker.check(request(fp32("A", 2, 7))) == Checked(1, 56)
    assert refusal(checker, request(fp32("A", 7))) == (
        f"{BAD_PREFIX}unexpected shape for input 'A' for model 'm'. Expected [2,-1], got [7]."
    )


def test_batchable_requests_have_equal_compatible_values():
    checker = model(ModelInput("A", FP32, dims=(-1,)), ModelInput("B", FP32, dims=(4,), optional=True))
    kinds = [
        checker.check(request(fp32("A", 1, 3))),
        checker.check(request(fp32("A", 2, 3))),
        checker.check(request(fp32("A", 1, 4))),
        checker.check(request(fp32("A", 1, 3), fp32("B", 1, 4))),
        checker.check(request(fp32("B", 1, 4), fp32("A", 1, 3))),
    ]

    assert [kinds[0].compatible == other.compatible for other in kinds] == [True, True, False, False, False]
    assert kinds[3].compatible == kinds[4].compatible
    assert len({kind.compatible for kind in kinds}) == 3


def test_remembered_request_does_not_change_later_results():
    inputs = (ModelInput("A", FP32, dims=(-1,)), ModelInput("B", FP32, dims=(-1,), optional=True))
    good = [
        request(fp32("A", 1, 4), fp32("B", 1, 4), outputs=("OUT",)),
        request(fp32("A", 1, 4), fp32("B", 1, 4)),
        request(fp32("B", 1, 4), fp32("A", 1, 4)),
        request(fp32("A", 1, 4), fp32("B", 1, 5)),
        request(fp32("A", 2, 2), fp32("B", 2, 2)),
        request(fp32("A", 1, 4)),
    ]
    bad = [
        request(fp32("A", 1, 4), fp32("C", 1, 4)),
        request(fp32("A", 1, 4), Tensor("B", DataType.INT32, (1, 4), bytes(16))),
        request(fp32("A", 1, 4), fp32("B", 2, 2)),
        request(fp32("A", 1, 4), Tensor("B", FP32, (1, 4), bytes(12))),
        request(fp32("A", 1, 4), fp32("B", 1, 4), outputs=("WRONG",)),
        request(fp32("A", 1, 4), fp32("B", 1, 4), outputs=("OUT", "OUT")),
        request(fp32("A", 1, 4), fp32("B", 1, 4), fp32("B", 1, 4)),
        request(),
    ]
    checker = model(*inputs)

    for before in good:
        for asked in good:
            checker.check(before)
            assert checker.check(asked) == model(*inputs).check(asked)
        for asked in bad:
            assert checker.check(before) == model(*inputs).check(before)
            assert refusal(checker, asked) == refusal(model(*inputs), asked)


def test_strings_and_reshapes_are_checked_each_time():
    text = model(ModelInput("T", BYTES, dims=(1,)))
    text.check(request(strings("T", (1, 1), join_bytes([b"ab"]))))
    refusal(text, request(strings("T", (1, 1), b"\3\0\0\0ab")))

    checker = model(ModelInput("A", FP32, dims=(4,), reshape=ModelTensorReshape((2, 2))))
    for _ in range(2):
        asked = request(fp32("A", 1, 4))
        checker.check(asked)
        assert asked.inputs[0].shape == (1, 2, 2)
        assert asked.form.inputs == (("A", FP32, (1, 2, 2)),)


def test_a_form_that_one_version_accepts_is_checked_by_another_version():
    small = model(IN, max_batch_size=2)
    for _ in range(2):
        SIMPLE.check(request(fp32("IN", 3, 4)))
        assert "inference request batch-size must be <= 2" in refusal(small, request(fp32("IN", 3, 4)))


def test_error_begins_with_the_request_id():
    asked = request(fp32("IN", 1, 5), request_id="call-7")

    assert refusal(SIMPLE, asked) == (
        f"[request id: call-7] unexpected shape for input 'IN' for model 'm'. Expected [-1,4], got [1,5].{NOTE}"
    )


def test_the_set_of_inputs_must_be_the_models():
    assert refusal(SIMPLE, request(fp32("Z", 1, 4), fp32("IN", 1, 4))) == (
        f"{BAD_PREFIX}expected 1 inputs but got 2 inputs for model 'm'. Got input(s) ['Z','IN'], but missing required "
        "input(s) ]. Please provide all required input(s)."
    )
    assert refusal(SIMPLE, request()) == (
        f"{BAD_PREFIX}expected 1 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
        "['IN']. Please provide all required input(s)."
    )
    assert refusal(SIMPLE, request(fp32("ZZ", 1, 4))) == "unexpected inference input 'ZZ' for model 'm'"
    assert refusal(SIMPLE, request(fp32("IN", 1, 4), fp32("IN", 1, 4))) == (
        f"{BAD_PREFIX}input 'IN' already exists in request"
    )


OPTIONAL = model(
    ModelInput("A", FP32, dims=(4,)),
    ModelInput("B", FP32, dims=(4,), optional=True),
    ModelInput("C", FP32, dims=(4,), optional=True),
)


def test_optional_inputs_may_be_left_out():
    assert OPTIONAL.check(request(fp32("A", 1, 4))).batch_size == 1
    assert OPTIONAL.check(request(fp32("C", 2, 4), fp32("A", 2, 4))).compatible == ((4,), None, (4,))


def test_requests_with_different_optional_inputs_do_not_share_a_batch():
    sets = [("A",), ("A", "B"), ("A", "C"), ("A", "B", "C")]
    kinds = [OPTIONAL.check(request(*(fp32(name, 1, 4) for name in names))).compatible for names in sets]
    assert len(set(kinds)) == 4
    ragged = model(
        ModelInput("A", FP32, dims=(4,)), ModelInput("B", FP32, dims=(-1,), allow_ragged_batch=True, optional=True)
    )
    kinds = [ragged.check(request(fp32("A", 1, 4), *more)).compatible for more in ([], [fp32("B", 1, 2)])]
    assert len(set(kinds)) == 2


def test_requests_whose_ragged_inputs_differ_may_share_a_batch():
    checker = model(ModelInput("A", FP32, dims=(-1, 2), allow_ragged_batch=True), ModelInput("B", FP32, dims=(-1,)))
    kinds = [
        checker.check(request(fp32("A", 1, a, 2), fp32("B", 1, b))).compatible for a, b in ((1, 1), (5, 1), (5, 2))
    ]
    assert [kind == kinds[0] for kind in kinds] == [True, True, False]
    assert "unexpected shape for input 'A'" in refusal(checker, request(fp32("A", 1, 5, 3), fp32("B", 1, 1)))


PADDED = RequestChecker(
    ModelConfig(
        name="m",
        max_batch_size=8,
        input=(ModelInput("A", FP32, dims=(-1, -1)),),
        output=(ModelOutput("OUT", FP32, dims=(4,)),),
        parameters={"PADDING": ModelParameter('[{"input": "A", "axis": 2, "buckets": [4, 8]}]')},
    )
)


def test_requests_that_differ_in_the_padded_dimension_may_share_a_batch():
    kinds = [PADDED.check(request(fp32("A", *shape))).compatible for shape in ((1, 3, 1), (2, 3, 8), (1, 4, 1))]
    assert [kind == kinds[0] for kind in kinds] == [True, True, False]


def test_a_request_longer_than_the_largest_bucket_is_refused():
    assert refusal(PADDED, request(fp32("A", 1, 3, 9))) == (
        f"{BAD_PREFIX}input 'A' for model 'm' has length 9 in dimension 2, its padding takes at most 8"
    )


def test_an_optional_input_does_not_stand_in_for_a_required_one():
    assert refusal(OPTIONAL, request(fp32("B", 1, 4))) == (
        f"{BAD_PREFIX}expected number of inputs between 1 and 3 but got 1 inputs for model 'm'. Got input(s) ['B'], "
        "but missing required input(s) ['A']. Please provide all required input(s)."
    )
    assert refusal(OPTIONAL, request()) == (
        f"{BAD_PREFIX}expected number of inputs between 1 and 3 but got 0 inputs for model 'm'. Got input(s) [], but "
        "missing required input(s) ['A']. Please provide all required input(s)."
    )
    assert refusal(OPTIONAL, request(fp32("ZZ", 1, 4))) == "unexpected inference input 'ZZ' for model 'm'"
    assert refusal(OPTIONAL, request(fp32("A", 1, 4), fp32("ZZ", 1, 4))) == (
        "unexpected inference input 'ZZ' for model 'm'"
    )


def test_model_with_only_optional_inputs_accepts_no_input():
    checker = model(ModelInput("A", FP32, dims=(4,), optional=True))

    assert checker.check(request()) == Checked(1, 0, (None,))


def test_requested_outputs_must_exist_and_be_requested_once():
    assert refusal(SIMPLE, request(fp32("IN", 1, 4), outputs=("ZZ",))) == (
        "unexpected inference output 'ZZ' for model 'm'"
    )
    assert refusal(SIMPLE, request(fp32("IN", 1, 4), outputs=("OUT", "OUT"))) == (
        f"{BAD_PREFIX}output 'OUT' already exists in request"
    )
    two = model(IN, outputs=("P", "Q"))
    for outputs in [(), ("P",), ("Q",), ("P", "Q"), ("Q", "P")]:
        assert two.check(request(fp32("IN", 1, 4), outputs=outputs)) == Checked(1, 16)


def test_errors_come_in_tritons_order():
    wrong = [fp32("A", 9, 4), Tensor("B", DataType.INT32, (8, 3), b"")]

    assert "input 'A' already exists" in refusal(PAIR, request(*wrong, fp32("A", 1, 4), outputs=("ZZ",)))
    assert "unexpected inference output" in refusal(PAIR, request(*wrong, fp32("C", 1, 4), outputs=("ZZ",)))
    assert "expected 2 inputs but got 3 inputs" in refusal(PAIR, request(*wrong, fp32("C", 1, 4)))
    assert "input 'B' batch size does not match" in refusal(PAIR, request(*wrong))
    wrong[1].shape = (9, 3)
    assert "batch-size must be <= 8" in refusal(PAIR, request(*wrong))
    wrong[0].shape, wrong[1].shape = (2, 4), (2, 3)
    assert "input byte size mismatch for input 'A'" in refusal(PAIR, request(*wrong))
    wrong[0].data = bytes(32)
    assert "data-type is 'INT32'" in refusal(PAIR, request(*wrong))
    wrong[1].datatype = FP32
    assert "input byte size mismatch for input 'B'" in refusal(PAIR, request(*wrong))
    wrong[1].data = bytes(24)
    assert PAIR.check(request(*wrong)) == Checked(2, 56, ((4,), (3,)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([fp32("A"), fp32("B", 1, 1)], "input 'A' has no shape but model requires batch dimension for 'm'"),
        ([fp32("A", 1, 4), fp32("B", 2, 1)], "input 'B' batch size does not match other inputs for 'm'"),
        ([fp32("A", 9, 4), fp32("B", 9, 1)], "inference request batch-size must be <= 8 for 'm'"),
        (
            [Tensor("A", FP32, (-1, 4), bytes(16)), fp32("B", 1, 1)],
            "All input dimensions should be specified for input 'A' for model 'm', got [-1,4]",
        ),
        (
            [fp32("A", 1, 4), Tensor("B", FP32, (1, -1), bytes(4))],
            "All input dimensions should be specified for input 'B' for model 'm', got [1,-1]",
        ),
        (
            [fp32("A", 1, 4), Tensor("B", FP32, (1, -(2**63)), bytes(4))],
            "All input dimensions should be specified for input 'B' for model 'm', got [1,-9223372036854775808]",
        ),
        (
            [fp32("A", 1, 4), fp32("B", 1, 1, 1)],
            f"unexpected shape for input 'B' for model 'm'. Expected [-1,-1], got [1,1,1].{NOTE}",
        ),
        (
            [fp32("A", 4), fp32("B", 4)],
            f"unexpected shape for input 'A' for model 'm'. Expected [-1,4], got [4].{NOTE}",
        ),
        (
            [fp32("A", 1, 4), Tensor("B", FP32, (1, 3), bytes(11))],
            "input byte size mismatch for input 'B' for model 'm'. Expected 12, got 11",
        ),
        (
            [fp32("A", 1, 4), Tensor("B", FP32, (1, 2**40), bytes(4))],
            "input byte size mismatch for input 'B' for model 'm'. Expected 4398046511104, got 4",
        ),
    ],
)
def test_wrong_shapes_and_sizes_are_refused(tensors: list[Tensor], message: str):
    assert refusal(PAIR, request(*tensors)) == BAD_PREFIX + message


@pytest.mark.parametrize("shape", [(2**32, 2**32), (2**62, 4), (2**61, 1), (2**63, 1), (0, 2**63), (2**31, 2**31, 0)])
def test_unaddressable_shape_is_refused_even_if_empty(shape: tuple[int, ...]):
    checker = model(ModelInput("IN", FP32, dims=(-1,) * len(shape)), max_batch_size=0)

    assert refusal(checker, request(Tensor("IN", FP32, shape, b""))) == (
        f"{BAD_PREFIX}input 'IN' has too many elements for model 'm', got shape [{','.join(map(str, shape))}], a "
        "tensor has at most 9223372036854775807 bytes"
    )


def test_empty_dimensions_are_fine_and_empty_batches_are_not():
    assert PAIR.check(request(fp32("A", 1, 4), fp32("B", 1, 0))) == Checked(1, 16, ((4,), (0,)))
    assert model(ModelInput("A", FP32, dims=(-1,)), max_batch_size=0).check(request(fp32("A", 0))) == Checked(1, 0)
    assert refusal(SIMPLE, request(fp32("IN", 0, 4))) == (
        f"{BAD_PREFIX}input byte size mismatch for input 'IN' for model 'm'. Expected 16, got 0"
    )
    assert refusal(SIMPLE, request(Tensor("IN", FP32, (0, 4), bytes(16)))) == (
        f"{BAD_PREFIX}inference request batch-size must be >= 1 for 'm'"
    )


@pytest.mark.parametrize("expected", FROM_WIRE.values())
def test_only_the_models_own_datatype_is_accepted(expected: DataType):
    checker = model(ModelInput("IN", expected, dims=(2,)), max_batch_size=0)
    for sent in DataType:
        data = join_bytes([b"a", b""]) if sent is BYTES else bytes(2 * sent.itemsize)
        asked = request(Tensor("IN", sent, (2,), data))
        if sent is expected:
            assert checker.check(asked) == Checked(1, len(data))
        else:
            shown = "<invalid>" if sent is DataType.INVALID else sent.name
            assert refusal(checker, asked) == (
                f"{BAD_PREFIX}inference input 'IN' data-type is '{shown}', but model 'm' expects '{expected.name}'"
            )


_HOSTILE = st.sampled_from([-(2**63), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])


@given(
    st.lists(st.one_of(st.just(-1), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(0, 4),
    st.sampled_from([DataType.BOOL, DataType.BF16, FP32, DataType.INT64, BYTES]),
    st.data(),
)
def test_accepted_tensors_can_be_viewed_by_numpy(
    dims: list[int], max_batch_size: int, datatype: DataType, data: st.DataObject
):
    checker = model(ModelInput("IN", datatype, dims=tuple(dims)), max_batch_size=max_batch_size)
    shape = [data.draw(st.integers(0, 3)) if dim == -1 else dim for dim in dims]
    if max_batch_size:
        shape.insert(0, data.draw(st.integers(0, 5)))
    for _ in range(data.draw(st.integers(0, 2))):
        shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(_HOSTILE)
    right = prod(shape) * (datatype.itemsize or 4)
    size = max(0, min(right, 4096) + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    tensor = Tensor("IN", datatype, tuple(shape), bytes(size))

    error, checked = None, None
    try:
        checked = checker.check(request(tensor))
    except InferenceError as raised:
        error = raised
    if checked is not None:
        assert (checked.batch_size, checked.size_bytes) == (shape[0] if max_batch_size else 1, right)
        assert tensor.array().shape == tuple(shape)
    else:
        assert error is not None
        assert (error.code, len(error.message) <= 4096) == (ErrorCode.INVALID_ARG, True)


@given(st.integers(1, 8), st.integers(0, 9), st.booleans())
def test_fast_and_full_check_agree(max_batch_size: int, rows: int, exact: bool):
    short = model(ModelInput("IN", FP32, dims=(2, 3)), max_batch_size=max_batch_size)
    # A second, optional input closes the short way and changes nothing else for a request without it.
    long = model(
        ModelInput("IN", FP32, dims=(2, 3)),
        ModelInput("X", FP32, dims=(1,), optional=True),
        max_batch_size=max_batch_size,
    )
    asked = request(Tensor("IN", FP32, (rows, 2, 3), bytes(24 * rows + (not exact))))

    def outcome(checker: RequestChecker) -> tuple[int, int] | str:
        try:
            checked = checker.check(asked)
        except InferenceError as error:
            return error.message
        return checked.batch_size, checked.size_bytes

    assert outcome(short) == outcome(long)
    assert (outcome(short) == (rows, 24 * rows)) == (exact and 1 <= rows <= max_batch_size)


def reshaping(max_batch_size: int) -> RequestChecker:
    return RequestChecker(
        ModelConfig(
            name="m",
            max_batch_size=max_batch_size,
            input=(
                ModelInput("S", FP32, dims=(1,), reshape=ModelTensorReshape(())),
                ModelInput("V", FP32, dims=(-1, 6, -1), reshape=ModelTensorReshape((1, -1, 2, 3, -1))),
                ModelInput("P", FP32, dims=(2,)),
            ),
            output=(
                ModelOutput("Y", FP32, dims=(1,), reshape=ModelTensorReshape(())),
                ModelOutput("W", FP32, dims=(-1, 6, -1), reshape=ModelTensorReshape((-1, 2, 3, -1))),
                ModelOutput("Q", FP32, dims=(2,)),
            ),
        )
    )


def test_the_backend_sees_reshaped_inputs():
    batched = request(fp32("S", 3, 1), fp32("V", 3, 5, 6, 7), fp32("P", 3, 2))
    single = request(fp32("S", 1), fp32("V", 5, 6, 7), fp32("P", 2))

    assert reshaping(4).check(batched) == Checked(3, 3 * 4 * (1 + 210 + 2), ((1,), (5, 6, 7), (2,)))
    assert [tensor.shape for tensor in batched.inputs] == [(3,), (3, 1, 5, 2, 3, 7), (3, 2)]
    assert reshaping(0).check(single) == Checked(1, 4 * (1 + 210 + 2))
    assert [tensor.shape for tensor in single.inputs] == [(), (1, 5, 2, 3, 7), (2,)]
    assert single.inputs[0].array().shape == ()


def test_the_client_sees_reshaped_outputs():
    batched = [fp32("Y", 3), fp32("W", 3, 5, 2, 3, 7), fp32("Q", 3, 2)]
    single = [fp32("Y"), fp32("W", 5, 2, 3, 7), fp32("Q", 2)]

    reshaping(4).reshape_outputs(batched, 3)
    reshaping(0).reshape_outputs(single, 1)

    assert [tensor.shape for tensor in batched] == [(3, 1), (3, 5, 6, 7), (3, 2)]
    assert [tensor.shape for tensor in single] == [(1,), (5, 6, 7), (2,)]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (fp32("Y", 3, 1), "unexpected shape for output 'Y' for model 'm'. Expected [3], got [3,1]."),
        (fp32("Y", 2), "unexpected shape for output 'Y' for model 'm'. Expected [3], got [2]."),
        (
            fp32("W", 3, 5, 2, 4, 7),
            "unexpected shape for output 'W' for model 'm'. Expected [3,-1,2,3,-1], got [3,5,2,4,7].",
        ),
    ],
)
def test_wrong_reshaped_output_is_an_internal_error(output: Tensor, message: str):
    assert error_of(reshaping(4).reshape_outputs, [output], 3) == InferenceError(ErrorCode.INTERNAL, message)


LONG = "é" * 100_000


def test_error_messages_have_a_maximum_size():
    flood = [fp32(f"{i}{LONG}", 1, 4) for i in range(100)]
    many = RequestChecker(
        ModelConfig(
            name=LONG, max_batch_size=8, input=tuple(ModelInput(f"{i}{LONG}", FP32, dims=(4,)) for i in range(99))
        )
    )

    everything = refusal(many, request(*flood, request_id=LONG))
    assert everything.endswith(",...], but missing required input(s) ]. Please provide all required input(s).")
    assert refusal(many, request(request_id=LONG)).endswith(",...]. Please provide all required input(s).")
    assert refusal(SIMPLE, request(fp32(LONG, 1, 4), request_id=LONG)).startswith("unexpected inference input 'éé")
    assert refusal(SIMPLE, request(*flood[:1], outputs=(LONG,))).startswith("unexpected inference output 'éé")
    assert refusal(SIMPLE, request(fp32(LONG, 1), fp32(LONG, 1), request_id=LONG)).endswith(
        "...' already exists in request"
    )
    assert refusal(SIMPLE, request(Tensor("IN", FP32, (1, *[1] * 100_000), bytes(4)), request_id=LONG)).endswith(
        f"Expected [-1,4], got [{'1,' * 128}...].{NOTE}"
    )
    assert refusal(SIMPLE, request(Tensor("IN", FP32, (1, *[-5] * 100_000), bytes(4)))).endswith("...]")


def test_a_checker_keeps_nothing_of_a_request():
    asked = request(fp32("A", 2, 4), fp32("B", 2, 3))

    assert PAIR.check(asked) == PAIR.check(asked)
    assert np.array_equal(asked.inputs[0].array(), np.zeros((2, 4), np.float32))
