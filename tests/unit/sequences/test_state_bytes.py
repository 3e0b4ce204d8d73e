"""The bytes of the states that an instance keeps are taken from a bound, and given back."""

from halimede.core.sequences.rows import Row
from halimede.core.types import DataType, InferenceError, Tensor
from halimede.workers.states import HeldStates
from support.sequences import config_of, inputs, item, sequences_of, tensor

FP32 = DataType.FP32
GROWING = 'oldest { max_candidate_sequences: 4 } state { input_name: "in" output_name: "out" data_type: TYPE_FP32 dims: [ -1 ] %s }'
TWO = GROWING % "" + 'state { input_name: "b" output_name: "b_out" data_type: TYPE_FP32 dims: [ -1 ] }'
ENDED = (
    "UNAVAILABLE sequence 7 for model 'm' has ended: its new state of 40 bytes would exceed the memory that the server has for the "
    "states of sequences; begin the sequence again with the START flag"
)


def new(elements: int, name: str = "out") -> Tensor:
    return tensor(name, FP32, [[0.0] * elements])


def text(error: InferenceError) -> str:
    return f"{error.code.name} {error.message}"


def end(row: Row, *outputs: Tensor) -> str:
    """End the execution of a row that has responded with these outputs. Returns the error of the request."""
    error = ""
    try:
        row.take(outputs)
    except InferenceError as refused:
        row.fail()
        error = text(refused)
    row.end(is_last=True)
    return error


def test_states_are_counted_until_their_sequences_end() -> None:
    states = HeldStates(1000)
    sequences = sequences_of(config_of(TWO), states=states)
    for sequence_slot in range(3):
        (row,) = sequences.begin([item(sequence_slot, sequence_slot, start=True)])
        end(row, new(10), new(5, "b_out"))
    assert states.account.held_bytes == 3 * 60
    (row,) = sequences.begin([item(3, 0)])
    end(row, new(2))
    assert states.account.held_bytes == 3 * 60 - 32
    (row,) = sequences.begin([item(4, 0, end=True)])
    end(row, new(2))
    assert states.account.held_bytes == 2 * 60
    (row,) = sequences.begin([item(5, 1, start=True)])
    assert states.account.held_bytes == 60, "a sequence that begins has no state"
    end(row, new(1))
    sequences.forget(1)
    assert states.account.held_bytes == 60
    sequences.close()
    assert states.account.held_bytes == 0


def test_a_state_beyond_the_bound_ends_its_sequence_alone() -> None:
    states = HeldStates(99)
    sequences = sequences_of(config_of(GROWING % ""), states=states)
    for sequence_slot in (0, 1):
        (row,) = sequences.begin([item(sequence_slot, sequence_slot, start=True)])
        assert end(row, new(5)) == ""
    (row,) = sequences.begin([item(2, 0)])
    assert end(row, new(15)) == ENDED.replace("40", "60")
    assert states.account.held_bytes == 20, "the state of the sequence is dropped"

    later, other = item(3, 0), item(4, 1)
    assert {at: text(error) for at, error in sequences.check([later, other]).items()} == {0: ENDED.replace("40", "60")}
    (row,) = sequences.begin([other])
    assert end(row, new(10)) == ""

    again = item(5, 0, start=True)
    assert sequences.check([again]) == {}
    (row,) = sequences.begin([again])
    assert inputs(row)["in"] == [[0.0]]
    assert end(row, new(10)) == ""
    assert sequences.check([item(6, 0)]) == {}


def test_the_end_of_a_sequence_that_was_ended_frees_its_slot() -> None:
    states = HeldStates(39)
    sequences = sequences_of(config_of(GROWING % ""), states=states)
    (row,) = sequences.begin([item(1, 0, start=True)])
    assert end(row, new(10)) == ENDED
    assert text(sequences.check([item(2, 0, end=True)])[0]) == ENDED
    assert "sequence_slots=0" in repr(sequences)


def test_a_request_that_fails_gives_back_its_new_states() -> None:
    states = HeldStates(99)
    sequences = sequences_of(config_of(TWO), states=states)
    (row,) = sequences.begin([item(1, 0, start=True)])
    assert end(row, new(10), new(15, "b_out")) == ENDED.replace("40", "60")
    assert states.account.held_bytes == 0, "of two states one is refused"
    (row,) = sequences.begin([item(2, 1, start=True)])
    row.take([new(10)])
    row.take([new(10)])
    assert states.account.held_bytes == 40, "the last one counts"
    row.fail()
    row.take([new(10)])
    row.end(is_last=True)
    assert states.account.held_bytes == 0


def test_a_response_after_the_end_of_its_sequence_keeps_nothing() -> None:
    states = HeldStates(1000)
    sequences = sequences_of(config_of(GROWING % ""), states=states)
    (row,) = sequences.begin([item(1, 0, start=True)])
    end(row, new(10))
    sequences.forget(0)
    row.take([new(20)])
    assert states.account.held_bytes == 0


def test_a_state_must_fit_with_those_of_null_rows() -> None:
    states = HeldStates(159)
    sequences = sequences_of(
        config_of(GROWING.replace("oldest { max_candidate_sequences: 4 }", "") % ""), states=states
    )
    row = sequences.begin([item(1, 3, start=True)])[-1]
    assert end(row, new(9)) == ""
    assert states.account.held_bytes == 36
    row = sequences.begin([item(2, 3)])[-1]
    assert end(row, new(10)) == ENDED
    row = sequences.begin([item(3, 2, start=True)])[-1]
    assert end(row, new(10)) == ""
    assert states.account.held_bytes == 40


def test_a_state_in_one_buffer_is_counted_once() -> None:
    states = HeldStates(59)
    fixed = GROWING.replace("-1", "10") % "use_same_buffer_for_input_output: true"
    sequences = sequences_of(config_of(fixed), states=states)
    for key in range(3):
        (row,) = sequences.begin([item(key, 0, start=not key)])
        assert end(row, new(10)) == ""
        assert states.account.held_bytes == 40
    sequences.forget(0)
    assert states.account.held_bytes == 0
