"""How OpenVINO models are fitted to configurations, and configurations completed from models."""

from dataclasses import replace

import numpy as np
import pytest

from halimede.backends.openvino.runtime import operations, runtime
from halimede.core.config.model_config import (
    BatchInput,
    BatchInputKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelTensorReshape,
)
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.onnx_models import floats, refused
from support.openvino_models import (
    ADD_SUB,
    BACKEND,
    CONTEXT,
    CPU,
    PERCEPTRON,
    add_sub,
    bare,
    config,
    graph,
    named,
    parameter,
    perceptron,
    rows,
    run,
    source,
    with_parameters,
    write,
)

FP32, BYTES, BF16, INT32 = DataType.FP32, DataType.BYTES, DataType.BF16, DataType.INT32


def test_a_fixed_batch_becomes_one_of_any_size(tmp_path):
    values = rows(3)
    result = run(tmp_path, perceptron((1, 64)), PERCEPTRON, {"x": values})
    write(perceptron(), tmp_path / "free.xml")
    assert result["y"].tobytes() == bare(tmp_path / "free.xml", {"x": values})["y"].tobytes()


PADDED = {"SKIP_OV_DYNAMIC_BATCHSIZE": "YES", "ENABLE_BATCH_PADDING": "YES"}


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_smaller_batch_is_filled_up_if_asked_for(tmp_path, count):
    x, text = parameter("x", FP32, (4, 2)), parameter("t", BYTES, (4, 1))
    model = graph([named(operations().negative(x), "y"), text], [x, text])
    settings = config({"x": (FP32, 2), "t": (BYTES, 1)}, {"y": (FP32, 2), "t": (BYTES, 1)}, PADDED, max_batch_size=4)
    texts = np.array([[b"a"], [b""], [b"c"], [b"d"]], object)[:count]
    values = rows(count, 2)
    result = run(tmp_path, model, settings, {"x": values, "t": texts})
    assert result["y"].tolist() == (-values).tolist()
    assert result["t"].tolist() == texts.tolist()


def test_a_smaller_batch_is_an_error_without_padding(tmp_path):
    settings = with_parameters(replace(PERCEPTRON, max_batch_size=4), SKIP_OV_DYNAMIC_BATCHSIZE="YES")
    instance = BACKEND.load(settings, source(tmp_path, perceptron((4, 64)))).create_instance(CPU)
    assert instance.run({"x": rows(4)}, ["y"], CONTEXT)["y"].shape == (4, 64)
    assert refused(lambda: instance.run({"x": rows(3)}, ["y"], CONTEXT)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "the batch has 3 rows, and the model takes exactly 4; with the parameter ENABLE_BATCH_PADDING set to YES "
        "smaller batches are filled up",
    )


def test_a_batch_that_cannot_be_freed_is_refused_with_a_way_out(tmp_path):
    ops = operations()
    x = parameter("x", FP32, (2, 2))
    model = graph([named(ops.reshape(x, np.array([2, 2]), False), "y")], [x])
    settings = config({"x": (FP32, 2)}, {"y": (FP32, 2)}, max_batch_size=2)
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, model)))
    assert error == InferenceError(
        ErrorCode.INVALID_ARG,
        "unable to load model 'm': the batch of input 'x' is fixed at 2 in the file, and output 'y' has the shape "
        "[2, 2] for inputs of any batch; set the parameters SKIP_OV_DYNAMIC_BATCHSIZE and ENABLE_BATCH_PADDING to YES "
        "to fill up each batch to the file's size, or max_batch_size to 0 to serve the file's shape",
    )
    result = run(tmp_path, None, with_parameters(settings, **PADDED), {"x": floats([1, 2])})
    assert result["y"].tolist() == [[1, 2]]
    too_many = with_parameters(replace(settings, max_batch_size=3), **PADDED)
    error = refused(lambda: BACKEND.load(too_many, source(tmp_path)))
    assert "max_batch_size is 3; it must be at most 2, the batch of the file" in error.message


def test_inputs_that_keep_different_batches_are_refused(tmp_path):
    a, b = parameter("a", FP32, (2, 2)), parameter("b", FP32, (1, 2))
    model = graph([named(operations().add(a, b), "y")], [a, b])
    settings = config({"a": (FP32, 2), "b": (FP32, 2)}, {"y": (FP32, 2)}, PADDED, max_batch_size=1)
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, model)))
    assert "all inputs must have the same fixed batch: 'a', 'b'" in error.message


def test_a_file_takes_the_shapes_of_the_configuration_if_asked_for(tmp_path):
    x = parameter("x", FP32, (1, 3, 8))
    model = graph([named(operations().relu(x), "y")], [x])
    settings = config({"x": (FP32, 3, 5)}, {"y": (FP32, 3, 5)})
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, model)))
    assert "the model expects 3 dimensions (shape [-1,3,8])" in error.message
    assert error.message.endswith(
        "with the parameter RESHAPE_IO_LAYERS set to YES the model takes the shapes of the configuration"
    )
    values = np.ones((2, 3, 5), np.float32)
    reshaped = with_parameters(settings, RESHAPE_IO_LAYERS="YES")
    assert run(tmp_path, None, reshaped, {"x": values})["y"].tolist() == values.tolist()

    completed = BACKEND.autocomplete(replace(reshaped, output=()), source(tmp_path))
    assert completed.output == (ModelOutput("y", FP32, dims=(3, 5)),)


def test_a_shape_that_the_file_cannot_take_is_refused(tmp_path):
    settings = with_parameters(config({"x": (FP32, 7)}, {"y": (FP32, 64)}), RESHAPE_IO_LAYERS="YES")
    error = refused(lambda: BACKEND.load(settings, source(tmp_path, perceptron())))
    assert error.code is ErrorCode.INVALID_ARG
    assert (
        "cannot take the shapes of the configuration, which RESHAPE_IO_LAYERS asks for: openvino error: "
        in error.message
    )


def test_inputs_of_a_ragged_batch_stay_flat(tmp_path):
    ops = operations()
    x, ends = parameter("x", FP32, (-1,)), parameter("ends", INT32, (-1,))
    total = named(ops.multiply(ops.reduce_sum(x, np.array([0]), False), ops.convert(ends, "f32")), "y")
    settings = config({}, {"y": (FP32,)}, max_batch_size=4)
    settings = replace(
        settings,
        input=(ModelInput("x", FP32, dims=(-1,), allow_ragged_batch=True),),
        output=(ModelOutput("y", FP32, dims=(1,), reshape=ModelTensorReshape()),),
        batch_input=(BatchInput(BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT, ("ends",), INT32, ("x",)),),
    )
    inputs = {"x": np.array([1, 2, 3], np.float32), "ends": np.array([1, 3], np.int32)}
    assert run(tmp_path, graph([total], [x, ends]), settings, inputs)["y"].tolist() == [6, 18]


def test_autocomplete_completes_the_configuration_from_the_file(tmp_path):
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, add_sub((-1, 3, -1)), default_max_batch_size="6"))
    assert completed == ModelConfig(
        name="m",
        max_batch_size=6,
        input=(ModelInput("a", FP32, dims=(3, -1)), ModelInput("b", FP32, dims=(3, -1))),
        output=(ModelOutput("sum", FP32, dims=(3, -1)), ModelOutput("difference", FP32, dims=(3, -1))),
        dynamic_batching=ModelDynamicBatching(),
    )


def test_a_fixed_first_dimension_is_the_batch_if_the_layout_says_so(tmp_path):
    model = add_sub((1, 3))
    assert BACKEND.autocomplete(ModelConfig(), source(tmp_path, model)).max_batch_size == 0
    for each in model.inputs:
        each.node.set_layout(runtime().Layout("NC"))
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, model))
    assert (completed.max_batch_size, completed.input[0]) == (4, ModelInput("a", FP32, dims=(3,)))
    assert run(tmp_path, None, replace(completed, name="m"), {"a": rows(2, 3), "b": rows(2, 3)})["sum"].shape == (2, 3)


def test_a_layout_does_not_help_a_file_that_cannot_batch(tmp_path):
    x = parameter("x", FP32, (2, 2))
    x.set_layout(runtime().Layout("NC"))
    model = graph([named(operations().reshape(x, np.array([2, 2]), False), "y")], [x])
    completed = BACKEND.autocomplete(ModelConfig(), source(tmp_path, model))
    assert (completed.max_batch_size, completed.input[0].dims) == (0, (2, 2))


def test_autocomplete_of_a_kept_batch_leaves_it_out(tmp_path):
    settings = with_parameters(ModelConfig(max_batch_size=4), **PADDED)
    completed = BACKEND.autocomplete(settings, source(tmp_path, add_sub((4, 3))))
    assert (completed.max_batch_size, completed.input[0].dims) == (4, (3,))


def test_autocomplete_does_not_open_a_fully_configured_model(tmp_path):
    assert BACKEND.autocomplete(ADD_SUB, source(tmp_path)) is ADD_SUB


def test_a_scalar_is_one_element_and_an_unknown_rank_the_configurations(tmp_path):
    x, s = parameter("x", FP32, None), parameter("s", FP32, ())
    where = source(tmp_path, graph([named(operations().add(x, s), "y")], [x, s]))
    completed = BACKEND.autocomplete(ModelConfig(), where)
    assert completed.input == (ModelInput("x", FP32), ModelInput("s", FP32, dims=(1,)))
    assert completed.output == (ModelOutput("y", FP32),)
    settings = config({"x": (FP32, -1, 2), "s": (FP32, 1)}, {"y": (FP32, -1, 2)}, max_batch_size=0)
    result = run(tmp_path, None, settings, {"x": floats([1, 2]), "s": floats(3)})
    assert result["y"].tolist() == [[4, 5]]


def test_a_tensor_goes_by_any_of_its_names(tmp_path):
    x = parameter("x", FP32, (-1, 1))
    x.output(0).get_tensor().set_names({"x", "x:0"})
    model = graph([named(operations().negative(x), "y", "y:0")], [x])
    assert run(tmp_path, model, config({"x:0": (FP32, 1)}, {"y": (FP32, 1)}), {"x:0": floats([1])})["y"].tolist() == [
        [-1]
    ]
    both = config({"x": (FP32, 1)}, {"y": (FP32, 1), "y:0": (FP32, 1)})
    assert {k: v.tolist() for k, v in run(tmp_path, None, both, {"x": floats([1])}).items()} == {
        "y": [[-1]],
        "y:0": [[-1]],
    }


def test_all_disagreements_with_the_model_are_reported(tmp_path):
    wrong = config({"a": (BYTES, 2), "b": (FP32, 3)}, {"sum": (FP32, 2), "product": (FP32, 2)})
    error = refused(lambda: BACKEND.load(wrong, source(tmp_path, add_sub())))
    assert error.code is ErrorCode.INVALID_ARG
    found = [part in error.message for part in ("TYPE_STRING for input 'a'", "tensor 'b'", "'product'")]
    assert found == [True, True, True]
    assert refused(lambda: BACKEND.check(wrong, source(tmp_path))) == error


def test_invalid_numeric_backend_setting_is_named(tmp_path):
    where = source(tmp_path, add_sub(), default_max_batch_size="many")
    assert refused(lambda: BACKEND.autocomplete(ModelConfig(), where)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "--backend-config openvino,default-max-batch-size=many: it must be a number, at least 0",
    )
