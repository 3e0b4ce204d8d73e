"""Rows of batches: controls, null rows and states, as the model sees them."""

from typing import Any

import pytest

from halimede.core.sequences.rows import NULL_KEY, Memory, Row, Sequences, initial_states
from halimede.core.types import DataType, ErrorCode, InferenceError, Tensor
from halimede.workers.states import HeldStates
from support.refusals import error_of
from support.sequences import CONTROLS, SUM, config_of, inputs, item, plan_of, sequences_of, tensor, values

FP32, BYTES = DataType.FP32, DataType.BYTES
MIB = 1 << 20


def finish(rows: list[Row], *sums: float) -> list[dict[str, Any]]:
    """End all rows, each with this new state and an output; returns what the clients get."""
    answers = []
    for row, new in zip(rows, sums, strict=True):
        answers.append(values(row.take([tensor("y", FP32, [[9]]), tensor("sum", FP32, [[new]])])))
        row.end(is_last=True)
    return answers


def test_a_row_has_the_controls_that_are_declared() -> None:
    sequences = sequences_of(config_of(CONTROLS))
    one, two = sequences.begin([item(1, 0, 5, start=True, identity=7), item(2, 1, 6, end=True, identity=2**64 - 1)])
    assert inputs(one) == {"x": [[5.0]], "START": [[1]], "END": [[-1.0]], "READY": [[True]], "ID": [[7]]}
    assert inputs(two) == {"x": [[6.0]], "START": [[0]], "END": [[2.5]], "READY": [[True]], "ID": [[2**64 - 1]]}
    assert [each.datatype.name for each in one.request.inputs[1:]] == ["INT32", "FP32", "BOOL", "UINT64"]


def test_controls_of_a_model_that_does_not_batch_have_one_dimension() -> None:
    (row,) = sequences_of(config_of(CONTROLS, rows=0)).begin([item(1, 0, 5, start=True, rows=None)])
    assert {each.shape for each in row.request.inputs} == {(1,)}


@pytest.mark.parametrize("values_of", ["int32_false_true: [ 3, 4 ]", "fp32_false_true: [ 3, 4 ]"])
@pytest.mark.parametrize("kind", ["START", "END", "READY"])
def test_controls_have_the_values_that_are_configured(kind: str, values_of: str) -> None:
    control = f'control_input {{ name: "C" control {{ kind: CONTROL_SEQUENCE_{kind} {values_of} }} }}'
    sequences = sequences_of(config_of(control))
    (row,) = sequences.begin([item(1, 0, start=True, end=True)])
    assert inputs(row)["C"] == [[4]]
    (row,) = sequences.begin([item(1, 0)])
    assert inputs(row)["C"] == [[4 if kind == "READY" else 3]]


@pytest.mark.parametrize(
    ("datatype", "identity", "seen"),
    [
        ("UINT64", 2**63, 2**63),
        ("INT64", 5, 5),
        ("UINT32", 2**32 + 5, 5),
        ("INT32", 2**31, -(2**31)),
        ("STRING", "größe", "größe".encode()),
        ("STRING", 12, b"12"),
    ],
)
def test_the_correlation_id_has_the_declared_datatype(datatype: str, identity: int | str, seen: int | bytes) -> None:
    control = f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype} }} }}'
    (row,) = sequences_of(config_of(control)).begin([item(1, 0, identity=identity, start=True)])
    assert inputs(row)["ID"] == [[seen]]
    nulls = sequences_of(config_of(control)).begin([item(1, 1, identity=identity, start=True)])
    assert inputs(nulls[0])["ID"] == [[b"" if datatype == "STRING" else 0]]


def test_a_text_does_not_fit_a_correlation_id_of_numbers() -> None:
    sequences = sequences_of(config_of(CONTROLS))
    assert sequences.check([item(1, 0, identity=3), item(2, 1, identity="a")]) == {
        1: InferenceError(
            ErrorCode.INVALID_ARG, "sequence batching control 'ID' data-type is 'BYTES', but model 'm' expects 'UINT64'"
        )
    }


def test_null_rows_beyond_the_bound_refuse_only_their_request() -> None:
    states = HeldStates(70 * MIB)
    sequences = sequences_of(config_of(CONTROLS + SUM % "", rows=100, dims="-1"), states=states)
    large = Tensor("x", FP32, (1, MIB // 4), bytes(MIB))
    requests = [item(sequence_slot, sequence_slot, start=True) for sequence_slot in (64, 70, 71)]
    for each in requests:
        each.request.inputs[:] = [large]

    assert sequences.check(requests) == {
        2: InferenceError(
            ErrorCode.UNAVAILABLE,
            "inference request of sequence 7 to model 'm': the 71 null rows before it, which are as large, have 74448896 bytes and "
            "would exceed the memory that the server has for the states of sequences",
        )
    }
    assert states.account.held_bytes == 0


def test_a_refused_start_leaves_no_state_of_the_sequence_before() -> None:
    sequences = sequences_of(config_of(CONTROLS + SUM % ""))
    finish(sequences.begin([item(1, 0, start=True)]), 5)
    assert len(sequences.check([item(2, 0, identity="a", start=True)])) == 1
    (row,) = sequences.begin([item(3, 0)])
    assert inputs(row)["sum_in"] == [[0.0]]


def test_null_rows_fill_the_slots_before_the_last_one() -> None:
    sequences = sequences_of(config_of(CONTROLS + SUM % ""))
    rows = sequences.begin([item(1, 1, 5, start=True, identity=3), item(2, 3, 6, start=True, end=True, identity=4)])
    assert [row.key for row in rows] == [NULL_KEY, 1, NULL_KEY, 2]
    nothing = {"START": [[0]], "END": [[-1.0]], "READY": [[False]], "ID": [[0]], "sum_in": [[0.0]]}
    assert inputs(rows[0]) == inputs(rows[2]) == {"x": [[5.0]], **nothing}
    assert [row.cancelled for row in rows] == [True, False, True, False]
    finish(rows, 1, 2, 3, 4)
    rows = sequences.begin([item(3, 1)])
    assert [inputs(row)["sum_in"] for row in rows] == [[[0.0]], [[2.0]]]
    rows = sequences.begin([item(3, 0)])
    assert [inputs(row)["sum_in"] for row in rows] == [[[0.0]]], "a null row has no state"


def test_the_oldest_strategy_has_no_null_rows() -> None:
    sequences = sequences_of(config_of("oldest { }" + CONTROLS))
    assert [row.sequence_slot for row in sequences.begin([item(1, 5, start=True), item(2, 2, start=True)])] == [5, 2]


def test_a_null_row_of_a_model_that_may_write_has_inputs_of_its_own() -> None:
    one = item(1, 1, 5, start=True)
    null, _ = sequences_of(config_of(CONTROLS), copies=True).begin([one])
    memoryview(null.request.inputs[0].data)[:] = bytes(4)
    assert values(one.request.inputs) == {"x": [[5.0]]}


def test_each_slot_has_its_state_until_the_end_of_its_sequence() -> None:
    sequences = sequences_of(config_of("oldest { }" + SUM % ""))
    rows = sequences.begin([item(1, 0, start=True), item(2, 1, start=True)])
    assert finish(rows, 10, 20) == [{"y": [[9.0]]}, {"y": [[9.0]]}]
    one, zero = sequences.begin([item(3, 1), item(4, 0, end=True)])
    assert [inputs(row)["sum_in"] for row in (one, zero)] == [[[20.0]], [[10.0]]]
    finish([one, zero], 21, 11)
    assert "sequence_slots=1" in repr(sequences)
    # The scheduler sends START first. Without it there is a new state as well.
    assert [inputs(row)["sum_in"] for row in sequences.begin([item(5, 0), item(6, 1)])] == [[[0.0]], [[21.0]]]


def test_a_start_resets_the_state_of_a_slot_in_use() -> None:
    sequences = sequences_of(config_of(SUM % ""))
    finish(sequences.begin([item(1, 0, start=True)]), 10)
    late = sequences.begin([item(2, 0, end=True)])[0]
    (row,) = sequences.begin([item(3, 0, start=True)])
    assert inputs(row)["sum_in"] == [[0.0]]
    finish([row], 1)
    finish([late], 99)
    assert inputs(sequences.begin([item(4, 0)])[0])["sum_in"] == [[1.0]], (
        "the former sequence neither changes nor ends it"
    )


def test_an_execution_that_fails_leaves_the_state_as_it_was() -> None:
    sequences = sequences_of(config_of(SUM % ""))
    finish(sequences.begin([item(1, 0, start=True)]), 10)
    (row,) = sequences.begin([item(2, 0)])
    row.take([tensor("sum", FP32, [[11]])])
    row.fail()
    row.end(is_last=True)
    (row,) = sequences.begin([item(3, 0)])
    row.end(is_last=True)
    assert inputs(sequences.begin([item(4, 0, end=True)])[0])["sum_in"] == [[10.0]], "nor does one without a state"


def test_the_last_response_with_a_state_counts_also_after_the_execution() -> None:
    sequences = sequences_of(config_of(SUM % ""))
    (row,) = sequences.begin([item(1, 0, start=True)])
    for new in (1, 2):
        row.take([tensor("sum", FP32, [[new]])])
    assert inputs(sequences.begin([item(2, 0)])[0])["sum_in"] == [[0.0]], "it has not ended yet"
    row.end(is_last=True)
    assert inputs(sequences.begin([item(2, 0)])[0])["sum_in"] == [[2.0]]
    row.take([tensor("sum", FP32, [[3]])])
    assert inputs(sequences.begin([item(2, 0)])[0])["sum_in"] == [[3.0]]


class Interrupted(Sequences):
    """Another response arrives, as from another thread, while the states of the first one are stored."""

    late: list[Tensor]
    row: Row

    def store(self, name: str, tensor: Tensor, taken_bytes: int, memory: Memory) -> None:
        super().store(name, tensor, taken_bytes, memory)
        late, self.late = self.late, []
        self.row.take(late)


def test_a_response_may_arrive_while_the_execution_ends() -> None:
    plan = plan_of(config_of(SUM % "" + DYNAMIC % ""))
    sequences = Interrupted(plan, "m", initial_states(plan, {}), HeldStates(), copies=False)
    (row,) = sequences.begin([item(1, 0, start=True)])
    sequences.row, sequences.late = row, [tensor("t", FP32, [[2]])]
    row.take([tensor("sum", FP32, [[1]])])
    row.end(is_last=True)
    (row,) = sequences.begin([item(2, 0)])
    assert (inputs(row)["sum_in"], inputs(row)["s"]) == ([[1.0]], [[2.0]])


def test_a_request_that_is_executed_again_keeps_its_state_at_end() -> None:
    sequences = sequences_of(config_of(SUM % ""))
    (row,) = sequences.begin([item(1, 0, start=True, end=True)])
    row.take([tensor("sum", FP32, [[1]])])
    row.end(is_last=False)
    assert inputs(sequences.begin([item(1, 0, end=True)])[0])["sum_in"] == [[1.0]]


def test_clients_see_a_state_that_is_an_output() -> None:
    shown = 'output [ { name: "sum" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    sequences = sequences_of(config_of(SUM % "", extra=shown))
    rows = sequences.begin([item(1, 0, start=True), item(2, 1, start=True, outputs=("y",))])
    assert [row.request.outputs for row in rows] == [(), ("y", "sum")], "the model computes it for all"
    assert finish(rows, 1, 2) == [{"y": [[9.0]], "sum": [[1.0]]}, {"y": [[9.0]]}]


@pytest.mark.parametrize(
    ("new", "text"),
    [
        (tensor("sum", DataType.INT32, [[1]]), "the model returned INT32, but the configuration says TYPE_FP32"),
        (tensor("sum", FP32, [[1, 2]]), "the model returned shape [1,2], but the configuration says [1,1]"),
        (tensor("sum", FP32, [1]), "the model returned shape [1], but the configuration says [1,1]"),
    ],
)
def test_a_state_that_does_not_fit_the_configuration_is_refused(new: Tensor, text: str) -> None:
    (row,) = sequences_of(config_of(SUM % "")).begin([item(1, 0, start=True)])
    assert error_of(row.take, [new]) == InferenceError(ErrorCode.INTERNAL, f"state output 'sum': {text}")


DYNAMIC = 'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ -1 ] %s }'


def state_after(sequences: Sequences, *news: Tensor) -> Any:
    for at, new in enumerate(news):
        (row,) = sequences.begin([item(at, 0, start=at == 0)])
        row.take([new])
        row.end(is_last=True)
    return inputs(sequences.begin([item(99, 0)])[0])["s"]


def test_a_state_may_change_its_dimensions() -> None:
    sequences = sequences_of(config_of(DYNAMIC % ""))
    assert inputs(sequences.begin([item(1, 0, start=True)])[0])["s"] == [[0.0]], "a new one has 1 element"
    assert state_after(sequences, tensor("t", FP32, [[1, 2, 3]])) == [[1.0, 2.0, 3.0]]
    null, _ = sequences.begin([item(1, 1, start=True)])
    assert inputs(null)["s"] == [[0.0]]
    assert state_after(sequences, tensor("t", FP32, [[1, 2, 3]]), tensor("t", FP32, [[]])) == [[]]


def test_a_null_row_has_states_of_the_shape_of_the_others() -> None:
    sequences = sequences_of(config_of(DYNAMIC % ""))
    (row,) = sequences_of(config_of("oldest { }" + DYNAMIC % "")).begin([item(1, 1, start=True)])
    _, row = sequences.begin([item(1, 1, start=True)])
    row.take([tensor("t", FP32, [[1, 2, 3]])])
    row.end(is_last=True)
    assert [inputs(each)["s"] for each in sequences.begin([item(2, 1)])] == [[[0.0, 0.0, 0.0]], [[1.0, 2.0, 3.0]]]


def test_one_buffer_takes_all_states_of_a_sequence() -> None:
    sequences = sequences_of(config_of(DYNAMIC % "use_same_buffer_for_input_output: true"))
    (row,) = sequences.begin([item(1, 0, start=True)])
    row.take([tensor("t", FP32, [[5]])])
    row.end(is_last=True)
    (row,) = sequences.begin([item(2, 0)])
    first = row.request.inputs[-1]
    assert memoryview(first.data).readonly
    row.take([tensor("t", FP32, [[6]])])
    assert values([first]) == {"s": [[5.0]]}
    row.end(is_last=True)
    assert values([first]) == {"s": [[6.0]]}, "the same memory"
    (row,) = sequences.begin([item(3, 0)])
    assert error_of(row.take, [tensor("t", FP32, [[1, 2]])]).message == (
        "state output 't': the model returned shape [1,2], but 'use_same_buffer_for_input_output' keeps the state in a "
        "buffer of shape [1,1]"
    )


def test_states_have_initial_values() -> None:
    initial = (
        'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 2 ] %s }',
        'state { input_name: "u" output_name: "v" data_type: TYPE_STRING dims: [ 2 ] }',
    )
    zero = config_of(DYNAMIC % (initial[0] % "zero_data: true") + initial[1])
    assert inputs(sequences_of(zero).begin([item(1, 0)])[0]) == {"x": [[0.0]], "s": [[0.0, 0.0]], "u": [[b"", b""]]}
    file = config_of(DYNAMIC % (initial[0] % 'data_file: "f"'))
    assert plan_of(file).states[0].data_file == "f"
    data = bytes(tensor("", FP32, [1, 2]).data)
    sequences = sequences_of(file, {"s": data})
    assert inputs(sequences.begin([item(1, 0)])[0])["s"] == [[1.0, 2.0]]
    null, _ = sequences.begin([item(1, 1)])
    assert inputs(null)["s"] == [[0.0, 0.0]], "a null row has zeros"


@pytest.mark.parametrize(
    "kind", [each for each in DataType if each is not DataType.INVALID], ids=lambda each: each.name
)
@pytest.mark.parametrize("one_buffer", [False, True])
def test_states_of_all_datatypes_are_kept(kind: DataType, one_buffer: bool) -> None:
    extra = "use_same_buffer_for_input_output: true" if one_buffer else ""
    name = kind.config_name
    state = f'state {{ input_name: "s" output_name: "t" data_type: {name} dims: [ 2 ] {extra} }}'
    sequences = sequences_of(config_of(state))
    new = tensor("t", kind, [["a", "größe"]] if kind is BYTES else [[1, 0]])
    assert state_after(sequences, new) == new.array().tolist()
    assert state_after(sequences, new, new) == new.array().tolist()
