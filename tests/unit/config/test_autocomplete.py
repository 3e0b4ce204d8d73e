from dataclasses import replace

import pytest

from halimede.core.config.autocomplete import (
    ModelSignature,
    Scalars,
    TensorSignature,
    check_signature,
    complete,
    find_scalars,
)
from halimede.core.config.model_config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelSequenceBatching,
    ModelTensorReshape,
    SequenceControl,
    SequenceControlInput,
    SequenceState,
)
from halimede.core.types import DataType, ErrorCode, InferenceError, Problem
from support.refusals import error_of

FP32, INT64 = DataType.FP32, DataType.INT64
SCALAR = ModelTensorReshape(())

BATCHABLE = ModelSignature(
    (TensorSignature("x", FP32, (-1, 3, 224)), TensorSignature("len", INT64, (-1,))),
    (TensorSignature("y", FP32, (-1, 10)),),
)
FIXED = ModelSignature(
    (TensorSignature("x", FP32, (2, -1)), TensorSignature("k", INT64, ())), (TensorSignature("y", FP32, (-1,)),)
)

AUTOFILLED = (
    "autofilled max_batch_size to 4 for model 'm' since batching is supported but no max_batch_size is specified in "
    "model configuration. Must specify max_batch_size to utilize autofill with a larger max batch size"
)


def test_batchable_model_gets_batch_size_scheduler_and_dims():
    assert complete(ModelConfig(name="m"), BATCHABLE) == (
        ModelConfig(
            name="m",
            max_batch_size=4,
            dynamic_batching=ModelDynamicBatching(),
            input=(
                ModelInput("x", FP32, dims=(3, 224)),
                ModelInput("len", INT64, dims=(1,), reshape=SCALAR),
            ),
            output=(ModelOutput("y", FP32, dims=(10,)),),
        ),
        (AUTOFILLED,),
    )


def test_model_with_a_fixed_first_dimension_does_not_batch():
    assert complete(ModelConfig(name="m"), FIXED) == (
        ModelConfig(
            name="m",
            input=(ModelInput("x", FP32, dims=(2, -1)), ModelInput("k", INT64, dims=(1,))),
            output=(ModelOutput("y", FP32, dims=(-1,)),),
        ),
        (),
    )


def test_a_model_that_cannot_batch_refuses_a_batch_size():
    assert error_of(complete, ModelConfig(name="m", max_batch_size=8), FIXED) == InferenceError(
        ErrorCode.INVALID_ARG,
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified",
    )


def test_a_given_batch_size_is_kept_and_gets_a_scheduler():
    config, notes = complete(ModelConfig(name="m", max_batch_size=64), BATCHABLE)

    assert (config.max_batch_size, config.dynamic_batching, notes) == (64, ModelDynamicBatching(), ())


def test_a_given_scheduler_is_kept():
    dynamic = ModelDynamicBatching(max_queue_delay_microseconds=5)
    with_dynamic, _ = complete(ModelConfig(name="m", dynamic_batching=dynamic), BATCHABLE)
    with_sequence, _ = complete(ModelConfig(name="m", sequence_batching=ModelSequenceBatching()), BATCHABLE)

    assert (with_dynamic.max_batch_size, with_dynamic.dynamic_batching) == (4, dynamic)
    assert (with_sequence.max_batch_size, with_sequence.dynamic_batching) == (4, None)


@pytest.mark.parametrize(("default", "batching"), [(0, None), (1, None), (2, ModelDynamicBatching())])
def test_the_default_batch_size_is_a_setting(default: int, batching: ModelDynamicBatching | None):
    config, _ = complete(ModelConfig(name="m"), BATCHABLE, default_max_batch_size=default)

    assert (config.max_batch_size, config.dynamic_batching) == (default, batching)
    assert config.input[0].dims == ((3, 224) if default else (-1, 3, 224))


def test_complete_configuration_is_unchanged():
    config = ModelConfig(
        name="m", input=(ModelInput("x", FP32, dims=(1,)),), output=(ModelOutput("y", FP32, dims=(), reshape=SCALAR),)
    )

    assert complete(config, BATCHABLE) == (
        config,
        ("skipping model configuration auto-complete for 'm': inputs and outputs already specified",),
    )


def test_incomplete_tensor_is_completed():
    config = ModelConfig(
        name="m",
        max_batch_size=2,
        input=(ModelInput("len", optional=True), ModelInput("x", INT64), ModelInput("ghost")),
        output=(ModelOutput("y", dims=(5, 2), label_filename="l.txt"),),
    )

    completed, notes = complete(config, BATCHABLE)

    assert notes == ()
    assert completed.input == (
        ModelInput("len", INT64, dims=(1,), reshape=SCALAR, optional=True),
        ModelInput("x", INT64, dims=(3, 224)),
        ModelInput("ghost"),
    )
    assert completed.output == (ModelOutput("y", FP32, dims=(5, 2), label_filename="l.txt"),)


def test_dims_with_a_batch_dimension_disable_batching():
    config = ModelConfig(
        name="m", input=(ModelInput("x", FP32, dims=(-1, 3, 224)), ModelInput("len", INT64, dims=(-1,)))
    )

    completed, notes = complete(config, BATCHABLE)

    assert completed == ModelConfig(name="m", input=config.input, output=(ModelOutput("y", FP32, dims=(-1, 10)),))
    assert notes == (
        "no max_batch_size was filled in for model 'm': its configuration gives dims with the batch dimension",
    )
    assert check_signature(completed, BATCHABLE) == ()


def test_a_tensor_of_unknown_rank_is_left_to_the_configuration():
    signature = ModelSignature((TensorSignature("x", FP32, (-1, 3)),), (TensorSignature("y", FP32, None),))

    assert complete(ModelConfig(name="m"), signature) == (
        ModelConfig(name="m", input=(ModelInput("x", FP32, dims=(-1, 3)),), output=(ModelOutput("y", FP32),)),
        (),
    )


@pytest.mark.parametrize("signature", [BATCHABLE, FIXED])
@pytest.mark.parametrize("default", [0, 4])
def test_completed_configuration_agrees_with_the_model(signature: ModelSignature, default: int):
    completed, _ = complete(ModelConfig(name="m"), signature, default_max_batch_size=default)

    assert check_signature(completed, signature) == ()
    assert complete(completed, signature)[0] == completed


def config_of(max_batch_size: int, x: ModelInput, y: ModelOutput) -> ModelConfig:
    return ModelConfig(name="m", max_batch_size=max_batch_size, input=(x,), output=(y,))


def simple(x: tuple[int, ...] | None, y: tuple[int, ...] | None = (-1, 10)) -> ModelSignature:
    return ModelSignature((TensorSignature("x", FP32, x),), (TensorSignature("y", FP32, y),))


def test_every_disagreement_with_the_model_is_named():
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        input=(ModelInput("x", INT64, dims=(3, 225)),),
        output=(ModelOutput("y", FP32, dims=(10,)), ModelOutput("z", FP32, dims=(1,))),
    )

    assert check_signature(config, BATCHABLE) == (
        Problem("unable to load model 'm', configuration expects 1 inputs, model provides 2", "input"),
        Problem(
            "unable to load model 'm', configuration expects datatype TYPE_INT64 for input 'x', model provides "
            "TYPE_FP32",
            "input[0].data_type",
        ),
        Problem(
            "model 'm', tensor 'x': the model expects 3 dimensions (shape [-1,3,224]) but the model configuration "
            "specifies 3 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,3,225])",
            "input[0].dims",
        ),
        Problem("unable to load model 'm', unexpected inference output 'z', allowed outputs are: y", "output[1].name"),
    )


def test_outputs_may_be_left_out_of_the_configuration():
    signature = ModelSignature(simple((-1, 3)).inputs, (*simple((-1, 3)).outputs, TensorSignature("more", FP32, (1,))))

    assert (
        check_signature(config_of(4, ModelInput("x", FP32, dims=(3,)), ModelOutput("y", FP32, dims=(10,))), signature)
        == ()
    )


@pytest.mark.parametrize(
    ("max_batch_size", "tensor", "shape", "problem"),
    [
        (4, ModelInput("x", FP32, dims=(3,)), (-1, 3), None),
        (4, ModelInput("x", FP32, dims=(3,)), (-1, -1), None),
        (4, ModelInput("x", FP32, dims=(1,), reshape=SCALAR), (-1,), None),
        (4, ModelInput("x", FP32, dims=(6,), reshape=ModelTensorReshape((2, 3))), (-1, 2, 3), None),
        (0, ModelInput("x", FP32, dims=(1,)), (), None),
        (0, ModelInput("x", FP32, dims=(1, 1)), (), None),
        (0, ModelInput("x", FP32, dims=(2, 3)), None, None),
        (
            4,
            ModelInput("x", FP32, dims=(3, 3)),
            (-1, 3),
            "the model expects 2 dimensions (shape [-1,3]) but the model configuration specifies 3 dimensions (an "
            "initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete "
            "shape [-1,3,3])",
        ),
        (
            4,
            ModelInput("x", FP32, dims=(3,)),
            (8, 3),
            "for the model to support batching the shape should have at least 1 dimension and the first dimension "
            "must be -1; but shape expected by the model is [8,3]",
        ),
        (
            4,
            ModelInput("x", FP32, dims=(1,), reshape=SCALAR),
            (),
            "for the model to support batching the shape should have at least 1 dimension and the first dimension "
            "must be -1; but shape expected by the model is []",
        ),
        (
            0,
            ModelInput("x", FP32, dims=(3,)),
            (1, 3),
            "the model expects 2 dimensions (shape [1,3]) but the model configuration specifies 1 dimensions "
            "(shape [3])",
        ),
        (
            0,
            ModelInput("x", FP32, dims=(-1, 3)),
            (1, 3),
            "the model expects 2 dimensions (shape [1,3]) but the model configuration specifies 2 dimensions "
            "(shape [-1,3])",
        ),
    ],
)
def test_dims_are_compared_with_rows_and_reshape(
    max_batch_size: int, tensor: ModelInput, shape: tuple[int, ...] | None, problem: str | None
):
    output = ModelOutput("y", FP32, dims=(10,) if max_batch_size else (-1, 10))

    problems = check_signature(config_of(max_batch_size, tensor, output), simple(shape))

    assert [found.message for found in problems] == ([f"model 'm', tensor 'x': {problem}"] if problem else [])


MADE = BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("SHAPES",), DataType.FP32, ("x",))
RAGGED = ModelConfig(
    name="m",
    max_batch_size=8,
    input=(ModelInput("x", DataType.FP32, dims=(-1, -1), allow_ragged_batch=True),),
    output=(ModelOutput("y", DataType.FP32, dims=(-1, -1)),),
    batch_input=(MADE,),
    batch_output=(BatchOutput(("y",), source_input=("x",)),),
)
SHAPES = TensorSignature("SHAPES", DataType.FP32, (-1, 2))
LENGTHS = {"PADDING": ModelParameter('[{"input": "x", "axis": 1, "lengths": "LENGTHS"}]')}


def ragged_file(*made: TensorSignature, x: tuple[int, ...] = (-1,)) -> ModelSignature:
    output = TensorSignature("y", DataType.FP32, (-1,))
    return ModelSignature((TensorSignature("x", DataType.FP32, x), *made), (output,))


def messages(config: ModelConfig, signature: ModelSignature) -> list[tuple[str, str]]:
    head = "unable to load model 'm', "
    return [(each.path, each.message.removeprefix(head)) for each in check_signature(config, signature)]


def test_ragged_inputs_and_scattered_outputs_are_flat_in_the_model_file():
    assert messages(RAGGED, ragged_file(SHAPES)) == []
    assert messages(RAGGED, ragged_file(SHAPES, x=(-1, -1))) == [
        (
            "input[0].allow_ragged_batch",
            "configuration expects model provides input with shape [-1]  for ragged input 'x', model provides [-1,-1]",
        )
    ]


def test_inputs_that_the_server_makes_must_be_in_the_model_file():
    assert messages(RAGGED, ragged_file()) == [
        ("input", "configuration expects 2 inputs, model provides 1"),
        ("batch_input[0].target_name[0]", "unexpected inference input 'SHAPES', allowed inputs are: x"),
    ]
    assert messages(RAGGED, ragged_file(replace(SHAPES, shape=(-1,)))) == [
        (
            "batch_input[0].target_name[0]",
            "input 'SHAPES' is made by the server: it has 2 dimensions, model provides shape [-1]",
        )
    ]
    assert messages(RAGGED, ragged_file(replace(SHAPES, datatype=DataType.INT32))) == [
        (
            "batch_input[0].target_name[0]",
            "input 'SHAPES' is made by the server: it has datatype TYPE_FP32, model provides TYPE_INT32",
        )
    ]


@pytest.mark.parametrize("datatype", [DataType.INT32, DataType.INT64, DataType.FP32])
def test_lengths_of_padded_rows_are_integers_of_the_model_file(datatype: DataType):
    config = config_of(8, ModelInput("x", DataType.FP32, dims=(-1,)), ModelOutput("y", DataType.FP32, dims=(10,)))
    config = replace(config, parameters=LENGTHS)
    lengths = TensorSignature("LENGTHS", datatype, (-1,))
    file = simple((-1, -1))
    found = messages(config, replace(file, inputs=(*file.inputs, lengths)))
    text = "input 'LENGTHS' is made by the server: it has datatype TYPE_INT64 or TYPE_INT32, model provides TYPE_FP32"
    assert found == ([('parameters["PADDING"]', text)] if datatype is DataType.FP32 else [])


def test_completion_leaves_out_the_inputs_that_the_server_makes():
    file = simple((-1, -1))
    made = replace(file, inputs=(*file.inputs, TensorSignature("LENGTHS", DataType.INT64, (-1,))))
    completed, _ = complete(ModelConfig(name="m", parameters=LENGTHS), made)
    assert [tensor.name for tensor in completed.input] == ["x"]
    assert messages(completed, made) == []


def test_the_dims_of_a_ragged_input_are_not_in_the_model_file():
    given = replace(RAGGED, input=(ModelInput("x", allow_ragged_batch=True),))
    completed, _ = complete(given, ragged_file(SHAPES))
    assert completed.input == (ModelInput("x", DataType.FP32, allow_ragged_batch=True),)


def test_a_scattered_output_gets_the_dims_of_its_source():
    completed, _ = complete(replace(RAGGED, output=()), ragged_file(SHAPES))
    assert completed == replace(RAGGED, dynamic_batching=ModelDynamicBatching())
    partly = replace(RAGGED, input=RAGGED.input, output=(ModelOutput("y", dims=(3,)),))
    completed, _ = complete(partly, ragged_file(SHAPES))
    assert completed.output == (ModelOutput("y", DataType.FP32, dims=(3,)),)


SEQUENCES = ModelSequenceBatching(
    control_input=(SequenceControlInput("START", (SequenceControl(fp32_false_true=(0, 1)),)),),
    state=(SequenceState("in", "out", INT64, (2,)), SequenceState("in2", "shown", INT64, (-1,))),
)
OF_SEQUENCES = ModelSignature(
    (
        TensorSignature("x", FP32, (-1, 3)),
        TensorSignature("START", FP32, (-1, 1)),
        TensorSignature("in", INT64, (-1, 2)),
        TensorSignature("in2", INT64, (-1, -1)),
    ),
    (
        TensorSignature("y", FP32, (-1, 3)),
        TensorSignature("out", INT64, (-1, 2)),
        TensorSignature("shown", INT64, (-1, -1)),
    ),
)


def test_one_element_stands_for_a_scalar_of_a_model_that_does_not_batch():
    x, y = ModelInput("x", FP32, dims=(1,)), ModelOutput("y", FP32, dims=(1, 1))
    scalar = ModelSignature((TensorSignature("x", FP32, ()),), (TensorSignature("y", FP32, ()),))

    assert find_scalars(config_of(0, x, y), scalar) == Scalars(frozenset({"x"}), {"y": (1, 1)})
    assert find_scalars(config_of(0, x, y), simple((1,), (1, 1))) == Scalars()
    assert [each.message for each in check_signature(config_of(0, replace(x, dims=(2,)), y), scalar)] == [
        "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the model "
        "doesn't support batching. Model configuration provided: [2]."
    ]


def test_controls_and_states_are_not_tensors_of_clients():
    config, _ = complete(ModelConfig(name="m", sequence_batching=SEQUENCES), OF_SEQUENCES)
    assert config.input == (ModelInput("x", FP32, dims=(3,)),)
    assert config.output == (ModelOutput("y", FP32, dims=(3,)),)
    assert check_signature(config, OF_SEQUENCES) == ()


def test_a_state_that_is_a_configured_output_is_completed():
    config = ModelConfig(name="m", sequence_batching=SEQUENCES, output=(ModelOutput("shown"), ModelOutput("y")))
    completed, _ = complete(config, OF_SEQUENCES)
    assert completed.output == (ModelOutput("shown", INT64, dims=(-1,)), ModelOutput("y", FP32, dims=(3,)))
    assert check_signature(completed, OF_SEQUENCES) == ()


def test_controls_and_states_that_the_model_does_not_have():
    config, _ = complete(ModelConfig(name="m", sequence_batching=SEQUENCES), OF_SEQUENCES)
    wrong = ModelSignature(
        (OF_SEQUENCES.inputs[0], TensorSignature("START", INT64, (-1, 1)), TensorSignature("in", INT64, (-1, 3))),
        (OF_SEQUENCES.outputs[0], TensorSignature("out", FP32, (-1, 2))),
    )
    problems = check_signature(config, wrong)
    assert [problem.path for problem in problems] == [
        "input",
        "sequence_batching.control_input[0].control[0].data_type",
        "sequence_batching.state[0].dims",
        "sequence_batching.state[1].input_name",
        "sequence_batching.state[0].data_type",
        "sequence_batching.state[1].output_name",
    ]
    assert problems[0].message == "unable to load model 'm', configuration expects 4 inputs, model provides 3"
    assert problems[3].message == (
        "unable to load model 'm', unexpected inference input 'in2', allowed inputs are: x, START, in"
    )
