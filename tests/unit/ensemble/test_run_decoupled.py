"""One request in an ensemble with decoupled steps; the test gives the answers of the steps."""

from halimede.core.ensemble.run import Acknowledge, CancelCall, GiveAnswer
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from support.ensemble_runs import MANY, MORE, STREAM, TWO, A, B, Player, values
from support.graphs import graph, tensor


def answers(play: Player) -> list[tuple[dict[str, float], bool]]:
    return [(values(a.response), a.response.final) for a in play.last if isinstance(a, GiveAnswer)]


def test_answers_of_a_decoupled_step_are_processed_independently():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.called == [(2, 1)]
    play.answer(1, tensor("OUT", 2.0), final=False)
    assert play.called == [(3, 1)]
    # In the order in which they are done, each acknowledged when it is.
    play.answer(3, tensor("OUT", 20.0))
    assert (answers(play), play.last[-1]) == ([({"y": 20.0}, False)], Acknowledge(1))
    play.answer(2, tensor("OUT", 10.0))
    assert (answers(play), play.last[-1]) == ([({"y": 10.0}, False)], Acknowledge(1))
    assert play.answer(1) == [GiveAnswer(InferenceResponse("e", ""))]
    assert play.run.held == ()


def test_last_answer_may_be_marked_final():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0))
    assert play.called == [(2, 1)]
    play.answer(2, tensor("OUT", 2.0))
    assert answers(play) == [({"y": 2.0}, True)]


def test_end_that_comes_after_the_last_answer_is_an_empty_one():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(2, tensor("OUT", 2.0))
    assert answers(play) == [({"y": 2.0}, False)]
    play.answer(1)
    assert answers(play) == [({}, True)]


def test_answer_without_outputs_is_not_marked_final():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "m"}, {"OUT": "y"}, "m > 1")])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0))
    assert answers(play) == [({}, False), ({}, True)]


def test_no_answers_are_an_empty_final_one():
    assert Player(STREAM).answer(1) == [GiveAnswer(InferenceResponse("e", ""))]


def test_end_waits_for_the_calls_that_answers_started():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.answer(1) == []
    play.answer(2, tensor("OUT", 2.0))
    # A step that has sent its last answer needs no acknowledgement.
    assert [type(action) for action in play.last] == [GiveAnswer]
    assert answers(play) == [({"y": 2.0}, True)]


JOINED = graph(
    [
        (MANY, {"IN": "x"}, {"OUT": "m"}),
        (A, {"IN": "x"}, {"OUT": "n"}),
        (TWO, {"IN": "m", "IN2": "n"}, {"OUT": "y"}),
    ],
    outputs=("y", "n"),
)


def test_tensors_of_the_request_are_shared_by_all_answers():
    play = Player(JOINED)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.called == []
    play.answer(2, tensor("OUT", 5.0))
    assert play.called == [(3, 2)]
    play.answer(1, tensor("OUT", 2.0), final=False)
    assert play.called == [(4, 2)]
    assert values(InferenceResponse("", "", outputs=play.requests[0].inputs)) == {"IN": 2.0, "IN2": 5.0}
    play.answer(3, tensor("OUT", 10.0))
    assert answers(play) == [({"y": 10.0, "n": 5.0}, False)]
    assert play.run.held == ("n",)
    play.answer(4, tensor("OUT", 20.0))
    assert answers(play) == [({"y": 20.0, "n": 5.0}, False)]
    assert play.answer(1) == [GiveAnswer(InferenceResponse("e", ""))]
    assert play.run.held == ()


def test_shared_tensors_are_released_when_no_further_answers_can_come():
    made = graph(
        [
            (MANY, {"IN": "x"}, {"OUT": "m"}),
            (A, {"IN": "x"}, {"OUT": "n"}),
            (B, {"IN": "n"}, {"OUT": "o"}),
            (TWO, {"IN": "m", "IN2": "n"}, {"OUT": "y"}),
        ],
        outputs=("y", "o"),
    )
    play = Player(made)
    play.answer(2, tensor("OUT"))
    assert play.run.held == ("n",)
    play.answer(1)
    assert play.run.held == ()
    # Nothing is kept for answers that will not come, but step 2 is still under way.
    assert answers(play) == []
    assert answers_after(play, 3) == [({}, True)]
    assert play.run.held == ()


def answers_after(play: Player, call: int) -> list[tuple[dict[str, float], bool]]:
    play.answer(call, tensor("OUT"))
    return answers(play)


def test_second_decoupled_step_runs_for_each_answer_of_the_first():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (MORE, {"IN": "m"}, {"OUT": "y"})])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(1, tensor("OUT", 2.0), final=False)
    play.answer(1)
    assert answers(play) == []
    play.answer(2, tensor("OUT", 10.0), final=False)
    assert play.last[-1] == Acknowledge(2)
    assert answers(play) == [({"y": 10.0}, False)]
    play.answer(3, tensor("OUT", 20.0), final=False)
    assert answers(play) == [({"y": 20.0}, False)]
    play.answer(3)
    play.answer(2, tensor("OUT", 11.0))
    assert answers(play) == [({"y": 11.0}, True)]


def test_answer_is_acknowledged_when_all_dependent_steps_have_ended():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (MORE, {"IN": "m"}, {"OUT": "y"})])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(2, tensor("OUT", 10.0), final=False)
    assert play.last.count(Acknowledge(1)) == 0
    assert play.answer(2) == [Acknowledge(1)]


def test_request_for_outputs_without_a_decoupled_step_gets_one_answer():
    play = Player(JOINED, InferenceRequest("e", inputs=[tensor("x")], outputs=("n",)))
    assert play.called == [(1, 1)]
    play.answer(1, tensor("OUT", 5.0))
    assert answers(play) == [({"n": 5.0}, True)]


def test_skipped_decoupled_step_gives_one_answer_without_its_outputs():
    made = graph(
        [(MANY, {"IN": "x"}, {"OUT": "y"}, "x > 5"), (A, {"IN": "x"}, {"OUT": "n"})],
        outputs=("y", "n"),
    )
    play = Player(made)
    assert play.called == [(1, 1)]
    play.answer(1, tensor("OUT", 5.0))
    assert answers(play) == [({"n": 5.0}, True)]
    assert play.run.held == ()


def test_condition_is_evaluated_once_per_answer():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "m"}, {"OUT": "y"}, "m > 1")])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.last == [GiveAnswer(InferenceResponse("e", "", final=False), missing=("y",)), Acknowledge(1)]
    play.answer(1, tensor("OUT", 2.0), final=False)
    assert play.called == [(2, 1)]


def test_error_after_some_answers_ends_the_stream_and_cancels_the_step():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(1, tensor("OUT", 2.0), final=False)
    play.answer(2, tensor("OUT", 10.0))
    # Unused answers are acknowledged too; otherwise their sender would wait forever.
    assert play.fail(3) == [Acknowledge(1), CancelCall(1)]
    assert play.run.held == ()
    assert play.answer(1, tensor("OUT", 3.0), final=False) == [Acknowledge(1)]
    play.answer(1)
    assert play.response.error == InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', boom")
    assert play.response.final


def test_error_of_a_step_is_the_last_answer_of_the_ensemble():
    play = Player(STREAM)
    assert play.fail(1, final=False) == [Acknowledge(1), CancelCall(1)]
    play.answer(1)
    assert play.response.error == InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', boom")


def test_a_stream_that_is_cancelled_ends_with_its_steps():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.run.cancel() == [Acknowledge(1), CancelCall(1), CancelCall(2)]
    play.answer(2, tensor("OUT"))
    assert play.last == []
    play.answer(1)
    assert play.response.error == InferenceError(ErrorCode.CANCELLED, "request was cancelled")
