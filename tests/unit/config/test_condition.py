"""The language of `when`: its meaning, and its error messages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.condition import parse_condition
from halimede.core.types import ErrorCode, InferenceError
from halimede_spec.condition import (
    MAX_DEPTH,
    MAX_LENGTH,
    AllOf,
    AnyOf,
    Comparison,
    Dimension,
    Element,
    Literal,
    Not,
    Parameter,
    Present,
    Truth,
)
from support.refusals import error_of

A, B, C = (Truth(Element(name)) for name in "abc")


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("score > 0.5", Comparison(">", Element("score"), Literal(0.5))),
        ("-3<=label", Comparison("<=", Literal(-3), Element("label"))),
        ("x == -1.5e-3", Comparison("==", Element("x"), Literal(-0.0015))),
        ("mask.shape[0] > 0", Comparison(">", Dimension("mask", 0), Literal(0))),
        ("x.present", Truth(Present("x"))),
        ("flag != true", Comparison("!=", Element("flag"), Literal(True))),
        ("parameters.lang == 'de'", Comparison("==", Parameter("lang"), Literal("de"))),
        ('parameters.`x-y` == "it\'s"', Comparison("==", Parameter("x-y"), Literal("it's"))),
        (r"name == 'a\'b\\c'", Comparison("==", Element("name"), Literal("a'b\\c"))),
        ("`input.1:0` == 1", Comparison("==", Element("input.1:0"), Literal(1))),
        ("`parameters`.present", Truth(Present("parameters"))),
        ("a or b and not c", AnyOf((A, AllOf((B, Not(C)))))),
        ("(a or b) and c", AllOf((AnyOf((A, B)), C))),
        ("not not a", Not(Not(A))),
        ("not a == b", Not(Comparison("==", Element("a"), Element("b")))),
        (" \n a\t", A),
        ("orange and nothing", AllOf((Truth(Element("orange")), Truth(Element("nothing"))))),
    ],
)
def test_a_condition_is_read(text, expression):
    assert parse_condition(text).expression == expression


def test_condition_has_the_tensors_that_it_names():
    condition = parse_condition("b > 0 and a.present or parameters.c == 1 and b.shape[1] == 2")
    assert condition.tensors == ("b", "a")
    assert condition.text == "b > 0 and a.present or parameters.c == 1 and b.shape[1] == 2"


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", 1, "the condition ends"),
        ("a >", 4, "the condition ends"),
        ("a > 1 b", 7, "'b' is not expected; allowed here: and, or, or the end of the condition"),
        ("a = 1", 3, "'= 1' is not valid in a condition"),
        ("a < b < c", 7, "'<' is not expected"),
        ("(a", 3, "the condition ends; allowed here: and, or, )"),
        ("a)", 2, "')' is not expected"),
        ("a and", 6, "the condition ends"),
        ("and a", 1, "'and' is not expected"),
        ("not", 4, "the condition ends"),
        ("a.size > 1", 3, "'size' is not expected; allowed here: 'present' or 'shape[<number>]'"),
        ("a.shape > 1", 9, "'>' is not expected; allowed here: '[' and the dimension's number"),
        ("a.shape[-1] > 1", 9, "'-1' is not expected; allowed here: the dimension's number, 0 or more"),
        ("a.shape[1.0] > 1", 9, "'1.0' is not expected"),
        ("a.shape[0 > 1", 11, "'>' is not expected; allowed here: ']'"),
        ("parameters == 1", 12, "'==' is not expected; allowed here: '.' and the parameter's name"),
        ("parameters.1 == 1", 11, "'.1' is not expected"),
        ("a + 1 > 2", 3, "'+ 1 > 2' is not valid in a condition"),
        ("f(a)", 2, "'(' is not expected"),
        ("a == 'x", 6, "''x' is not valid in a condition"),
        ("a > 1e999", 5, "'1e999' is not a number in the range of a double"),
        ("a[0] > 1", 2, "'[' is not expected"),
        ("__import__('os')", 11, "'(' is not expected"),
    ],
)
def test_a_mistake_has_a_place_and_what_is_allowed_there(text, place, what):
    error = error_of(parse_condition, text)
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith(f"at character {place}: {what}")
    assert "allowed here: " in error.message


def test_length_and_depth_are_bounded():
    parse_condition("(" * MAX_DEPTH + "a" + ")" * MAX_DEPTH)
    with pytest.raises(InferenceError, match=re.escape(f"more than {MAX_DEPTH} parentheses and 'not'")):
        parse_condition("(" * (MAX_DEPTH + 1) + "a" + ")" * (MAX_DEPTH + 1))
    with pytest.raises(InferenceError, match="parentheses and 'not'"):
        parse_condition("not " * 200 + "a")
    parse_condition("a" * MAX_LENGTH)
    with pytest.raises(InferenceError, match=f"at most {MAX_LENGTH} characters, this one has {MAX_LENGTH + 1}"):
        parse_condition("a" * (MAX_LENGTH + 1))


@given(
    st.lists(st.sampled_from(["a", "`b c`", "not ", "(", ")", " and ", " or ", ">", "==", "1", "'t'", "é", ".", "["]))
)
def test_any_condition_text_is_read_or_refused(pieces):
    text = "".join(pieces)
    try:
        named = parse_condition(text).tensors
    except InferenceError as error:
        named, message = (), error.message
    else:
        message = "at character "
    assert message.startswith("at character ")
    assert all(name in text for name in named)
