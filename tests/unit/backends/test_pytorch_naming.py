import pytest

from halimede.backends.pytorch.naming import (
    Argument,
    ArgumentKind,
    Results,
    bind_inputs,
    bind_outputs,
    bind_paths,
    index_of,
    own_names,
)
from halimede.core.types import ErrorCode
from support.refusals import error_of

X, MASK = Argument("x"), Argument("mask")
NO_MASK = Argument("mask", optional=True, type_name="Optional[Tensor]")
DICT = Argument("tensors", ArgumentKind.DICT, type_name="Dict[str, Tensor]")
NUMBER = Argument("n", ArgumentKind.OTHER, type_name="int")


def bound(names, arguments, *, optional=(), has_order=True):
    return bind_inputs("m", names, arguments, optional=frozenset(optional), has_order=has_order)


def refused(work) -> str:
    error = error_of(work)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


@pytest.mark.parametrize(
    ("name", "index"), [("INPUT__0", 0), ("a__b__12", 12), ("x", None), ("__1", 1), ("x__", None), ("x__99999", None)]
)
def test_an_index_is_behind_two_underscores(name, index):
    assert index_of(name) == index


@pytest.mark.parametrize(
    ("names", "positions"),
    [
        (["mask", "x"], {"mask": 1, "x": 0}),
        (["second__1", "first__0"], {"second__1": 1, "first__0": 0}),
        (["some", "other"], {"some": 0, "other": 1}),
        (["x", "other"], {"x": 0, "other": 1}),
    ],
    ids=["arguments", "indices", "order", "order with one at its place"],
)
def test_inputs_are_found_by_argument_by_index_or_by_order(names, positions):
    assert bound(names, [X, MASK]) == positions


def test_one_dictionary_takes_inputs_of_any_names():
    assert bound(["b", "a", "c"], [DICT]) is None


def test_arguments_with_a_default_may_be_left_out():
    assert bound(["x"], [X, NO_MASK]) == {"x": 0}
    assert bound(["x", "mask"], [X, NO_MASK], optional=["mask"]) == {"x": 0, "mask": 1}


@pytest.mark.parametrize(
    ("names", "arguments", "optional", "problem"),
    [
        (["x"], [X, MASK], [], "no input in the configuration is 'mask'"),
        (["x", "mask", "more"], [X, MASK], [], "input 'more' would be its argument 3"),
        (["a__0", "b__0"], [X, MASK], [], "inputs 'a__0' and 'b__0' are the same argument"),
        (["mask", "y"], [X, MASK], [], "'mask' is at another position"),
        (["x", "n"], [X, NUMBER], [], "argument 'n' of forward is of type int"),
        (["x", "tensors"], [X, DICT], [], "argument 'tensors' of forward is of type Dict[str, Tensor]"),
        (["x", "mask"], [X, MASK], ["mask"], "input 'mask' is optional, but argument 'mask' of forward has no default"),
        ([], [X], [], "forward has 1 argument (x), and no input in the configuration is 'x'"),
    ],
)
def test_inputs_that_do_not_fit_forward_are_named(names, arguments, optional, problem):
    assert problem in refused(lambda: bound(names, arguments, optional=optional))


def test_inputs_that_the_server_adds_have_no_place_in_an_order():
    message = refused(lambda: bound(["one", "START"], [X, MASK], has_order=False))
    assert "name each input as an argument of forward (x, mask), or <name>__<index>" in message
    assert bound(["x", "mask"], [X, MASK], has_order=False) == {"x": 0, "mask": 1}


@pytest.mark.parametrize(
    ("names", "results", "positions"),
    [
        (["a", "b"], Results(count=2), {"a": 0, "b": 1}),
        (["OUT__1"], Results(count=2), {"OUT__1": 1}),
        (["a", "OUT__0"], Results(), {"a": 0, "OUT__0": 1}),
        (["b"], Results(by_name=True, names=("a", "b")), {"b": "b"}),
        (["b"], Results(by_name=True), {"b": "b"}),
    ],
)
def test_outputs_are_found_by_key_by_index_or_by_order(names, results, positions):
    assert bind_outputs("m", names, results, has_order=True) == positions


def test_outputs_that_forward_does_not_return_are_named():
    two = Results(count=2)
    assert "output 'c' would be number 3" in refused(lambda: bind_outputs("m", list("abc"), two, has_order=True))
    keys = Results(by_name=True, names=("a", "b"))
    assert "forward returns the names a, b" in refused(lambda: bind_outputs("m", ["c"], keys, has_order=True))
    assert "name them <name>__<index>" in refused(lambda: bind_outputs("m", ["y", "s"], two, has_order=False))


PATHS = ("ARGS[0]", "ARGS[2][key]", "KWARGS[k]")
OWN = ("x", "key", "k")


@pytest.mark.parametrize(
    ("paths", "arguments", "names"),
    [
        (PATHS, ("x", "more_key", "k"), OWN),
        (PATHS, ("", "", ""), ("INPUT__0", "key", "k")),
        (("ARGS[0][0]", "ARGS[0][1]"), ("pair_0", "pair_1"), ("pair_0", "pair_1")),
        (("ARGS[0][a]", "ARGS[1][a]", "ARGS[2]"), ("p_a", "q_a", "a"), ("p_a", "q_a", "a")),
        (("ARGS[0][a]", "ARGS[1][a]", "KWARGS[k]"), ("", "", ""), ("INPUT__0", "INPUT__1", "k")),
        (("ARGS[0]", "ARGS[1]"), ("INPUT__1", ""), ("INPUT__0", "INPUT__1")),
    ],
)
def test_tensors_of_a_pt2_file_have_the_names_of_keys_and_arguments(paths, arguments, names):
    assert own_names(paths, arguments, "input") == names


def test_tensors_of_a_pt2_file_are_found_by_name_by_index_or_by_structure():
    for names in (["key", "x", "k"], ["INPUT__1", "ARGS[0]", "KWARGS[k]"], ["any__1", "x", "KWARGS[k]"]):
        assert bind_paths("m", names, PATHS, OWN, "input", needed=True) == dict(zip(names, (1, 0, 2), strict=True))
    results = ("RESULT[j]", "RESULT[k][0]")
    assert bind_paths("m", ["RESULT[k][0]"], results, ("j", "OUTPUT__1"), "output") == {"RESULT[k][0]": 1}


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (
            ["INPUT__3"],
            "has no input 'INPUT__3'; its inputs are x, key, k, in order INPUT__0 to INPUT__2, or by structure "
            "ARGS[0], ARGS[2][key], KWARGS[k]",
        ),
        (["y"], "has no input 'y'"),
        (["INPUT__0", "x"], "inputs 'INPUT__0' and 'x' are the same tensor (ARGS[0])"),
        (["INPUT__0", "ARGS[0]"], "inputs 'INPUT__0' and 'ARGS[0]' are the same tensor (ARGS[0])"),
        (["INPUT__0", "INPUT__1"], "no input in the configuration is KWARGS[k] of the model file"),
    ],
)
def test_names_that_a_pt2_file_does_not_have_are_named(names, problem):
    assert problem in refused(lambda: bind_paths("m", names, PATHS, OWN, "input", needed=True))
