"""Conditions of steps: the tensors that they name, their problems, and what the server is given."""

import pytest

from halimede_operator.core.spec.when import read_when, renamed


@pytest.mark.parametrize(
    ("text", "sources"),
    [
        ("lang.score > 0.5", ["lang.score"]),
        ("request.TEXT != '' and not parameters.fast", ["request.TEXT"]),
        ("my-step.out.shape[0] < 8 or (other.x.present)", ["my-step.out", "other.x"]),
        ("`request.odd name` == 'a.b'", ["request.odd name"]),
        ("a.shape == 1 and a.present.present", ["a.shape", "a.present"]),
        ("not not true", []),
        ("a.x == a.x", ["a.x", "a.x"]),
        ('parameters.`odd name` == "it\'s"', []),
    ],
)
def test_the_tensors_that_a_condition_names(text: str, sources: list[str]) -> None:
    references = read_when(text)
    assert not isinstance(references, str)
    assert [reference.tensor for reference in references] == sources


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "at character 1: the condition ends"),
        ("score > 0.5", "at character 7: '>' is not expected; allowed here: '.' and the tensor of 'score'"),
        ("a.x >", "at character 6: the condition ends"),
        ("a.x = 1", "at character 5: '= 1' may not be in a condition"),
        ("a.x b.y", "at character 5: 'b' is not expected; allowed here: and, or, or the end of the condition"),
        ("(a.x", "at character 5: the condition ends; allowed here: and, or, )"),
        ("a.x.size", "at character 5: 'size' is not expected; allowed here: 'present' or 'shape[<number>]'"),
        ("a.x.shape[-1]", "at character 11: '-1' is not expected; allowed here: the dimension's number, 0 or more"),
        ("a.`x y`", "at character 3: '`x y`' is not expected; allowed here: the tensor of 'a'"),
        ("parameters.a-b", "at character 12: 'a-b' is not expected; allowed here: the parameter's name, in backticks"),
        ("1e999 == 1", "at character 1: '1e999' is not expected; allowed here: a number in the range of a double"),
        (f"{'not ' * 17}a.x", "at character 69: 'a' is not expected; allowed here: at most 16 parentheses"),
        ("a" * 1025, "must have at most 1024 characters, got 1025"),
    ],
)
def test_what_is_wrong_with_a_condition(text: str, problem: str) -> None:
    message = read_when(text)
    assert isinstance(message, str)
    assert message.startswith(problem)


def test_the_server_is_given_its_own_names_in_backticks() -> None:
    names = {"request.TEXT": "TEXT", "my-step.out": "my-step.out", "pool.v": "VECTOR"}
    text = "request.TEXT != 'pool.v' and my-step.out.shape[0]>1 or `pool.v`.present"
    assert renamed(text, names) == "`TEXT` != 'pool.v' and `my-step.out`.shape[0]>1 or `VECTOR`.present"


def test_what_cannot_be_read_is_not_renamed() -> None:
    with pytest.raises(ValueError, match="at character 1"):
        renamed("and", {})
