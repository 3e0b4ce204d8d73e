"""One request in an ensemble; the test gives the answers of the steps."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from halimede.core.config.model_config import ModelEnsembling
from halimede.core.ensemble.graph import make_graph
from halimede.core.ensemble.run import Acknowledge, CancelCall, EnsembleRun, GiveAnswer
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from support.ensemble_runs import CHAIN, FORK, OPTIONAL, PAIR, TWO, A, B, C, Player, values
from support.graphs import ensemble, graph, model, tensor

SEQUENCE = {"sequence_id": 0, "sequence_start": False, "sequence_end": False}


def test_a_step_follows_the_one_that_makes_its_input():
    play = Player(CHAIN)
    assert play.called == [(1, 0)]
    play.answer(1, tensor("OUT", 2.0))
    assert play.called == [(2, 1)]
    assert play.requests == [InferenceRequest("b", inputs=[tensor("IN", 2.0)], outputs=("OUT",))]
    assert play.answer(2, tensor("OUT", 3.0)) == [
        GiveAnswer(InferenceResponse("e", "", outputs=[tensor("y", 3.0)], parameters=SEQUENCE))
    ]
    assert play.run.held == ()


def test_independent_steps_run_in_parallel():
    play = Player(FORK)
    assert play.called == [(1, 0), (2, 1)]
    assert play.answer(2, tensor("OUT", 5.0)) == []
    play.answer(1, tensor("OUT", 4.0))
    assert play.called == [(3, 2)]
    assert {t.name: float(t.array().flat[0]) for t in play.requests[0].inputs} == {"IN": 4.0, "IN2": 5.0}


def test_every_step_gets_the_clients_parameters():
    request = InferenceRequest(
        "e", "", "id7", [tensor("x")], (), {"lang": "de"}, priority=2, timeout_us=5000, sequence_id=42,
        sequence_start=True,
    )  # fmt: skip
    play = Player(CHAIN, request)
    expected = InferenceRequest(
        "a", "", "id7", [tensor("IN")], ("OUT",), {"lang": "de"}, priority=2, timeout_us=5000, sequence_id=42,
        sequence_start=True,
    )  # fmt: skip
    assert play.requests == [expected]
    # Changes that a step's model makes to its parameters do not reach the next step.
    play.requests[0].parameters["lang"] = "en"
    play.answer(1, tensor("OUT"))
    assert play.requests[0].parameters == {"lang": "de"}
    play.answer(2, tensor("OUT"))
    assert play.response.id == "id7"
    assert play.response.parameters == {"sequence_id": 42, "sequence_start": True, "sequence_end": False}


def test_sequence_parameters_of_an_answer_hold_from_there_on():
    play = Player(
        graph([(A, {"IN": "x"}, {"OUT": "m"}), (B, {"IN": "m"}, {"OUT": "n"}), (C, {"IN": "n"}, {"OUT": "y"})])
    )
    play.answer(1, tensor("OUT"), parameters={"sequence_id": "s", "sequence_end": True, "else": 1})
    assert (play.requests[0].sequence_id, play.requests[0].sequence_start, play.requests[0].sequence_end) == (
        "s",
        False,
        True,
    )
    assert play.requests[0].parameters == {}
    play.answer(2, tensor("OUT"))
    assert play.requests[0].sequence_id == "s"
    play.answer(3, tensor("OUT"), parameters={"sequence_end": False})
    assert play.response.parameters == {"sequence_id": "s", "sequence_start": False, "sequence_end": False}


def test_step_with_a_version_requests_this_version():
    latest = ensemble([(A, {"IN": "x"}, {"OUT": "y"})])
    step = latest.ensemble_scheduling.step[0]
    seventh = replace(latest, ensemble_scheduling=ModelEnsembling((replace(step, model_version=7),)))
    assert Player(make_graph(latest, [A])).requests[0].model_version == ""
    assert Player(make_graph(seventh, [A])).requests[0].model_version == "7"


# --- what runs ---


def test_only_steps_for_the_requested_outputs_run():
    made = graph(
        [
            (PAIR, {"IN": "x"}, {"OUT": "y", "OUT2": "m"}),
            (B, {"IN": "m"}, {"OUT": "z"}),
            (C, {"IN": "x"}, {"OUT": "w"}),
        ],
        outputs=("y", "z", "w"),
    )
    play = Player(made, InferenceRequest("e", inputs=[tensor("x")], outputs=("y",)))
    assert play.called == [(1, 0)]
    # Only the needed outputs of the step are requested.
    assert play.requests[0].outputs == ("OUT",)
    play.answer(1, tensor("OUT", 2.0))
    assert values(play.response) == {"y": 2.0}

    play = Player(made, InferenceRequest("e", inputs=[tensor("x")], outputs=("z", "y")))
    play.answer(1, tensor("OUT", 2.0), tensor("OUT2", 3.0))
    play.answer(2, tensor("OUT", 4.0))
    # In the requested order.
    assert [t.name for t in play.response.outputs] == ["z", "y"]
    assert len(Player(made).called) == 2


def test_an_output_that_is_an_input_is_passed_on():
    made = graph([(A, {"IN": "x"}, {"OUT": "y"})], outputs=("y", "x"))
    play = Player(made, InferenceRequest("e", inputs=[tensor("x", 7.0)], outputs=("x",)))
    assert values(play.response) == {"x": 7.0}
    assert play.called == []


def test_an_optional_input_that_is_absent_is_left_out():
    made = graph([(OPTIONAL, {"IN": "x", "IN2": "z"}, {"OUT": "y"})], inputs=("x", "z?"))
    assert [t.name for t in Player(made).requests[0].inputs] == ["IN"]
    both = InferenceRequest("e", inputs=[tensor("z"), tensor("x")])
    assert [t.name for t in Player(made, both).requests[0].inputs] == ["IN", "IN2"]


def test_missing_output_is_absent_for_the_next_step_and_the_client():
    made = graph(
        [(PAIR, {"IN": "x"}, {"OUT": "m", "OUT2": "n"}), (OPTIONAL, {"IN": "m", "IN2": "n"}, {"OUT": "y"})],
        outputs=("y", "n"),
    )
    play = Player(made)
    play.answer(1, tensor("OUT"))
    assert [t.name for t in play.requests[0].inputs] == ["IN"]
    play.answer(2, tensor("OUT", 2.0))
    assert values(play.response) == {"y": 2.0}


def test_an_answer_without_outputs_has_no_parameters():
    play = Player(graph([(A, {"IN": "x"}, {"OUT": "y"})]))
    assert play.answer(1) == [GiveAnswer(InferenceResponse("e", ""), missing=("y",))]


def test_model_is_called_without_a_required_input_and_refuses_the_call():
    play = Player(CHAIN)
    play.answer(1)
    assert play.requests[0].inputs == []
    play.fail(2, "expected 1 inputs but got 0 inputs for model 'b'")
    assert play.response.error is not None
    assert play.response.error.message == "in ensemble 'e', expected 1 inputs but got 0 inputs for model 'b'"


# --- conditions ---

WHEN = graph(
    [
        (A, {"IN": "x"}, {"OUT": "score"}),
        (B, {"IN": "x"}, {"OUT": "y"}, "score > 0.5 and parameters.go != false"),
        (C, {"IN": "y"}, {"OUT": "z"}),
        (OPTIONAL, {"IN": "x", "IN2": "z"}, {"OUT": "w"}),
    ],
    outputs=("y", "z", "w"),
)


def test_step_waits_for_the_tensors_of_its_condition():
    play = Player(WHEN)
    assert play.called == [(1, 0)]
    play.answer(1, tensor("OUT", 0.75))
    assert play.called == [(2, 1)]


def test_skipped_step_skips_the_steps_that_require_its_outputs():
    play = Player(WHEN)
    play.answer(1, tensor("OUT", 0.25))
    assert play.called == [(2, 3)]
    assert [t.name for t in play.requests[0].inputs] == ["IN"]
    play.answer(2, tensor("OUT", 9.0))
    assert values(play.response) == {"w": 9.0}
    assert play.run.held == ()


def test_condition_may_use_request_parameters():
    play = Player(WHEN, InferenceRequest("e", inputs=[tensor("x")], parameters={"go": False}))
    play.answer(1, tensor("OUT", 0.75))
    assert play.called == [(2, 3)]


def test_when_every_output_is_skipped_the_answer_is_empty():
    made = graph([(A, {"IN": "x"}, {"OUT": "y"}, "x > 5")])
    assert Player(made).last == [GiveAnswer(InferenceResponse("e", ""), missing=("y",))]


def test_undecidable_condition_is_an_error_that_names_the_condition():
    play = Player(WHEN, InferenceRequest("e", inputs=[tensor("x")], parameters={"go": "yes"}))
    play.answer(1, tensor("OUT", 0.75))
    assert play.last == [
        GiveAnswer(
            InferenceResponse(
                "e",
                "",
                error=InferenceError(
                    ErrorCode.INVALID_ARG,
                    "in ensemble 'e', step 1 of model 'b', condition \"score > 0.5 and parameters.go != false\": "
                    "parameter 'go' is a text and false is true or false, which '!=' does not compare",
                ),
            )
        )
    ]


def test_step_decided_together_with_an_error_is_not_called():
    made = graph(
        [
            (A, {"IN": "x"}, {"OUT": "y"}),
            (B, {"IN": "x"}, {"OUT": "z"}, "parameters.go"),
            (C, {"IN": "x"}, {"OUT": "w"}),
        ],
        outputs=("y", "z", "w"),
    )
    play = Player(made, InferenceRequest("e", inputs=[tensor("x")], parameters={"go": 1}))
    assert play.called == []
    assert play.response.error is not None
    assert play.run.held == ()


# --- shapes ---


@pytest.mark.parametrize(
    ("batches", "given", "seen"),
    [
        (8, (1, 4), (1, 4)),
        (8, (4,), (1, 4)),
        (0, (1, 4), (4,)),
        (0, (4,), (4,)),
        # Neither can be fixed: the model's own check reports the problem.
        (0, (2, 4), (2, 4)),
        (8, (3,), (3,)),
        (8, (1, 1, 4), (1, 1, 4)),
    ],
)
def test_row_dimension_changes_between_ensemble_and_step(batches, given, seen):
    step = model("a", batch=batches, dims=(4,))
    made = graph([(step, {"IN": "x"}, {"OUT": "y"})], dims=(4,), batch=8 if len(given) > 1 else 0)
    data = np.arange(float(np.prod(given)), dtype="<f4").tobytes()
    play = Player(made, InferenceRequest("e", inputs=[Tensor("x", DataType.FP32, given, data)]))
    (sent,) = play.requests[0].inputs
    assert sent.shape == seen
    assert sent.data is data


def floats(name, *shape):
    return Tensor(name, DataType.FP32, shape, bytes(4 * int(np.prod(shape))))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    ("batch", "of_step", "made", "shown"),
    [
        # Both batch, or neither does: the client gets what the step made.
        (8, 8, (3,), (3,)),
        (8, 8, (1, 3), (1, 3)),
        (0, 0, (1, 3), (1, 3)),
        # Only the ensemble batches: a row is added to a shape that fits without one.
        (8, 0, (3,), (1, 3)),
        (8, 0, (2, 3), (2, 3)),
        # Only the step batches: its row is removed, unless the shape fits with it or there are several rows.
        (0, 8, (1, 3), (3,)),
        (0, 8, (3,), (3,)),
        (0, 8, (2, 3), (2, 3)),
    ],
)
def test_answer_has_the_rows_of_its_step(rows, batch, of_step, made, shown):
    step = model("a", batch=of_step, dims=(-1,))
    ensemble = graph([(step, {"IN": "x"}, {"OUT": "y"})], dims=(-1,), batch=batch)
    play = Player(ensemble, InferenceRequest("e", inputs=[floats("x", rows, 4)]))
    play.answer(1, floats("OUT", *made))
    assert [t.shape for t in play.response.outputs] == [shown]


@pytest.mark.parametrize(
    ("rows", "made", "seen"),
    [
        (1, (4,), (1, 4)),
        # The step refuses these, as in Triton: nothing says to which row they belong.
        (2, (4,), (4,)),
        (1, (3,), (3,)),
    ],
)
def test_row_is_added_between_steps_only_for_requests_of_one_row(rows, made, seen):
    one, other = model("a", dims=(4,)), model("b", dims=(4,))
    chain = graph([(one, {"IN": "x"}, {"OUT": "m"}), (other, {"IN": "m"}, {"OUT": "y"})], dims=(4,))
    play = Player(chain, InferenceRequest("e", inputs=[floats("x", rows, 4)]))
    play.answer(1, floats("OUT", *made))
    assert [t.shape for t in play.requests[0].inputs] == [seen]


# --- memory ---


def test_a_tensor_is_never_copied_and_never_shared_as_an_object():
    data = bytearray(4)
    request = InferenceRequest("e", inputs=[Tensor("x", DataType.FP32, (1, 1), data)])
    play = Player(FORK, request)
    sent = [r.inputs[0] for r in play.requests]
    assert all(t.data is data for t in sent)
    # A model's check may give its input another shape.
    sent[0].shape = (1,)
    assert sent[1].shape == request.inputs[0].shape == (1, 1)


def test_tensor_is_released_when_its_last_user_has_started():
    made = graph(
        [
            (A, {"IN": "x"}, {"OUT": "m"}),
            (B, {"IN": "m"}, {"OUT": "n"}),
            (TWO, {"IN": "m", "IN2": "n"}, {"OUT": "y"}),
        ]
    )
    play = Player(made)
    assert play.run.held == ()
    play.answer(1, tensor("OUT"))
    assert play.run.held == ("m",)
    play.answer(2, tensor("OUT"))
    assert play.run.held == ()
    play.answer(3, tensor("OUT"))
    assert play.run.held == ()


def test_inputs_of_the_last_user_are_freed_with_its_call():
    class Bytes(bytearray):
        pass

    data = Bytes(4)
    seen = weakref.ref(data)
    run = EnsembleRun(CHAIN, InferenceRequest("e", inputs=[tensor("x")]))
    run.begin()
    response = InferenceResponse("a", "1", outputs=[Tensor("OUT", DataType.FP32, (1, 1), data)])
    actions = run.on_response(1, response)
    del data, response
    assert seen() is not None
    del actions
    gc.collect()
    assert seen() is None


def test_unused_tensor_is_not_held():
    made = graph([(PAIR, {"IN": "x"}, {"OUT": "y"}), (A, {"IN": "y"}, {"OUT": "z"})], outputs=("y", "z"))
    play = Player(made)
    play.answer(1, tensor("OUT"), tensor("OUT2"), tensor("OUT3"))
    assert play.run.held == ("y",)


# --- errors and cancellation ---


def test_the_first_failing_step_is_the_answer_when_all_calls_are_over():
    play = Player(FORK, InferenceRequest("e", id="i", inputs=[tensor("x")]))
    assert play.fail(2, "first") == []
    assert play.run.held == ()
    error = InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', first")
    assert play.fail(1, "second") == [GiveAnswer(InferenceResponse("e", "", "i", error=error))]
    assert play.run.cancel() == []


def test_nothing_is_called_after_an_error():
    play = Player(
        graph(
            [
                (A, {"IN": "x"}, {"OUT": "y"}),
                (B, {"IN": "x"}, {"OUT": "m"}),
                (C, {"IN": "m"}, {"OUT": "z"}),
            ],
            outputs=("y", "z"),
        )
    )
    play.fail(1)
    assert [type(action) for action in play.answer(2, tensor("OUT"))] == [GiveAnswer]


def test_an_error_within_an_inner_ensemble_names_both():
    play = Player(CHAIN)
    play.fail(1, "in ensemble 'inner', boom")
    assert play.response.error == InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', in ensemble 'inner', boom")


def test_a_cancelled_run_cancels_its_calls_and_ends_when_they_have():
    play = Player(FORK)
    assert play.run.cancel() == [CancelCall(1), CancelCall(2)]
    assert play.run.held == ()
    assert play.run.cancel() == []
    assert play.answer(1, tensor("OUT")) == []
    play.fail(2)
    assert play.response.error == InferenceError(ErrorCode.CANCELLED, "request was cancelled")
    assert play.run.cancel() == []


def test_a_run_that_is_cancelled_before_it_began_ends_at_once():
    run = EnsembleRun(CHAIN, InferenceRequest("e", inputs=[tensor("x")]))
    (answer,) = run.cancel()
    assert isinstance(answer, GiveAnswer)
    assert run.begin() == []
    assert run.held == ()


def test_cancelling_after_an_error_keeps_the_error():
    play = Player(FORK)
    play.fail(1)
    assert play.run.cancel() == [CancelCall(2)]
    play.fail(2, "request was cancelled")
    assert play.response.error == InferenceError(ErrorCode.NOT_FOUND, "in ensemble 'e', boom")


def test_model_that_became_decoupled_fails_the_request():
    play = Player(CHAIN)
    play.answer(1, tensor("OUT"), final=False)
    assert play.last == [Acknowledge(1), CancelCall(1)]
    play.answer(1, tensor("OUT"), final=False)
    assert play.last == [Acknowledge(1)]
    play.answer(1)
    assert play.response.error is not None
    assert play.response.error.code is ErrorCode.INTERNAL
