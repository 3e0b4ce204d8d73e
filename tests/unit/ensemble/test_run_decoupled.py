"""The way of one request through an ensemble with decoupled steps, played by hand."""

from halimede.core.ensemble.run import Acknowledge, CancelCall, GiveAnswer
from halimede.core.types import ErrorCode, InferenceError, InferenceRequest, InferenceResponse
from support.ensemble_runs import MANY, MORE, STREAM, TWO, A, B, Player, values
from support.graphs import graph, tensor


def answers(play: Player) -> list[tuple[dict[str, float], bool]]:
    return [(values(a.response), a.response.final) for a in play.last if isinstance(a, GiveAnswer)]


def test_every_answer_of_a_decoupled_step_goes_its_own_way():
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


def test_the_last_answer_may_say_that_it_is_the_last():
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


def test_the_end_waits_for_what_the_answers_set_going():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.answer(1) == []
    play.answer(2, tensor("OUT", 2.0))
    # Who has given its last answer needs no acknowledgement.
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


def test_what_there_is_once_is_shared_by_all_answers_whoever_comes_first():
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


def test_what_is_shared_is_let_go_when_no_more_answers_can_come():
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


def test_a_decoupled_step_behind_another_answers_for_each_of_its_answers():
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


def test_an_answer_is_acknowledged_when_all_that_follows_from_it_is_over():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (MORE, {"IN": "m"}, {"OUT": "y"})])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(2, tensor("OUT", 10.0), final=False)
    assert play.last.count(Acknowledge(1)) == 0
    assert play.answer(2) == [Acknowledge(1)]


def test_a_decoupled_ensemble_of_which_only_other_outputs_are_wanted_gives_one_answer():
    play = Player(JOINED, InferenceRequest("e", inputs=[tensor("x")], outputs=("n",)))
    assert play.called == [(1, 1)]
    play.answer(1, tensor("OUT", 5.0))
    assert answers(play) == [({"n": 5.0}, True)]


def test_a_decoupled_step_that_is_skipped_leaves_one_answer_without_its_outputs():
    made = graph(
        [(MANY, {"IN": "x"}, {"OUT": "y"}, "x > 5"), (A, {"IN": "x"}, {"OUT": "n"})],
        outputs=("y", "n"),
    )
    play = Player(made)
    assert play.called == [(1, 1)]
    play.answer(1, tensor("OUT", 5.0))
    assert answers(play) == [({"n": 5.0}, True)]
    assert play.run.held == ()


def test_a_condition_is_asked_once_per_answer():
    made = graph([(MANY, {"IN": "x"}, {"OUT": "m"}), (A, {"IN": "m"}, {"OUT": "y"}, "m > 1")])
    play = Player(made)
    play.answer(1, tensor("OUT", 1.0), final=False)
    assert play.last == [GiveAnswer(InferenceResponse("e", "", final=False)), Acknowledge(1)]
    play.answer(1, tensor("OUT", 2.0), final=False)
    assert play.called == [(2, 1)]


def test_an_error_after_some_answers_ends_the_stream_and_its_model():
    play = Player(STREAM)
    play.answer(1, tensor("OUT", 1.0), final=False)
    play.answer(1, tensor("OUT", 2.0), final=False)
    play.answer(2, tensor("OUT", 10.0))
    # What was not used up is given back, or its sender would wait for ever.
    assert play.fail(3) == [Acknowledge(1), CancelCall(1)]
    assert play.run.held == ()
    assert play.answer(1, tensor("OUT", 3.0), final=False) == [Acknowledge(1)]
    play.answer(1)
    assert play.response.error == InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', boom")
    assert play.response.final


def test_an_error_that_is_not_the_last_answer_of_its_step_is_the_last_of_the_ensemble():
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
