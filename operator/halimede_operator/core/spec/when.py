"""Conditions of an ensemble's steps, `lang.score > 0.5 and not parameters.fast`.

The language is the server's (`halimede_spec.condition`); a tensor is written as everywhere in an ensemble,
`request.TENSOR` or `step.output`, in backticks if it is not made of words.
"""

from collections.abc import Mapping

from halimede_spec.condition import MAX_DEPTH, MAX_LENGTH, ConditionError, Dialect, Mistake, Reference, parse


def read_when(text: str) -> tuple[Reference, ...] | str:
    """The tensors that a condition names, in order; or a text that describes its mistake."""
    try:
        return parse(text, Dialect.OPERATOR).references
    except ConditionError as error:
        return _problem(error)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A valid condition with each `request.TENSOR` and `step.output` replaced by its name in `names`."""
    references = read_when(text)
    if isinstance(references, str):
        raise ValueError(references)
    pieces, at = [], 0
    for reference in references:
        pieces += [text[at : reference.start], f"`{names[reference.tensor]}`"]
        at = reference.end
    return "".join([*pieces, text[at:]])


def _problem(error: ConditionError) -> str:
    allowed = error.allowed
    match error.mistake:
        case Mistake.TOO_LONG:
            return f"must have at most {MAX_LENGTH} characters, got {len(error.text)}"
        case Mistake.UNREADABLE:
            return f"at character {error.at}: {error.text!r} may not be in a condition; allowed: {allowed}"
        case Mistake.TOO_DEEP:
            allowed = f"at most {MAX_DEPTH} parentheses and 'not' within one another"
        case _:
            pass
    what = f"{error.text[:40]!r} is not expected" if error.text else "the condition ends"
    return f"at character {error.at}: {what}; allowed here: {allowed}"
