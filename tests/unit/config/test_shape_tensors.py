"""Shape tensors of models that batch: the number of rows is their first value."""

from dataclasses import replace

import numpy as np
import pytest

from halimede.core.config.autocomplete import ModelSignature, TensorSignature, check_signature, complete
from halimede.core.config.check_request import RequestChecker
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.config.shape_tensors import can_have_rows, shape_tensors
from halimede.core.schedule.batch_plan import plan_batches
from halimede.core.types import DataType, InferenceError, InferenceRequest, Tensor

FP32, INT32 = DataType.FP32, DataType.INT32
MODEL = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput("to", INT32, dims=(2,), is_shape_tensor=True), ModelInput("x", FP32, dims=(3,))),
    output=(ModelOutput("y", FP32, dims=(3,)), ModelOutput("shape", INT32, dims=(2,), is_shape_tensor=True)),
)


def inputs(rows: int, *values: int) -> list[Tensor]:
    numbers = np.array(values, np.int32).tobytes()
    return [Tensor("to", INT32, (len(values),), numbers), Tensor("x", FP32, (rows, 3), bytes(12 * rows))]


def request(rows: int, *values: int) -> InferenceRequest:
    return InferenceRequest("m", inputs=inputs(rows, *values))


def test_only_models_that_batch_have_rows_in_shape_tensors():
    assert shape_tensors(MODEL) == {"to", "shape"}
    assert shape_tensors(replace(MODEL, max_batch_size=0)) == frozenset()
    assert [can_have_rows(dims) for dims in ((1,), (64,), (0,), (65,), (-1,), (), (1, 1))] == [True] * 2 + [False] * 5


def test_requests_have_the_rows_as_a_value_and_share_batches_by_the_others():
    checker = RequestChecker(MODEL)
    checked = [checker.check(request(*numbers)) for numbers in ((2, 2, 4, 6), (5, 9, 4, 6), (2, 2, 4, 7))]
    assert [each.batch_size for each in checked] == [2, 5, 2]
    assert checked[0].compatible == checked[1].compatible != checked[2].compatible
    # The same shapes again: the values are compared each time.
    assert checker.check(request(2, 2, 4, 6)).compatible == checked[0].compatible


@pytest.mark.parametrize("values", [(2, 4), (2, 4, 6, 8)])
def test_another_number_of_values_is_refused(values):
    with pytest.raises(InferenceError, match=rf"input 'to'.*Expected \[3\], got \[{len(values)}\]"):
        RequestChecker(MODEL).check(request(2, *values))


def test_without_batches_a_shape_tensor_is_a_tensor_like_others():
    checker = RequestChecker(replace(MODEL, max_batch_size=0, input=(MODEL.input[0],)))
    alone = InferenceRequest("m", inputs=[Tensor("to", INT32, (2,), bytes(8))])
    assert checker.check(alone).batch_size == 1


def test_a_batch_has_its_rows_and_each_answer_its_own():
    plan = plan_batches(MODEL)
    assert plan is not None
    rows = [2, 3]
    gathered = plan.gather([inputs(2, 2, 4, 6), inputs(3, 3, 4, 6)], rows)
    assert (gathered.inputs["to"].tolist(), gathered.inputs["x"].shape) == ([5, 4, 6], (5, 3))
    outputs = {"y": np.arange(15, dtype=np.float32).reshape(5, 3), "shape": np.array([5, 4, 6], np.int32)}
    replies = plan.scatter(outputs, {"y": FP32, "shape": INT32}, gathered, rows, [(), ("shape",)])
    assert [[(each.name, each.array().tolist()) for each in reply] for reply in replies] == [
        [("y", [[0, 1, 2], [3, 4, 5]]), ("shape", [2, 4, 6])],
        [("shape", [3, 4, 6])],
    ]


SIGNATURE = ModelSignature(
    (TensorSignature("to", INT32, (3,), is_values=True), TensorSignature("x", FP32, (-1, 3))),
    (TensorSignature("y", FP32, (-1, 3)), TensorSignature("shape", INT32, (3,), is_values=True)),
)


def test_completion_leaves_out_the_rows_if_the_model_batches():
    batching, _ = complete(ModelConfig(name="m", max_batch_size=8), SIGNATURE)
    assert (batching.input, batching.output) == (MODEL.input, MODEL.output)
    alone, _ = complete(ModelConfig(name="m"), SIGNATURE, default_max_batch_size=0)
    assert alone.input[0] == ModelInput("to", INT32, dims=(3,), is_shape_tensor=True)
    assert alone.max_batch_size == 0


def test_the_model_files_shape_has_one_value_more():
    assert check_signature(MODEL, SIGNATURE) == ()
    wrong = replace(MODEL, input=(replace(MODEL.input[0], dims=(3,)), MODEL.input[1]))
    assert [problem.message for problem in check_signature(wrong, SIGNATURE)] == [
        "model 'm', tensor 'to': the model expects shape [3] but the model configuration specifies shape [4], with the "
        "number of rows as the first value"
    ]
