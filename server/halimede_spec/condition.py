"""Conditions on the steps of an ensemble, as text: `when: "score > 0.5 and not parameters.lang == 'de'"`.

    condition  := and ("or" and)*
    and        := not ("and" not)*
    not        := "not" not | "(" condition ")" | operand | operand ("==" | "!=" | "<" | "<=" | ">" | ">=") operand
    operand    := tensor | tensor ".present" | tensor ".shape[" number "]" | "parameters." name | literal
    name       := letters, digits and "_", or anything else within backticks
    literal    := number, 'text', "text", true, false

A tensor is a name in a model configuration (`Dialect.SERVER`) and `request.TENSOR` or `step.output` in a ModelEnsemble
(`Dialect.OPERATOR`); both may be in backticks. It means its first element. The language has no
arithmetic and no calls, so conditions are cheap and safe.
"""

import math
import re
from dataclasses import dataclass
from enum import Enum

MAX_LENGTH = 1024
"""Characters of one condition."""

MAX_DEPTH = 16
"""Parentheses and `not` within one another."""


@dataclass(frozen=True, slots=True)
class Literal:
    value: bool | int | float | str


@dataclass(frozen=True, slots=True)
class Element:
    """The first element of a tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Dimension:
    tensor: str
    index: int


@dataclass(frozen=True, slots=True)
class Present:
    tensor: str


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the request."""

    key: str


Operand = Literal | Element | Dimension | Present | Parameter


@dataclass(frozen=True, slots=True)
class Comparison:
    """`sign` is one of ==, !=, <, <=, >, >=."""

    sign: str
    left: Operand
    right: Operand


@dataclass(frozen=True, slots=True)
class Truth:
    """An operand that is true or false by itself."""

    operand: Operand


@dataclass(frozen=True, slots=True)
class Not:
    inner: "Expression"


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: "tuple[Expression, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: "tuple[Expression, ...]"


Expression = Comparison | Truth | Not | AllOf | AnyOf


class Dialect(Enum):
    """How tensors are named, and the text of a message about the operands that are allowed."""

    SERVER = (
        "a tensor's name (in backticks if it is not a word), <tensor>.present, <tensor>.shape[<number>], "
        "parameters.<name>, a number, a text in quotes, true or false"
    )
    OPERATOR = (
        "request.<tensor> or <step>.<output>, by itself or with .present or .shape[<number>]; parameters.<name>; a "
        "number; a text in quotes; true or false"
    )

    @property
    def operands(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor that a condition names, and its place in the text: from character `start` up to `end`."""

    tensor: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """`references` are in the order of the text."""

    expression: Expression
    references: tuple[Reference, ...]


class Mistake(Enum):
    TOO_LONG = "too long"
    UNREADABLE = "unreadable"
    UNEXPECTED = "unexpected"
    ENDS = "ends"
    TOO_DEEP = "too deep"
    TOO_LARGE = "too large"


class ConditionError(ValueError):
    """The text is not a condition. `at` counts characters from 1, `text` is the text there."""

    def __init__(self, mistake: Mistake, at: int, text: str, allowed: str) -> None:
        super().__init__(f"at character {at}: {mistake.value}; allowed here: {allowed}")
        self.mistake = mistake
        self.at = at
        self.text = text
        self.allowed = allowed


def parse(text: str, dialect: Dialect) -> Parsed:
    """The condition; ConditionError for an invalid one."""
    if len(text) > MAX_LENGTH:
        raise ConditionError(Mistake.TOO_LONG, 1, text, f"at most {MAX_LENGTH} characters")
    parser = _Parser(_tokens(text, dialect), dialect)
    expression = parser.condition(0)
    parser.end()
    return Parsed(expression, tuple(parser.references))


@dataclass(frozen=True, slots=True)
class _Token:
    """`kind` is a group of `_TOKENS`, or "end"; `start` counts characters from 0."""

    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def _token_pattern(word: str) -> re.Pattern[str]:
    return re.compile(
        rf"""(?P<space>\s+)
          | (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
          | (?P<text>'(?:[^'\\]|\\['"\\])*'|"(?:[^"\\]|\\['"\\])*")
          | (?P<quoted>`[^`]+`)
          | (?P<name>{word})
          | (?P<sign>==|!=|<=|>=|<|>)
          | (?P<mark>[().\[\]])""",
        re.VERBOSE | re.ASCII,
    )


# Names of steps may have hyphens.
_TOKENS = {
    Dialect.SERVER: _token_pattern(r"[A-Za-z_][A-Za-z_0-9]*"),
    Dialect.OPERATOR: _token_pattern(r"[A-Za-z_][A-Za-z0-9_]*(?:-+[A-Za-z0-9_]+)*"),
}
_ESCAPED = re.compile(r"\\(.)")
_TRUTH = {"true": True, "false": False, "True": True, "False": False}
_RESERVED = ("and", "or", "not", "parameters")
_PARAMETER = "the parameter's name"


def _tokens(text: str, dialect: Dialect) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKENS[dialect].match(text, at)
        if match is None or match.lastgroup is None:
            raise ConditionError(Mistake.UNREADABLE, at + 1, text[at : at + 20], dialect.operands)
        if match.lastgroup != "space":
            tokens.append(_Token(match.lastgroup, match[0], at))
        at = match.end()
    return [*tokens, _Token("end", "", len(text))]


class _Parser:
    """Recursive descent, one method per line of the grammar; `references` are the tensors met so far."""

    def __init__(self, tokens: list[_Token], dialect: Dialect) -> None:
        self._tokens = tokens
        self._dialect = dialect
        self._next = 0
        self.references: list[Reference] = []

    def condition(self, depth: int) -> Expression:
        parts = [self._and(depth)]
        while self._take("name", "or"):
            parts.append(self._and(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def end(self) -> None:
        if self._token.kind != "end":
            raise self._unexpected("and, or, or the end of the condition")

    def _and(self, depth: int) -> Expression:
        parts = [self._not(depth)]
        while self._take("name", "and"):
            parts.append(self._not(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _not(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise self._mistake(Mistake.TOO_DEEP, self._dialect.operands)
        if self._take("name", "not"):
            return Not(self._not(depth + 1))
        if self._take("mark", "("):
            inner = self.condition(depth + 1)
            self._expect("mark", ")", "and, or, )")
            return inner
        left = self._operand()
        if self._token.kind != "sign":
            return Truth(left)
        sign = self._advance().text
        return Comparison(sign, left, self._operand())

    def _operand(self) -> Operand:
        token = self._token
        match token.kind:
            case "number":
                number = _number(token.text)
                if isinstance(number, float) and not math.isfinite(number):
                    raise self._mistake(Mistake.TOO_LARGE, "a number in the range of a double")
                self._advance()
                return Literal(number)
            case "text":
                self._advance()
                return Literal(_ESCAPED.sub(r"\1", token.text[1:-1]))
            case "name" if token.text in _TRUTH:
                self._advance()
                return Literal(_TRUTH[token.text])
            case "name" if token.text == "parameters":
                self._advance()
                return self._parameter()
            case "quoted":
                self._advance()
                return self._of_tensor(Reference(token.text[1:-1], token.start, token.end))
            case "name" if token.text not in _RESERVED:
                self._advance()
                return self._of_tensor(self._reference(token))
        raise self._unexpected(self._dialect.operands)

    def _parameter(self) -> Parameter:
        self._expect("mark", ".", f"'.' and {_PARAMETER}")
        token = self._token
        if token.kind == "quoted":
            return Parameter(self._advance().text[1:-1])
        if token.kind != "name":
            raise self._unexpected(_PARAMETER)
        if "-" in token.text:
            raise self._unexpected(f"{_PARAMETER}, in backticks if it is not a word")
        return Parameter(self._advance().text)

    def _reference(self, first: _Token) -> Reference:
        if self._dialect is Dialect.SERVER:
            return Reference(first.text, first.start, first.end)
        self._expect("mark", ".", f"'.' and the tensor of '{first.text}'")
        second = self._token
        if second.kind != "name":
            raise self._unexpected(f"the tensor of '{first.text}'")
        self._advance()
        return Reference(f"{first.text}.{second.text}", first.start, second.end)

    def _of_tensor(self, reference: Reference) -> Operand:
        self.references.append(reference)
        tensor = reference.tensor
        if not self._take("mark", "."):
            return Element(tensor)
        if self._take("name", "present"):
            return Present(tensor)
        self._expect("name", "shape", "'present' or 'shape[<number>]'")
        self._expect("mark", "[", "'[' and the dimension's number")
        token = self._token
        if token.kind != "number" or not token.text.isdigit():
            raise self._unexpected("the dimension's number, 0 or more")
        self._advance()
        self._expect("mark", "]", "']'")
        return Dimension(tensor, int(token.text))

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _advance(self) -> _Token:
        token = self._tokens[self._next]
        self._next += 1
        return token

    def _take(self, kind: str, text: str) -> bool:
        if (self._token.kind, self._token.text) != (kind, text):
            return False
        self._next += 1
        return True

    def _expect(self, kind: str, text: str, allowed: str) -> None:
        if not self._take(kind, text):
            raise self._unexpected(allowed)

    def _unexpected(self, allowed: str) -> ConditionError:
        return self._mistake(Mistake.ENDS if self._token.kind == "end" else Mistake.UNEXPECTED, allowed)

    def _mistake(self, mistake: Mistake, allowed: str) -> ConditionError:
        return ConditionError(mistake, self._token.start + 1, self._token.text, allowed)


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
