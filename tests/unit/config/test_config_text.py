"""Both grammars give the same tree, with positions; a broken text gives one problem and the nodes before it."""

import sys

import pytest

from halimede.core.config.text import (
    FieldNode,
    ListNode,
    MessageNode,
    Scalar,
    ScalarKind,
    parse_json,
    parse_pbtxt,
)
from halimede.core.types import Problem


def test_a_text_format_message_becomes_nodes_with_places():
    root, problem = parse_pbtxt('a: 1 # one\nb { c: -2.5f; d: "x"\n}\n  e: [true, -inf]')
    assert problem is None
    assert root == message(
        FieldNode("a", number("1", 1, 4), 1, 1, colon=True),
        FieldNode(
            "b",
            message(
                FieldNode("c", number("-2.5f", 2, 8), 2, 5, colon=True),
                FieldNode("d", string("x", 2, 18), 2, 15, colon=True),
                at=(2, 3),
            ),
            2,
            1,
            colon=False,
        ),
        FieldNode("e", ListNode([word("true", 4, 7), word("-inf", 4, 13)], 4, 6), 4, 3, colon=True),
    )


def test_a_json_object_becomes_the_same_nodes():
    root, problem = parse_json('{"a": -1.5e3,\n "b": {"c": [null, "x"]}}')
    assert problem is None
    assert root == message(
        FieldNode("a", number("-1.5e3", 1, 7), 1, 2, colon=True),
        FieldNode(
            "b",
            message(
                FieldNode("c", ListNode([word("null", 2, 14), string("x", 2, 20)], 2, 13), 2, 8, colon=True), at=(2, 7)
            ),
            2,
            2,
            colon=True,
        ),
    )


@pytest.mark.parametrize(
    "text",
    [
        "a { b { c: 1 } }",
        "a: { b: { c: 1 } }",
        "a < b: < c: 1 > >",
        "a [ { b [ < c: 1 > ] } ]",
        "a: [ { b: { c: [ 1 ] } } ]",
        "a{b{c:1,};}",
    ],
)
def test_all_message_syntaxes_nest_alike(text):
    root, problem = parse_pbtxt(text)
    assert problem is None
    assert [path for path, _ in leaves(root)] == ["a.b.c"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (""" 'it' "'s" " one" """, "it's one"),
        (r'"\a\b\f\n\r\t\v\\\'\"\?"', "\a\b\f\n\r\t\v\\'\"?"),
        (r'"\101\60\x41\X4\x4142"', "A0A\x04A42"),
        (r'"\303\251" "\xc3" "\xA9"', "éé"),
        (r'"\u00e9\U0001F600\ud83d\ude00"', "é😀😀"),
        ('"é\t#{}"', "é\t#{}"),
        (r'"\400"', "\0"),
        # A byte that is no UTF-8 stays visible as a lone surrogate.
        (r'"\xff\ud83d"', "\udcff\udced\udca0\udcbd"),
    ],
)
def test_strings_of_the_text_format(written, value):
    root, problem = parse_pbtxt(f"a: {written}")
    assert (leaves(root), problem) == ([("a", value)], None)


def test_strings_of_json():
    root, problem = parse_json(r'{"\u0061": "\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00é", "b": "\ud83d"}')
    assert (leaves(root), problem) == ([("a", '"\\/\b\f\n\r\té😀é'), ("b", "\udced\udca0\udcbd")], None)


def test_bytes_that_are_not_utf8_may_stand_in_a_comment():
    root, problem = parse_pbtxt(b"# caf\xe9\na: 'caf\xe9'")
    assert (leaves(root), problem) == ([("a", "caf\udce9")], None)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("a: 1\nb 2", 2, 3, "expected ':' or '{', found '2'"),
        ("a: 1\n  : 2", 2, 3, "expected a field name, found ':'"),
        ("a: 1;;", 1, 6, "expected a field name, found ';'"),
        ("a:", 1, 3, "expected a value, found the end of the text"),
        ("a: -", 1, 5, "expected a value, found the end of the text"),
        ("a: +1", 1, 4, "expected a value, found '+'"),
        ("a: 'x\n'", 1, 4, "expected a value, found a string that has no closing ' on its line"),
        ('a: "x\0"', 1, 4, 'expected a value, found a string that has no closing " on its line'),
        ("a: 1 # \0", 1, 8, r"expected a field name, found '\x00'"),
        ("\ufeffa: 1", 1, 1, r"expected a field name, found '\ufeff'"),
        ("a: 1 // no comment", 1, 6, "expected a field name, found '/'"),
        ("a {\n b: 1", 2, 6, "expected a field name or '}', found the end of the text"),
        ("a < b: 1 }", 1, 10, "expected a field name or '>', found '}'"),
        ("a: 1 }", 1, 6, "expected a field name, found '}'"),
        ("a [1]", 1, 4, "expected '{' (a list of plain values needs a ':' before its '['), found '1'"),
        ("a: [1,]", 1, 7, "expected a value, found ']'"),
        ("a: [1 2]", 1, 7, "expected ',' or ']', found '2'"),
        ("a: [[1]]", 1, 5, "expected a value, found '['"),
        ("[a.b]: 1", 1, 1, "expected a field name, found '['"),
        ("1: 1", 1, 1, "expected a field name, found '1'"),
        ("é: 1", 1, 1, "expected a field name, found 'é'"),
        ('a: "é\\q"', 1, 6, r"'\q' is not a valid escape; a backslash is written '\\'"),
        (r'a: "\x"', 1, 5, r"'\x' is not a valid escape; a backslash is written '\\'"),
        (r'a: "\U00110000"', 1, 5, r"'\U' is not a valid escape; a backslash is written '\\'"),
    ],
)
def test_broken_text_format_reports_what_was_expected_and_where(text, line, column, message):
    _, problem = parse_pbtxt(text)
    assert problem == Problem(message, line=line, column=column)


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "expected '{', found the end of the text"),
        ("[]", 1, 1, "expected '{', found '['"),
        ('{"a": 1} x', 1, 10, "expected the end of the text, found 'x'"),
        ('{"a": 1,}', 1, 9, "expected a field name in double quotes, found '}'"),
        ('{"a": [1,]}', 1, 10, "expected a JSON value, found ']'"),
        ("{a: 1}", 1, 2, "expected a field name in double quotes, found 'a'"),
        ('{"a" 1}', 1, 6, "expected ':', found '1'"),
        ('{"a": 1 "b": 2}', 1, 9, "expected ',' or '}', found the string \"b\""),
        ('{"a":\n NaN}', 2, 2, "expected a JSON value, found 'NaN'"),
        ('{"a": -Infinity}', 1, 7, "expected a JSON value, found '-'"),
        ('{"a": 01}', 1, 7, "expected a JSON value, found '01'"),
        ('{"a": 1.}', 1, 7, "expected a JSON value, found '1.'"),
        ('{"a": +1}', 1, 7, "expected a JSON value, found '+1'"),
        ('{"a": True}', 1, 7, "expected a JSON value, found 'True'"),
        ("{'a': 1}", 1, 2, "expected a field name in double quotes, found '''"),
        ('{"a": "x\ty"}', 1, 7, 'expected a JSON value, found a string that has no closing " on its line'),
        (r'{"a": "\x41"}', 1, 8, r"'\x' is not a valid escape; a backslash is written '\\'"),
        ("{} # comment", 1, 4, "expected the end of the text, found '#'"),
    ],
)
def test_broken_json_reports_what_was_expected_and_where(text, line, column, message):
    _, problem = parse_json(text)
    assert problem == Problem(message, line=line, column=column)


def test_nodes_before_the_error_are_kept():
    assert leaves(parse_pbtxt("a: 1 b { c: [2, 3] d: 'x' } e { f: 4 g: ")[0]) == [
        ("a", "1"),
        ("b.c", "2"),
        ("b.c", "3"),
        ("b.d", "x"),
        ("e.f", "4"),
    ]
    assert leaves(parse_json('{"a": 1, "b": {"c": [2, 3, {"d": 4')[0]) == [
        ("a", "1"),
        ("b.c", "2"),
        ("b.c", "3"),
        ("b.c.d", "4"),
    ]


@pytest.mark.parametrize("opening", ["a {", "a: <", "a [{", "a: [ <"])
def test_nesting_of_the_text_format_is_bounded(opening):
    _, problem = parse_pbtxt(opening * 100_000)
    assert problem is not None
    assert problem.message == "nested more than 100 deep"


@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, '{"a":[' * 100_000, '{"a":' + "[" * 100_000], ids=["objects", "both", "lists"]
)
def test_nesting_of_json_is_bounded(text):
    _, problem = parse_json(text)
    assert problem is not None
    assert problem.message == "nested more than 100 deep"


def test_a_hundred_levels_are_read_with_room_on_the_stack():
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(stack_depth() + 350)
    try:
        text_problem = parse_pbtxt("a {" * 100 + "}" * 100)[1]
        json_problem = parse_json('{"a":' * 100 + "1" + "}" * 100)[1]
    finally:
        sys.setrecursionlimit(limit)
    assert (text_problem, json_problem) == (None, None)


@pytest.mark.parametrize(
    "text",
    ['a: "' + "\\n" * 300_000, "a: '" + "x" * 600_000, "a: " + "9" * 600_000, "#" * 600_000],
    ids=["escapes", "string", "number", "comment"],
)
def test_long_tokens_take_linear_time(text):
    # Quadratic time would be minutes, and end in the timeout.
    root, _ = parse_pbtxt(text)
    assert len(root.fields) <= 1


@pytest.mark.parametrize(("parse", "text"), [(parse_pbtxt, "a: [%s1]"), (parse_json, '{"a": [%s1]}')])
def test_a_text_of_very_many_values_ends_with_a_problem(parse, text):
    root, problem = parse(text % ("1," * 150_000))
    assert str(problem).endswith("more than 200000 names, values and brackets")
    # A comma counts as a value does.
    assert len(root.fields[0].value.items) == 99_998


def message(*fields, at=(1, 1)):
    return MessageNode(list(fields), *at)


def number(text, line, column):
    return Scalar(ScalarKind.NUMBER, text, line, column)


def word(text, line, column):
    return Scalar(ScalarKind.WORD, text, line, column)


def string(text, line, column):
    return Scalar(ScalarKind.STRING, text, line, column)


def leaves(node, path=""):
    """Path and text of every scalar."""
    match node:
        case MessageNode():
            return [leaf for f in node.fields for leaf in leaves(f.value, f"{path}.{f.name}" if path else f.name)]
        case ListNode():
            return [leaf for item in node.items for leaf in leaves(item, path)]
    return [(path, node.text)]


def stack_depth():
    frame, depth = sys._getframe(), 0
    while frame:
        frame, depth = frame.f_back, depth + 1
    return depth
