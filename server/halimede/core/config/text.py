"""Parse protobuf text format (config.pbtxt) and JSON into one small tree of nodes. `yaml_text` does the same for YAML.

A node knows its position but not the schema. A scalar keeps its text, because the meaning of `1` or `inf` depends on
the field, and `core.config.read` decides it. A syntax error gives one Problem, and the nodes before the error. Lines
and columns count characters from 1.

Where the Python and the C++ parser of the text format differ, this parser follows the C++ one, because Triton uses it:
a sign may be separated from its number, `\\q` is not a valid escape, a comment may contain any bytes, and Python's
number syntax (`+1`, `1_000`, `0b11`) is invalid.
"""

import re
from dataclasses import dataclass
from enum import Enum

from halimede.core.types import Problem
from halimede.core.types.error import clip

MAX_DEPTH = 100
"""Maximum nesting of messages, objects and lists; the model configuration needs a tenth of that."""

MAX_TOKENS = 200_000
"""Maximum number of names, values and brackets of one text: parsed, 4 MiB of `1,` take a hundred times the memory."""


class ScalarKind(Enum):
    STRING = "string"
    NUMBER = "number"
    WORD = "word"
    PLAIN = "plain"
    """An unquoted YAML scalar: this parser does not resolve YAML's numbers and words."""


@dataclass(slots=True)
class Scalar:
    """`text` is the unescaped string, or the number or word as written, with its `-` if it has one.

    Each byte that is not UTF-8 becomes a lone surrogate in `text`.
    """

    kind: ScalarKind
    text: str
    line: int
    column: int


@dataclass(slots=True)
class ListNode:
    items: list["Node"]
    line: int
    column: int


@dataclass(slots=True)
class MessageNode:
    fields: list["FieldNode"]
    line: int
    column: int


@dataclass(slots=True)
class FieldNode:
    """The position is the name's. `colon` distinguishes `dims: []` from `dims []`, which only messages may use."""

    name: str
    value: "Node"
    line: int
    column: int
    colon: bool


Node = Scalar | ListNode | MessageNode


def parse_pbtxt(text: str | bytes) -> tuple[MessageNode, Problem | None]:
    """Parse a text-format message: its fields, and the syntax error at which parsing stopped, if any."""
    root = MessageNode([], 1, 1)
    tokens = _Tokens(_decode(text), _PBTXT)
    try:
        _pbtxt_fields(tokens, root, closer="", depth=0)
    except TextError as error:
        return root, error.problem
    return root, None


def parse_json(text: str | bytes) -> tuple[MessageNode, Problem | None]:
    """Parse a JSON object: its members, and the syntax error at which parsing stopped, if any."""
    root = MessageNode([], 1, 1)
    tokens = _Tokens(_decode(text), _JSON)
    try:
        if tokens.text != "{":
            raise tokens.expected("'{'")
        _json_contents(tokens, root, depth=1)
        if tokens.text:
            raise tokens.expected("the end of the text")
    except TextError as error:
        return root, error.problem
    return root, None


# Every character belongs to some group, so that matches follow each other without a gap. A number includes everything
# directly attached to it: `4name` is one invalid number. Possessive quantifiers keep a broken string linear.
_PBTXT = re.compile(
    r"""(?P<space>(?:[ \t\r\v\f\n]++|\#[^\n\0]*+)++)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*+)
    |(?P<number>\.?[0-9](?:[eE][+-]|[0-9A-Za-z_.])*+)
    |(?P<string>"[^"\\\n\0]*+(?:\\[^\n\0][^"\\\n\0]*+)*+"|'[^'\\\n\0]*+(?:\\[^\n\0][^'\\\n\0]*+)*+')
    |(?P<symbol>[][{}<>:,;-])
    |(?P<open>["'])
    |(?P<bad>.)
    |(?P<end>\Z)""",
    re.VERBOSE | re.DOTALL,
)
_JSON = re.compile(
    r"""(?P<space>[ \t\r\n]++)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*+)
    |(?P<number>[-+.]?[0-9][0-9A-Za-z_.+-]*+)
    |(?P<string>"[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+")
    |(?P<symbol>[][{}:,])
    |(?P<open>")
    |(?P<bad>.)
    |(?P<end>\Z)""",
    re.VERBOSE | re.DOTALL,
)
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
"""A JSON number; use it with fullmatch."""

# `pair` is a character above U+FFFF, escaped as two UTF-16 surrogates.
_PAIR = r"(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
_PBTXT_ESCAPE = re.compile(
    rf"""\\(?:(?P<char>[abfnrtv\\'"?])
    |(?P<octal>[0-7]{{1,3}})
    |[xX](?P<hex>[0-9a-fA-F]{{1,2}})
    |{_PAIR}
    |[uU](?P<code>(?<=u)[0-9a-fA-F]{{4}}|(?<=U)00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{{4}}))""",
    re.VERBOSE,
)
_JSON_ESCAPE = re.compile(rf"""\\(?:(?P<char>["\\/bfnrt])|{_PAIR}|u(?P<code>[0-9a-fA-F]{{4}}))""")
_CHARACTERS = {"a": b"\a", "b": b"\b", "f": b"\f", "n": b"\n", "r": b"\r", "t": b"\t", "v": b"\v"}


class TextError(Exception):
    """A syntax error, at which parsing stops."""

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.problem = Problem(message, line=line, column=column)


class _Tokens:
    """A cursor over the tokens: the text of the next token and its position. The end is a token with the text ""."""

    __slots__ = ("_left", "_line_start", "_matches", "column", "kind", "line", "text")

    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        self._matches = pattern.finditer(text)
        self._line_start = 0
        self._left = MAX_TOKENS
        self.kind = ""
        self.text = ""
        self.line = 1
        self.column = 1
        self.advance()

    def advance(self) -> None:
        """Move to the next token; at the end, stay there."""
        for match in self._matches:
            kind, text = match.lastgroup or "", match.group()
            if kind != "space":
                self.kind, self.text = kind, text
                self.column = match.start() - self._line_start + 1
                self._left -= 1
                if self._left < 0:
                    raise TextError(f"more than {MAX_TOKENS} names, values and brackets", self.line, self.column)
                return
            if newlines := text.count("\n"):
                self.line += newlines
                self._line_start = match.start() + text.rindex("\n") + 1

    def take(self, symbol: str) -> bool:
        """Skip `symbol` if it is next; return whether it was."""
        if self.text != symbol:
            return False
        self.advance()
        return True

    def take_string(self, escape: re.Pattern[str]) -> bytes:
        """Read the string that is next, and unescape it."""
        body, at, parts = self.text[1:-1], 0, []
        while (slash := body.find("\\", at)) >= 0:
            match = escape.match(body, slash)
            if match is None:
                what = f"'{printable(body[slash : slash + 2])}' is not a valid escape; a backslash is written '\\\\'"
                raise TextError(what, self.line, self.column + 1 + slash)
            parts.append(_encode(body[at:slash]))
            parts.append(_escaped(match))
            at = match.end()
        parts.append(_encode(body[at:]))
        self.advance()
        return b"".join(parts)

    def expected(self, what: str) -> TextError:
        """A syntax error: `what` was expected, but the next token is something else."""
        match self.kind:
            case "end":
                found = "the end of the text"
            case "open":
                found = f"a string that has no closing {self.text} on its line"
            case "string":
                found = f"the string {printable(self.text)}"
            case _:
                found = f"'{printable(self.text)}'"
        return TextError(f"expected {what}, found {found}", self.line, self.column)

    def check_depth(self, depth: int) -> None:
        """Raise a syntax error if the message or list that opens here is nested too deep."""
        if depth > MAX_DEPTH:
            raise TextError(f"nested more than {MAX_DEPTH} deep", self.line, self.column)


_CLOSER = {"{": "}", "<": ">"}


def _pbtxt_fields(tokens: _Tokens, message: MessageNode, closer: str, depth: int) -> None:
    """Read fields into `message` up to and including `closer`."""
    while tokens.text != closer:
        name, line, column = tokens.text, tokens.line, tokens.column
        if tokens.kind != "word":
            raise tokens.expected(f"a field name or '{closer}'" if closer else "a field name")
        tokens.advance()
        colon = tokens.take(":")
        if tokens.text == "[":
            items = ListNode([], tokens.line, tokens.column)
            message.fields.append(FieldNode(name, items, line, column, colon))
            _pbtxt_items(tokens, items, colon, depth + 1)
        elif tokens.text in _CLOSER:
            inner = MessageNode([], tokens.line, tokens.column)
            message.fields.append(FieldNode(name, inner, line, column, colon))
            _pbtxt_message(tokens, inner, depth + 1)
        elif colon:
            message.fields.append(FieldNode(name, _pbtxt_scalar(tokens), line, column, colon))
        else:
            raise tokens.expected("':' or '{'")
        if not tokens.take(","):
            tokens.take(";")
    tokens.advance()


def _pbtxt_message(tokens: _Tokens, message: MessageNode, depth: int) -> None:
    tokens.check_depth(depth)
    closer = _CLOSER[tokens.text]
    tokens.advance()
    _pbtxt_fields(tokens, message, closer, depth)


def _pbtxt_items(tokens: _Tokens, items: ListNode, colon: bool, depth: int) -> None:
    tokens.check_depth(depth)
    tokens.advance()
    if tokens.take("]"):
        return
    while True:
        if tokens.text in _CLOSER:
            inner = MessageNode([], tokens.line, tokens.column)
            items.items.append(inner)
            _pbtxt_message(tokens, inner, depth + 1)
        elif colon:
            items.items.append(_pbtxt_scalar(tokens))
        else:
            raise tokens.expected("'{' (a list of plain values needs a ':' before its '[')")
        if tokens.take("]"):
            return
        if not tokens.take(","):
            raise tokens.expected("',' or ']'")


def _pbtxt_scalar(tokens: _Tokens) -> Scalar:
    line, column = tokens.line, tokens.column
    if tokens.kind == "string":
        parts = []
        while tokens.kind == "string":
            parts.append(tokens.take_string(_PBTXT_ESCAPE))
        return Scalar(ScalarKind.STRING, _decode(b"".join(parts)), line, column)
    sign = "-" if tokens.take("-") else ""
    if tokens.kind not in ("number", "word"):
        raise tokens.expected("a value")
    scalar = Scalar(ScalarKind(tokens.kind), sign + tokens.text, line, column)
    tokens.advance()
    return scalar


def _json_contents(tokens: _Tokens, node: Node, depth: int) -> None:
    """Read the contents of `node`, from its opening bracket on; a scalar has none."""
    if isinstance(node, Scalar):
        return
    tokens.check_depth(depth)
    tokens.advance()
    closer = "]" if isinstance(node, ListNode) else "}"
    if tokens.take(closer):
        return
    while True:
        if isinstance(node, ListNode):
            value = _json_value(tokens)
            node.items.append(value)
        else:
            line, column = tokens.line, tokens.column
            if tokens.kind != "string":
                raise tokens.expected("a field name in double quotes")
            name = _decode(tokens.take_string(_JSON_ESCAPE))
            if not tokens.take(":"):
                raise tokens.expected("':'")
            value = _json_value(tokens)
            node.fields.append(FieldNode(name, value, line, column, colon=True))
        _json_contents(tokens, value, depth + 1)
        if tokens.take(closer):
            return
        if not tokens.take(","):
            raise tokens.expected(f"',' or '{closer}'")


def _json_value(tokens: _Tokens) -> Node:
    """Read a scalar; for an object or list, return an empty node and leave its bracket unread."""
    line, column = tokens.line, tokens.column
    if tokens.text == "{":
        return MessageNode([], line, column)
    if tokens.text == "[":
        return ListNode([], line, column)
    if tokens.kind == "string":
        return Scalar(ScalarKind.STRING, _decode(tokens.take_string(_JSON_ESCAPE)), line, column)
    is_number = tokens.kind == "number" and JSON_NUMBER.fullmatch(tokens.text)
    if not is_number and tokens.text not in ("true", "false", "null"):
        raise tokens.expected("a JSON value")
    scalar = Scalar(ScalarKind(tokens.kind), tokens.text, line, column)
    tokens.advance()
    return scalar


def _escaped(match: re.Match[str]) -> bytes:
    """The bytes that an escape stands for. Octal and hex name a byte, the others a character."""
    text = match[match.lastgroup or 0]
    match match.lastgroup:
        case "char":
            return _CHARACTERS.get(text) or text.encode()
        case "octal":
            return bytes([int(text, 8) & 0xFF])
        case "hex":
            return bytes([int(text, 16)])
        case "pair":
            high, low = int(text[1:5], 16), int(text[7:11], 16)
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)).encode()
        case _:
            return chr(int(text, 16)).encode("utf-8", "surrogatepass")


def _decode(text: str | bytes) -> str:
    """Decode UTF-8; each invalid byte becomes a lone surrogate, because comments may contain any bytes."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return raw.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def printable(text: str) -> str:
    """User-supplied text for an error message: clipped, on one line, with unprintable characters escaped."""
    decoded = _encode(clip(text)).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in decoded)
