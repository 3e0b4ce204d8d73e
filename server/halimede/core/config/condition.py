"""Conditions on the steps of an ensemble, as text: `when: "score > 0.5 and not parameters.lang == 'de'"`.

    condition  := and ("or" and)*
    and        := not ("and" not)*
    not        := "not" not | "(" condition ")" | operand | operand ("==" | "!=" | "<" | "<=" | ">" | ">=") operand
    operand    := name | name ".present" | name ".shape[" number "]" | "parameters." name | literal
    name       := letters, digits and "_", or anything else within backticks
    literal    := number, 'text', "text", true, false

A name is that of one of the ensemble's tensors and stands for its first element. There is nothing else: no arithmetic
and no calls, so that a condition costs next to nothing and can do no harm.
"""

import math
import re
from dataclasses import dataclass

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

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


@dataclass(frozen=True, slots=True)
class Condition:
    """`text` is what the configuration says, `tensors` are those that it names, each once."""

    text: str
    expression: Expression
    tensors: tuple[str, ...]


def parse_condition(text: str) -> Condition:
    """The condition, or INVALID_ARG with the place, counted in characters from 1, and what may stand there."""
    if len(text) > MAX_LENGTH:
        raise InferenceError(
            ErrorCode.INVALID_ARG, f"a condition has at most {MAX_LENGTH} characters, this one has {len(text)}"
        )
    parser = _Parser(_tokens(text))
    expression = parser.condition(0)
    parser.end()
    return Condition(text, expression, tuple(dict.fromkeys(parser.tensors)))


@dataclass(frozen=True, slots=True)
class _Token:
    """`kind` is a group of `_TOKEN`, or "end"; `at` counts characters from 1."""

    kind: str
    text: str
    at: int


_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<text>'(?:[^'\\]|\\['"\\])*'|"(?:[^"\\]|\\['"\\])*")
      | (?P<quoted>`[^`]+`)
      | (?P<name>[A-Za-z_][A-Za-z_0-9]*)
      | (?P<sign>==|!=|<=|>=|<|>)
      | (?P<mark>[().\[\]])""",
    re.VERBOSE | re.ASCII,
)
_ESCAPED = re.compile(r"\\(.)")
_TRUTH = {"true": True, "false": False, "True": True, "False": False}
_RESERVED = ("and", "or", "not", "parameters")
_OPERANDS = (
    "a tensor's name (in backticks where it is not a word), <tensor>.present, <tensor>.shape[<number>], "
    "parameters.<name>, a number, a text in quotes, true or false"
)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _problem(at + 1, f"'{clip(text[at : at + 20])}' is nothing that a condition may have", _OPERANDS)
        if match.lastgroup is not None and match.lastgroup != "space":
            tokens.append(_Token(match.lastgroup, match[0], at + 1))
        at = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


def _problem(at: int, what: str, allowed: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, f"at character {at}: {what}; allowed here: {allowed}")


class _Parser:
    """Recursive descent, one method per line of the grammar; `tensors` are the names met so far."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._next = 0
        self.tensors: list[str] = []

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
            raise _problem(self._token.at, f"more than {MAX_DEPTH} parentheses and 'not' within one another", _OPERANDS)
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
                self._advance()
                return Literal(_number(token))
            case "text":
                self._advance()
                return Literal(_ESCAPED.sub(r"\1", token.text[1:-1]))
            case "name" if token.text in _TRUTH:
                self._advance()
                return Literal(_TRUTH[token.text])
            case "name" if token.text == "parameters":
                self._advance()
                self._expect("mark", ".", "'.' and the parameter's name")
                return Parameter(self._name("the parameter's name"))
            case "quoted":
                return self._of_tensor(self._name(_OPERANDS))
            case "name" if token.text not in _RESERVED:
                return self._of_tensor(self._name(_OPERANDS))
        raise self._unexpected(_OPERANDS)

    def _of_tensor(self, tensor: str) -> Operand:
        self.tensors.append(tensor)
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

    def _name(self, allowed: str) -> str:
        token = self._token
        if token.kind == "quoted":
            return self._advance().text[1:-1]
        if token.kind == "name":
            return self._advance().text
        raise self._unexpected(allowed)

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

    def _unexpected(self, allowed: str) -> InferenceError:
        token = self._token
        what = "the condition ends" if token.kind == "end" else f"'{clip(token.text)}' is not expected"
        return _problem(token.at, what, allowed)


def _number(token: _Token) -> int | float:
    text = token.text
    if text.lstrip("-").isdigit():
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise _problem(token.at, f"'{clip(text)}' is no number that a double can hold", "a smaller number")
    return number
