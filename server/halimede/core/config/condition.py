"""Conditions on the steps of an ensemble: the language of `halimede_spec.condition`, with the server's error texts."""

from dataclasses import dataclass

from halimede.core.types.error import clip, invalid
from halimede_spec.condition import MAX_DEPTH, MAX_LENGTH, ConditionError, Dialect, Expression, Mistake, parse


@dataclass(frozen=True, slots=True)
class Condition:
    """`text` is the condition as configured, `tensors` are those that it names, each once."""

    text: str
    expression: Expression
    tensors: tuple[str, ...]


def parse_condition(text: str) -> Condition:
    """The condition. INVALID_ARG gives the position, in characters from 1, and what is allowed there."""
    try:
        parsed = parse(text, Dialect.SERVER)
    except ConditionError as error:
        raise invalid(_problem(error)) from None
    return Condition(text, parsed.expression, tuple(dict.fromkeys(each.tensor for each in parsed.references)))


def _problem(error: ConditionError) -> str:
    allowed = error.allowed
    match error.mistake:
        case Mistake.TOO_LONG:
            return f"a condition has at most {MAX_LENGTH} characters, this one has {len(error.text)}"
        case Mistake.UNREADABLE:
            what = f"'{clip(error.text)}' is not valid in a condition"
        case Mistake.UNEXPECTED:
            what = f"'{clip(error.text)}' is not expected"
        case Mistake.ENDS:
            what = "the condition ends"
        case Mistake.TOO_DEEP:
            what = f"more than {MAX_DEPTH} parentheses and 'not' within one another"
        case Mistake.TOO_LARGE:
            what, allowed = f"'{clip(error.text)}' is not a number in the range of a double", "a smaller number"
    return f"at character {error.at}: {what}; allowed here: {allowed}"
