"""Signatures of `.pt2` files, sizes, samples and results, all without PyTorch."""

import json
from collections import namedtuple

import numpy as np
import pytest

from halimede.backends.pytorch.exported import (
    Dimension,
    ExportedSignature,
    ExportedTensor,
    batch_bounds,
    batch_problem,
    read_exported,
)
from halimede.backends.pytorch.package import read_package
from halimede.backends.pytorch.results import as_sequence, names_of, pick
from halimede.backends.pytorch.samples import MOST_ELEMENTS, configured_shapes, exported_shapes, zeros
from halimede.backends.pytorch.sizes import SizeCheck
from halimede.backends.pytorch.tree import MOST_DEPTH, MOST_LEAVES, argument_paths, result_paths
from halimede.core.config.model_config import BatchInput, ModelConfig, ModelInput, ModelTensorReshape
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.refusals import error_of

LEAF = {"type": None, "context": None, "children_spec": []}
FP32, BF16, INT64, BYTES = DataType.FP32, DataType.BF16, DataType.INT64, DataType.BYTES
ROWS = Dimension(-1, "s0", 1, 64)


def tree(kind: str, children: list, keys: list | None = None) -> dict:
    context = "null" if keys is None else json.dumps(keys)
    return {"type": f"builtins.{kind}", "context": context, "children_spec": children}


def spec(root: dict) -> str:
    return json.dumps([1, root])


ARGUMENTS = spec(
    tree(
        "tuple",
        [
            tree("tuple", [LEAF, tree("dict", [LEAF, LEAF], ["a", "b"])]),
            tree("dict", [tree("list", [LEAF])], ["k"]),
        ],
    )
)


def refused(work) -> str:
    error = error_of(work)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


def test_paths_name_nested_arguments_and_results():
    assert argument_paths(ARGUMENTS) == ("ARGS[0]", "ARGS[1][a]", "ARGS[1][b]", "KWARGS[k][0]")
    assert result_paths(spec(LEAF)) == ("RESULT",)
    assert result_paths(spec(tree("dict", [tree("tuple", [LEAF, LEAF]), LEAF], ["k", "z"]))) == (
        "RESULT[k][0]",
        "RESULT[k][1]",
        "RESULT[z]",
    )


def test_a_structure_that_is_too_deep_is_an_error():
    deep = LEAF
    for _ in range(MOST_DEPTH + 1):
        deep = tree("list", [deep])
    with pytest.raises(ValueError, match="levels"):
        result_paths(spec(deep))
    with pytest.raises(ValueError, match="tensors"):
        result_paths(spec(tree("list", [LEAF] * (MOST_LEAVES + 1))))


@pytest.mark.parametrize("text", ["[]", "3", spec(tree("tuple", [LEAF])), spec({"type": "x"}), "{"])
def test_a_text_that_is_no_structure_of_arguments_is_an_error(text):
    with pytest.raises(ValueError):  # noqa: PT011  # json's own texts too
        argument_paths(text)


def size(value: int | str) -> dict:
    return {"as_int": value} if isinstance(value, int) else {"as_expr": {"expr_str": value}}


def program(inputs: list[dict], values: dict[str, tuple], outputs: list[dict], in_spec: str, out_spec: str) -> bytes:
    """The document of an exported program; values are (number of the datatype, *sizes)."""
    return json.dumps(
        {
            "range_constraints": {"s0": {"min_val": 1, "max_val": 64}, "s1": {"min_val": 2, "max_val": None}},
            "graph_module": {
                "module_call_graph": [
                    {"fqn": "", "signature": {"in_spec": in_spec, "out_spec": out_spec}},
                    {"fqn": "inner", "signature": None},
                ],
                "graph": {
                    "tensor_values": {
                        name: {"dtype": datatype, "sizes": list(map(size, sizes))}
                        for name, (datatype, *sizes) in values.items()
                    }
                },
                "signature": {
                    "input_specs": [{"parameter": {}}, *({"user_input": {"arg": each}} for each in inputs)],
                    "output_specs": [{"user_output": {"arg": each}} for each in outputs],
                },
            },
        }
    ).encode()


SYMBOL = "Symbol('s0', positive=True, integer=True)"
ONE = spec(tree("tuple", [tree("tuple", [LEAF]), tree("dict", [], [])]))
TWO = spec(tree("tuple", [tree("tuple", [LEAF, LEAF]), tree("dict", [], [])]))
PLAIN = spec(tree("tuple", [LEAF, LEAF]))


def tensor(name: str) -> dict:
    return {"as_tensor": {"name": name}}


def test_an_exported_program_says_names_types_and_dynamic_sizes():
    values = {"x": (7, SYMBOL, 4), "y": (13, SYMBOL, f"Mul(Integer(2), {SYMBOL})"), "z": (5, 3)}
    document = program([tensor("x"), {"as_none": True}], values, [tensor("y"), tensor("z")], TWO, PLAIN)
    assert read_exported(document, "m") == ExportedSignature(
        (ExportedTensor("ARGS[0]", FP32, (ROWS, Dimension(4)), "x"),),
        (
            ExportedTensor("RESULT[0]", BF16, (ROWS, Dimension(-1))),
            ExportedTensor("RESULT[1]", INT64, (Dimension(3),)),
        ),
    )


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (program([tensor("x")], {"x": (29, 4)}, [], ONE, spec(tree("tuple", []))), "ARGS[0] has a datatype of PyTorch"),
        (program([{"as_sym_int": {}}], {}, [], ONE, spec(tree("tuple", []))), "ARGS[0] is sym_int"),
        (program([tensor("x")], {}, [], ONE, spec(LEAF)), "cannot be read: KeyError"),
        (b"{}", "cannot be read: KeyError"),
        (b"no json", "cannot be read"),
    ],
)
def test_a_program_that_cannot_be_served_is_refused(document, problem):
    assert problem in refused(lambda: read_exported(document, "m"))


def test_batches_stay_within_the_sizes_of_the_export():
    least_two = Dimension(-1, "s1", 2, None)
    bounded = ExportedSignature((ExportedTensor("ARGS[0]", FP32, (ROWS, Dimension(4))),), ())
    pairs = ExportedSignature((ExportedTensor("ARGS[0]", FP32, (least_two,)),), ())
    assert (batch_bounds(bounded), batch_bounds(pairs)) == ((1, 64), (2, None))
    assert batch_problem(bounded, "m", 64) is None
    assert "write max_batch_size: 64" in str(batch_problem(bounded, "m", 65))
    assert "at least 2 rows" in str(batch_problem(pairs, "m", 8))
    assert batch_problem(pairs, "m", 0) is None


WRAPPER = """
    inputs_info_[0].name = "arg2_1";
    inputs_info_[1].name = "arg3_1";
    in_spec_ = R"({arguments})";
    out_spec_ = R"({results})";
    int32_t arg2_1_expected_dtype = aoti_torch_dtype_float32();
    if (arg2_1_size[0] < {least}) {{
    if (arg2_1_size[0] > 64) {{
    if (4 != arg2_1_size[1]) {{
    int32_t arg3_1_expected_dtype = aoti_torch_dtype_bfloat16();
    if (checks()) {{ assert_size_stride(arg2_1, {{s37, 4L}}, {{4L, 1L}}, "input"); }}
    if (checks()) {{ assert_size_stride(arg3_1, {{{second}}}, {{4L, 1L}}, "input"); }}
"""


def wrapper(second: str = "s37, 8L", least: int = 2, arguments: str = TWO) -> str:
    return WRAPPER.format(arguments=arguments, results=spec(LEAF), second=second, least=least)


def test_a_package_says_its_inputs_in_its_source():
    found = read_package(wrapper())
    assert found is not None
    assert (found.input_paths, found.output_paths) == (("ARGS[0]", "ARGS[1]"), ("RESULT",))
    assert found.inputs == (
        ExportedTensor("ARGS[0]", FP32, (Dimension(-1, "s37", None, 64), Dimension(4))),
        ExportedTensor("ARGS[1]", BF16, (Dimension(-1, "s37"), Dimension(8))),
    )


def test_a_package_whose_sizes_only_its_library_can_check_has_names_alone():
    for source in (wrapper("2L*s37, 8L"), wrapper().replace("assert_size_stride(arg3_1", "other(arg3_1")):
        found = read_package(source)
        assert found is not None
        assert (found.input_paths, found.inputs) == (("ARGS[0]", "ARGS[1]"), None)
    assert read_package("int main() {}") is None
    assert read_package(wrapper(arguments=ONE)) is None


def test_a_least_size_above_the_compilers_assumption_is_kept():
    found = read_package(wrapper(least=5))
    assert found is not None
    assert found.inputs is not None
    assert found.inputs[0].dimensions[0] == Dimension(-1, "s37", 5, 64)


def test_sizes_have_to_be_in_bounds_and_equal_where_the_program_needs_it():
    length = Dimension(-1, "s1", 2, None)
    tensors = (
        ExportedTensor("ARGS[0]", FP32, (ROWS, length)),
        ExportedTensor("ARGS[1]", FP32, (ROWS, length, Dimension(3))),
    )
    check = SizeCheck(tensors, {"ids": 0, "mask": 1}).check
    check([(64, 9), (64, 9, 3)])
    assert "dimension 0 of input 'ids' is 65; the model takes at most 64" in refused(
        lambda: check([(65, 9), (65, 9, 3)])
    )
    assert "dimension 1 of input 'ids' is 1; the model takes at least 2" in refused(lambda: check([(1, 1), (1, 1, 3)]))
    assert refused(lambda: check([(2, 9), (2, 8, 3)])) == (
        "dimension 1 of input 'mask' is 8, and dimension 1 of input 'ids' is 9; the model needs equal sizes"
    )


def test_samples_have_the_configured_shapes():
    config = ModelConfig(
        max_batch_size=4,
        input=(
            ModelInput("x", FP32, dims=(3, -1)),
            ModelInput("s", BYTES, dims=(1,)),
            ModelInput("r", INT64, dims=(4,), reshape=ModelTensorReshape((2, 2))),
        ),
    )
    shapes = configured_shapes(config, rows=2, size=5)
    assert shapes == {"x": (FP32, (2, 3, 5)), "s": (BYTES, (2, 1)), "r": (INT64, (2, 2, 2))}
    made = zeros(shapes)
    assert made is not None
    assert (made["x"].dtype, made["s"].tolist()) == (np.float32, [[b""], [b""]])


def test_there_are_no_samples_for_inputs_that_depend_on_a_batch():
    ragged = ModelConfig(max_batch_size=4, input=(ModelInput("x", FP32, dims=(-1,), allow_ragged_batch=True),))
    lengths = ModelConfig(
        max_batch_size=4,
        input=(ModelInput("x", FP32, dims=(-1,)),),
        batch_input=(BatchInput(target_name=("n",), data_type=FP32, source_input=("x",)),),
    )
    assert configured_shapes(ragged, 1) is None
    assert configured_shapes(lengths, 1) is None
    assert configured_shapes(ModelConfig(input=(ModelInput("x", FP32),)), 1) is None
    assert zeros({"x": (FP32, (MOST_ELEMENTS + 1,))}) is None


def test_samples_of_a_program_stay_within_its_bounds():
    tensors = (
        ExportedTensor("ARGS[0]", FP32, (ROWS, Dimension(-1, "s1", 40, None), Dimension(3))),
        ExportedTensor("ARGS[1]", INT64, (Dimension(2), Dimension(-1, "s0", 1, 64))),
    )
    assert exported_shapes(tensors, {"x": 0, "y": 1}, rows=2) == {"x": (FP32, (2, 40, 3)), "y": (INT64, (2, 2))}
    short = (ExportedTensor("ARGS[0]", FP32, (ROWS, Dimension(-1, "s2", None, 16))),)
    assert exported_shapes(short, {"x": 0}, rows=100) == {"x": (FP32, (64, 16))}


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("result", "positions", "found"),
    [
        (7, {"y": 0}, {"y": 7}),
        ((1, 2), {"b": 1, "a": 0}, {"b": 2, "a": 1}),
        ([1, 2], {"b": 1}, {"b": 2}),
        (["text"], {"y": 0}, {"y": ["text"]}),
        ({"b": 2, "a": 1}, {"a": 0}, {"a": 1}),
        (Pair(1, 2), {"right": 0}, {"right": 2}),
        (Pair(1, 2), {"x": 0, "right": 1}, {"x": 1, "right": 2}),
    ],
    ids=str,
)
def test_outputs_are_picked_from_whatever_forward_returned(result, positions, found):
    assert pick(result, positions, list(positions)) == found


def test_results_that_are_not_there_are_named():
    with pytest.raises(InferenceError, match="output 'b' is number 2 of the model's results, and it returned 1"):
        pick((1,), {"b": 1}, ["b"])
    with pytest.raises(InferenceError, match="returned no 'b'; the keys that it returned are a"):
        pick({"a": 1}, {"b": 0}, ["b"])


def test_results_without_names_are_numbered():
    assert names_of({"a": 1}) == ("a",)
    assert names_of(Pair(1, 2)) == ("left", "right")
    assert names_of((1, 2)) == ("OUTPUT__0", "OUTPUT__1")
    assert names_of(["a", "b"]) == ("OUTPUT__0",)
    assert as_sequence([]) == []
