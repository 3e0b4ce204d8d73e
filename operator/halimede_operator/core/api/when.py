"""Conditions of an ensemble's steps, `lang.score > 0.5 and not parameters.fast`.

The language is the server's (its documentation's page on ensembles); a tensor is written as everywhere in an ensemble,
`request.TENSOR` or `step.output`, in backticks where it is not made of words.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_LENGTH = 1024
"""Characters of one condition."""

MAX_DEPTH = 16
"""Parentheses and `not` within one another."""

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<text>'(?:[^'\\]|\\['"\\])*'|"(?:[^"\\]|\\['"\\])*")
      | (?P<quoted>`[^`]+`)
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*(?:-+[A-Za-z0-9_]+)*)
      | (?P<sign>==|!=|<=|>=|<|>)
      | (?P<mark>[().\[\]])""",
    re.VERBOSE | re.ASCII,
)
_TRUTH = ("true", "false", "True", "False")
_RESERVED = ("and", "or", "not", "parameters", *_TRUTH)
_OPERANDS = (
    "request.<tensor> or <step>.<output>, by itself or with .present or .shape[<number>]; parameters.<name>; a number; "
    "a text in quotes; true or false"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """A tensor's name in a condition, and its place in the text."""

    source: str
    start: int
    end: int


def read_when(text: str) -> tuple[Reference, ...] | str:
    """The tensors that a condition names, in order; or what is wrong with it."""
    if len(text) > MAX_LENGTH:
        return f"must have at most {MAX_LENGTH} characters, got {len(text)}"
    try:
        parser = _Parser(_tokens(text))
        parser.whole()
    except _Unreadable as problem:
        return str(problem)
    return tuple(parser.references)


def renamed(text: str, names: Mapping[str, str]) -> str:
    """A readable condition as the server takes it: each `request.TENSOR` and `step.output` by the name given for it."""
    references = read_when(text)
    if isinstance(references, str):
        raise ValueError(references)
    pieces, at = [], 0
    for reference in references:
        pieces += [text[at : reference.start], f"`{names[reference.source]}`"]
        at = reference.end
    return "".join([*pieces, text[at:]])


class _Unreadable(Exception):
    """The text is no condition; the message says where and what may stand there."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise _Unreadable(
                f"at character {at + 1}: {text[at : at + 20]!r} may not be in a condition; allowed: {_OPERANDS}"
            )
        if match.lastgroup != "space":
            tokens.append(_Token(match.lastgroup, match[0], at))
        at = match.end()
    return [*tokens, _Token("end", "", len(text))]


@dataclass(slots=True)
class _Parser:
    """Recursive descent; `references` are the tensors met so far."""

    tokens: list[_Token]
    at: int = 0
    references: list[Reference] = field(default_factory=list)

    def whole(self) -> None:
        self._any_of(0)
        if self._token.kind != "end":
            raise self._unexpected("and, or, or the end of the condition")

    def _any_of(self, depth: int) -> None:
        self._negation(depth)
        while self._take("word", "and") or self._take("word", "or"):
            self._negation(depth)

    def _negation(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._unexpected(f"at most {MAX_DEPTH} parentheses and 'not' within one another")
        if self._take("word", "not"):
            self._negation(depth + 1)
        elif self._take("mark", "("):
            self._any_of(depth + 1)
            self._expect("mark", ")", "and, or, )")
        else:
            self._operand()
            if self._token.kind == "sign":
                self.at += 1
                self._operand()

    def _operand(self) -> None:
        token = self._token
        if token.kind == "number":
            if not math.isfinite(float(token.text)):
                raise self._unexpected("a number that a double can hold")
            self.at += 1
        elif token.kind == "text" or (token.kind == "word" and token.text in _TRUTH):
            self.at += 1
        elif self._take("word", "parameters"):
            self._expect("mark", ".", "'.' and the parameter's name")
            if self._token.kind == "word" and "-" in self._token.text:
                raise self._unexpected("the parameter's name, in backticks where it is not a word")
            if self._token.kind not in ("word", "quoted"):
                raise self._unexpected("the parameter's name")
            self.at += 1
        elif token.kind == "quoted":
            self.at += 1
            self._tensor(Reference(token.text[1:-1], token.start, token.end))
        elif token.kind == "word" and token.text not in _RESERVED:
            self.at += 1
            self._expect("mark", ".", f"'.' and the tensor of '{token.text}'")
            name = self._token
            if name.kind != "word":
                raise self._unexpected(f"the tensor of '{token.text}'")
            self.at += 1
            self._tensor(Reference(f"{token.text}.{name.text}", token.start, name.end))
        else:
            raise self._unexpected(_OPERANDS)

    def _tensor(self, reference: Reference) -> None:
        self.references.append(reference)
        if not self._take("mark", ".") or self._take("word", "present"):
            return
        self._expect("word", "shape", "'present' or 'shape[<number>]'")
        self._expect("mark", "[", "'[' and the dimension's number")
        if self._token.kind != "number" or not self._token.text.isdigit():
            raise self._unexpected("the dimension's number, 0 or more")
        self.at += 1
        self._expect("mark", "]", "']'")

    @property
    def _token(self) -> _Token:
        return self.tokens[self.at]

    def _take(self, kind: str, text: str) -> bool:
        if (self._token.kind, self._token.text) != (kind, text):
            return False
        self.at += 1
        return True

    def _expect(self, kind: str, text: str, allowed: str) -> None:
        if not self._take(kind, text):
            raise self._unexpected(allowed)

    def _unexpected(self, allowed: str) -> _Unreadable:
        token = self._token
        what = "the condition ends" if token.kind == "end" else f"{token.text[:40]!r} is not expected"
        return _Unreadable(f"at character {token.start + 1}: {what}; allowed here: {allowed}")
