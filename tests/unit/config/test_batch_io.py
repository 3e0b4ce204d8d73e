"""The rules for ragged inputs, batch inputs and outputs, and the parameters PADDING and BATCH_SIZES."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from halimede.core.config.batch_io import ANY_SIZE, ignored_batch_settings
from halimede.core.config.made_inputs import MadeInput, made_inputs
from halimede.core.config.model_config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelTensorReshape,
)
from halimede.core.config.padding import Padding, batch_sizes_of, pad_element, padding_of, read_padding
from halimede.core.config.validate import validate
from halimede.core.types import DataType

FP32, INT32, INT64 = DataType.FP32, DataType.INT32, DataType.INT64
X = ModelInput("X", FP32, dims=(-1,))
FIXED = ModelInput("F", FP32, dims=(4,))
MODEL = ModelConfig(
    name="m",
    platform="p",
    max_batch_size=8,
    input=(X, FIXED),
    output=(ModelOutput("Y", FP32, dims=(-1,)), ModelOutput("Z", FP32, dims=(4,))),
)
COUNT = BatchInput(BatchInputKind.BATCH_ELEMENT_COUNT, ("A",), INT32, ("X",))
SCATTER = BatchOutput(("Y",), source_input=("X",))


def problems(config: ModelConfig) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in validate(config)]


def with_padding(value: object, config: ModelConfig = MODEL) -> ModelConfig:
    text = value if isinstance(value, str) else json.dumps(value)
    return replace(config, parameters={"PADDING": ModelParameter(text)})


def padding_problems(value: object, config: ModelConfig = MODEL) -> list[str]:
    found = problems(with_padding(value, config))
    assert {path for path, _ in found} <= {'parameters["PADDING"]'}
    return [message.removeprefix("parameter 'PADDING' ") for _, message in found]


def test_valid_batch_inputs_and_outputs_have_no_problems():
    shape = BatchInput(BatchInputKind.BATCH_ITEM_SHAPE, ("B", "C"), FP32, ("X",))
    ragged = replace(MODEL, input=(replace(X, allow_ragged_batch=True), FIXED))
    config = replace(ragged, batch_input=(COUNT, shape), batch_output=(SCATTER,))
    assert problems(config) == []
    assert made_inputs(config) == (
        MadeInput("A", (INT32,), 1, "batch_input[0].target_name[0]"),
        MadeInput("B", (FP32,), 2, "batch_input[1].target_name[0]"),
        MadeInput("C", (FP32,), 2, "batch_input[1].target_name[1]"),
    )


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"target_name": ()}, "target_name", "batch input must specify 'target_name'"),
        ({"source_input": ()}, "", "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
        (
            {"source_input": ("X", "F")},
            "source_input",
            "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 2 for m",
        ),
        ({"source_input": ("Q",)}, "source_input[0]", "unknown source input name 'Q' for m"),
        ({"data_type": INT64}, "data_type", "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        (
            {"target_name": ("F",)},
            "target_name[0]",
            "input 'F', which the server computes, must not be in 'input': no client sends it",
        ),
        (
            {"target_name": ("A", "A")},
            "target_name[1]",
            "input 'A', which the server computes, is specified more than once",
        ),
    ],
)
def test_a_wrong_batch_input_is_refused(changes: dict, path: str, message: str):
    config = replace(MODEL, batch_input=(replace(COUNT, **changes),))
    assert problems(config) == [(f"batch_input[0].{path}".rstrip("."), message)]


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"target_name": ()}, "target_name", "batch output must specify 'target_name'"),
        ({"target_name": ("Q",)}, "target_name[0]", "unknown target output name 'Q' for m"),
        ({"target_name": ("Y", "Y")}, "target_name[1]", "target output name 'Y' can only be specified once for m"),
        (
            {"source_input": ()},
            "",
            "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 0 for m",
        ),
        ({"source_input": ("Q",)}, "source_input[0]", "unknown source input name 'Q' for m"),
    ],
)
def test_a_wrong_batch_output_is_refused(changes: dict, path: str, message: str):
    config = replace(MODEL, batch_output=(replace(SCATTER, **changes),))
    assert problems(config) == [(f"batch_output[0].{path}".rstrip("."), message)]


@pytest.mark.parametrize("kind", [BatchInputKind.BATCH_ITEM_SHAPE, BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN])
def test_shapes_of_items_need_a_model_that_batches(kind: BatchInputKind):
    config = replace(MODEL, max_batch_size=0, batch_input=(COUNT, replace(COUNT, kind=kind, target_name=("B",))))
    assert problems(config) == [
        ("batch_input[1].kind", f"batch input kind '{kind.name}' needs a model that batches: 'max_batch_size' is 0")
    ]


def test_names_that_the_model_file_may_still_add_are_not_compared():
    empty = ModelConfig(name="m", backend="python", max_batch_size=ANY_SIZE)
    assert problems(replace(empty, batch_input=(COUNT,), batch_output=(SCATTER,))) == []
    sizes = {"BATCH_SIZES": ModelParameter("1,4")}
    padding = {"PADDING": ModelParameter('[{"input": "X", "axis": 3, "outputs": {"Y": 2}}]')}
    config = replace(empty, backend="onnxruntime", parameters=sizes | padding)
    assert {path for path, _ in problems(config)} == {"input", "output"}
    without_dims = replace(config, input=(ModelInput("X"),), output=(ModelOutput("Y"),))
    assert not [message for path, message in problems(without_dims) if path.startswith("parameters")]


def test_the_value_of_padding_is_read():
    config = with_padding(
        [
            {"input": "X", "axis": 1, "value": -1, "buckets": [16, 32], "lengths": "L", "outputs": {"Y": 1}},
            {"input": "W", "axis": 1},
        ],
        replace(MODEL, input=(X, replace(X, name="W"))),
    )
    assert problems(config) == []
    assert padding_of(config) == (Padding("X", 1, -1, (16, 32), "L", {"Y": 1}), Padding("W", 1))
    assert made_inputs(config) == (MadeInput("L", (INT64, INT32), 1, 'parameters["PADDING"]'),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[" * 100_000, "is not JSON: "),
        ("[" + "9" * 5000 + "]", "is not JSON: "),
        ({"input": "X", "axis": 1}, 'must be a list of objects, as [{"input": "IDS", "axis": 1}]'),
        (["X"], 'must be a list of objects, as [{"input": "IDS", "axis": 1}]'),
        ([{"axis": 1}], "entry 0: must have the name of an input as 'input'"),
        ([{"input": "X", "axis": 1}] * 2, "entry 1: input 'X' is padded more than once"),
    ],
)
def test_a_wrong_padding_is_refused(value: object, message: str):
    (text,) = padding_problems(value)
    assert text.startswith(message)
    assert len(text) < 2048


NO_AXIS = "must have a number from 1 on as 'axis': a dimension of a request's shape, in which 0 is the rows"
NO_BUCKETS = "must have ascending lengths from 1 on as 'buckets', as [16, 32, 64]"
NO_OUTPUTS = "must have an object of output names and axes, from 1 on, as 'outputs'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 3}, "has the unknown key 'size'; the keys are input, axis, value, buckets, lengths, outputs"),
        ({"input": ""}, "must have the name of an input as 'input'"),
        *(({"axis": axis}, NO_AXIS) for axis in (0, -1, 1.0, True, "1", None, 2**31)),
        ({"value": [0]}, "must have a number, a string, true or false as 'value'"),
        *(({"buckets": buckets}, NO_BUCKETS) for buckets in ([], [0, 1], [2, 2], [3, 2], [1.5], 16, [True])),
        ({"lengths": ""}, "must have the name of an input of the model file as 'lengths'"),
        ({"outputs": ["Y"]}, NO_OUTPUTS),
        ({"outputs": {"Y": 0}}, NO_OUTPUTS),
        ({"input": "Q"}, "input 'Q' is not an input of the model"),
        ({"axis": 2}, "input 'X' has no dimension 2: its shape has 2 dimensions, with the rows"),
        ({"input": "F"}, "dimension 1 of input 'F' is 4 in 'dims'; it must be -1"),
        ({"value": "0"}, "'value' of input 'X' does not fit TYPE_FP32: \"0\" is not a number"),
        ({"outputs": {"Q": 1}}, "output 'Q' is not an output of the model"),
        ({"outputs": {"Z": 1}}, "dimension 1 of output 'Z' is 4 in 'dims'; it must be -1"),
    ],
)
def test_a_wrong_entry_of_padding_is_refused(changes: dict[str, object], message: str):
    (text,) = padding_problems([{"input": "X", "axis": 1, **changes}])
    assert text.startswith(f"entry 0: {message}")
    assert len(text) < 2048


def test_an_output_is_cut_once_in_each_dimension():
    config = replace(MODEL, input=(X, replace(X, name="W")))
    entries = [{"input": name, "axis": 1, "outputs": {"Y": 1}} for name in ("X", "W")]
    assert padding_problems(entries, config) == ["entry 1: output 'Y' is cut more than once in dimension 1"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            replace(MODEL, max_batch_size=0),
            "needs a model that batches: 'max_batch_size' is 0",
        ),
        (
            replace(MODEL, input=(replace(X, allow_ragged_batch=True),)),
            "entry 0: input 'X' has 'allow_ragged_batch', so it cannot be padded",
        ),
        (
            replace(MODEL, input=(replace(X, optional=True),)),
            "entry 0: input 'X' is optional, so it cannot have 'lengths' or 'outputs': requests without it have no length",
        ),
        (
            replace(MODEL, input=(replace(X, reshape=ModelTensorReshape((-1, 1))),)),
            "entry 0: input 'X' has a 'reshape', so its dimensions are not those of the model",
        ),
        (
            replace(MODEL, batch_output=(SCATTER,)),
            "entry 0: output 'Y' is a target of 'batch_output', so it cannot be cut",
        ),
    ],
)
def test_padding_that_does_not_fit_the_model_is_refused(config: ModelConfig, message: str):
    entry = {"input": "X", "axis": 1, "lengths": "L", "outputs": {"Y": 1}}
    assert padding_problems([entry], config) == [message]


def test_lengths_must_not_be_an_input_of_clients_or_of_batch_input():
    def found(name: str) -> list[tuple[str, str]]:
        entry = {"input": "X", "axis": 1, "lengths": name}
        return problems(with_padding([entry], replace(MODEL, batch_input=(COUNT,))))

    path = 'parameters["PADDING"]'
    assert found("F") == [(path, "input 'F', which the server computes, must not be in 'input': no client sends it")]
    assert found("A") == [(path, "input 'A', which the server computes, is specified more than once")]


@pytest.mark.parametrize(
    ("value", "datatype", "element"),
    [
        (None, FP32, 0.0),
        (7, INT32, 7),
        (-128, DataType.INT8, -128),
        (True, DataType.BOOL, True),
        (None, DataType.BOOL, False),
        (1.5, DataType.FP16, 1.5),
        (float("-inf"), DataType.FP16, float("-inf")),
        (1, DataType.BF16, 0x3F80),
        (1 + 2**-8, DataType.BF16, 0x3F80),
        (1 + 3 * 2**-8, DataType.BF16, 0x3F82),
        (float("-inf"), DataType.BF16, 0xFF80),
        (None, DataType.BF16, 0),
        (2**64 - 1, DataType.UINT64, 2**64 - 1),
        (None, DataType.BYTES, b""),
        ("ü", DataType.BYTES, "ü".encode()),
    ],
)
def test_values_of_padding_as_elements(value, datatype: DataType, element):
    made = pad_element(value, datatype)
    assert made == element
    assert datatype is DataType.BYTES or made.dtype == datatype.dtype


def test_not_a_number_stays_not_a_number_in_every_float():
    assert all(np.isnan(pad_element(float("nan"), datatype)) for datatype in (DataType.FP16, FP32, DataType.FP64))
    bits = pad_element(float("nan"), DataType.BF16)
    assert np.isnan(np.array([int(bits) << 16], np.uint32).view(np.float32)[0])


@pytest.mark.parametrize(
    ("value", "datatype", "message"),
    [
        (128, DataType.INT8, "128 is not an integer from -128 to 127"),
        (1.0, INT32, "1.0 is not an integer from -2147483648 to 2147483647"),
        (True, INT32, "true is not a number"),
        (0, DataType.BOOL, "0 is not true or false"),
        ("a", DataType.BOOL, '"a" is not true or false'),
        (1e6, DataType.FP16, "1000000.0 is too large"),
        (1e39, FP32, "1e+39 is too large"),
        (3.4e38, DataType.BF16, "3.4e+38 is too large"),
        pytest.param(10**400, DataType.FP64, "1000", id="huge"),
        (0, DataType.BYTES, "0 is not a string"),
        ("\ud800", DataType.BYTES, "'utf-8' codec can't encode"),
    ],
)
def test_values_that_a_datatype_does_not_have(value, datatype: DataType, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        pad_element(value, datatype)


def with_sizes(text: str, **changes) -> ModelConfig:
    return replace(MODEL, parameters={"BATCH_SIZES": ModelParameter(text)}, **changes)


def test_allowed_batch_sizes_are_read():
    config = with_sizes("1, 2,8")
    assert (problems(config), batch_sizes_of(config)) == ([], (1, 2, 8))


@pytest.mark.parametrize("text", ["", "0,8", "1,1,8", "4,2,8", "1,-1", "1;8", "1,8,", "١,8", "9" * 5000, "[1,8]"])
def test_wrong_batch_sizes_are_refused(text: str):
    ((path, message),) = problems(with_sizes(text))
    assert path == 'parameters["BATCH_SIZES"]'
    assert message.startswith(f"parameter 'BATCH_SIZES' is '{text[:20]}")
    assert message.endswith("'; it must be ascending numbers from 1 on, as '1,4,8'")


@pytest.mark.parametrize("size", [0, 4, 16])
def test_the_last_batch_size_is_the_largest(size: int):
    assert problems(with_sizes("1,8", max_batch_size=size)) == [
        (
            'parameters["BATCH_SIZES"]',
            f"parameter 'BATCH_SIZES' ends with 8; the last size must be 'max_batch_size', which is {size}",
        )
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input": (replace(X, allow_ragged_batch=True),)}, "allow_ragged_batch"),
        ({"batch_input": (COUNT,)}, "batch_input"),
        ({"batch_output": (SCATTER,)}, "batch_output"),
    ],
)
def test_batch_sizes_are_for_rows_alone(changes: dict, field: str):
    assert problems(with_sizes("1,8", **changes)) == [
        (
            'parameters["BATCH_SIZES"]',
            f"parameter 'BATCH_SIZES' cannot be combined with '{field}': a batch would need rows that no request has",
        )
    ]


def test_a_model_that_takes_requests_may_use_the_names_of_the_parameters():
    own = {"PADDING": ModelParameter("left"), "BATCH_SIZES": ModelParameter("any")}
    python = replace(MODEL, platform="", backend="python", parameters=own, batch_input=(COUNT,))
    assert (problems(python), padding_of(python), batch_sizes_of(python)) == ([], (), ())
    assert read_padding(replace(MODEL, parameters=own, ensemble_scheduling=ModelEnsembling())) == ((), ())
    assert [(note.path, note.message) for note in ignored_batch_settings(python, "why")] == [
        ("batch_input", "'batch_input' has no effect: why"),
        ('parameters["PADDING"]', "parameter 'PADDING' has no effect on batches: why"),
        ('parameters["BATCH_SIZES"]', "parameter 'BATCH_SIZES' has no effect on batches: why"),
    ]
