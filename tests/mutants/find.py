"""Possible mutants of a source file: small faults, each in one line of one function or constant."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    COMPARISON = "comparison"
    CONSTANT = "constant"
    CONDITION = "negated condition"
    CALL = "dropped call"
    ARGUMENTS = "swapped arguments"
    GIVE_BACK = "dropped give-back"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`text` is a line of the function or module constant `symbol`, without its indentation, and is the `index`-th such
    line there. No numbers of lines: a mutant survives moves of code."""

    kind: Kind
    file: str
    symbol: str
    text: str
    index: int
    replacement: str

    @property
    def id(self) -> str:
        key = "\0".join((self.file, self.symbol, self.text, str(self.index), self.replacement))
        return hashlib.sha256(key.encode()).hexdigest()[:8]


GIVE_BACKS = frozenset(
    [
        "aclose",
        "cancel",
        "clear",
        "close",
        "decrement",
        "discard",
        "finish",
        "free",
        "give_back",
        "pop",
        "release",
        "remove",
        "shutdown",
        "stop",
        "unlink",
        "unmap",
        "unregister",
    ]
)
OPPOSITES: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
SYMMETRIC = frozenset({"gcd", "isclose", "max", "min", "samefile"})
"""Functions whose first two arguments can be swapped without effect. Only names are swapped: others differ in type."""

TEXTS = re.compile(r"\b_?(log|logger|logging|warn|warning|info|debug|echo|print|say)\b")
"""Calls that write for people: no test need hold their texts."""

FOR_PEOPLE = frozenset({"__repr__", "__str__", "__rich__"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find(file: str, source: str) -> Iterator[Mutant]:
    """All mutants of a file; `file` is its path from the root of the repository."""
    yield from _Finder(file, source).module(ast.parse(source))


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self._file = file
        self._lines = source.splitlines()

    def module(self, tree: ast.Module) -> Iterator[Mutant]:
        for statement in tree.body:
            match statement:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
                ) if name.isupper():
                    constants = [node for node in ast.walk(value) if isinstance(node, ast.Constant)]
                    if len(constants) == 1:
                        yield from self._constant(constants[0], [statement], name)
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from self._definition(statement, "")

    def _definition(self, node: ast.ClassDef | Function, outer: str) -> Iterator[Mutant]:
        symbol = f"{outer}{node.name}"
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.ClassDef | Function):
                    yield from self._definition(statement, f"{symbol}.")
        elif node.name not in FOR_PEOPLE and not _is_stub(node):
            for statement in node.body:
                yield from self._node(statement, node, symbol)

    def _node(self, node: ast.AST, function: Function, symbol: str) -> Iterator[Mutant]:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._definition(node, f"{symbol}.")
                return
            case ast.Raise() | ast.JoinedStr():
                return
            case ast.Call() if TEXTS.search(ast.unparse(node.func)):
                return
            case ast.AnnAssign():
                if node.value is not None:
                    yield from self._node(node.value, function, symbol)
                return
        yield from self._here(node, [function], symbol)
        for child in ast.iter_child_nodes(node):
            yield from self._node(child, function, symbol)

    def _here(self, node: ast.AST, scope: list[ast.stmt], symbol: str) -> Iterator[Mutant]:
        match node:
            case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
                name = ast.unparse(call.func).rpartition(".")[2]
                if not TEXTS.search(ast.unparse(call.func)):
                    kind = Kind.GIVE_BACK if name.lstrip("_") in GIVE_BACKS else Kind.CALL
                    yield from self._replaced(kind, node, node, "pass", scope, symbol)
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                if not isinstance(test, ast.Constant):
                    text = self._text(test)
                    yield from self._replaced(Kind.CONDITION, test, test, f"not ({text})", scope, symbol)
            case ast.Compare(ops=[operator], comparators=[right]):
                if (between := self._between(node.left, right)) is not None:
                    old, new = OPPOSITES[type(operator)]
                    changed = re.sub(rf"(?<![<>=!\w]){re.escape(old)}(?![=\w])", new, between, count=1)
                    text = f"{self._text(node.left)}{changed}{self._text(right)}"
                    yield from self._replaced(Kind.COMPARISON, node.left, right, text, scope, symbol)
            case ast.Call(args=[ast.Name() | ast.Attribute() as first, ast.Name() | ast.Attribute() as second, *_]):
                name = ast.unparse(node.func).rpartition(".")[2]
                if name not in SYMMETRIC and (between := self._between(first, second)):
                    text = f"{self._text(second)}{between}{self._text(first)}"
                    yield from self._replaced(Kind.ARGUMENTS, first, second, text, scope, symbol)
            case ast.Constant():
                yield from self._constant(node, scope, symbol, only_integers=True)

    def _constant(
        self, node: ast.Constant, scope: list[ast.stmt], symbol: str, only_integers: bool = False
    ) -> Iterator[Mutant]:
        if type(node.value) is int or (type(node.value) is float and not only_integers):
            for changed in (node.value + 1, node.value - 1):
                yield from self._replaced(Kind.CONSTANT, node, node, repr(changed), scope, symbol)

    def _replaced(
        self, kind: Kind, first: ast.AST, last: ast.AST, text: str, scope: list[ast.stmt], symbol: str
    ) -> Iterator[Mutant]:
        """The mutant whose line has `text` in place of the nodes from `first` to `last`; none if they are on more lines."""
        assert isinstance(first, ast.expr | ast.stmt)
        assert isinstance(last, ast.expr | ast.stmt)
        if first.lineno != last.end_lineno:
            return
        line = self._lines[first.lineno - 1]
        code = line.encode()
        changed = (code[: first.col_offset] + text.encode() + code[last.end_col_offset :]).decode()
        earlier = [
            number
            for statement in scope
            for number in range(statement.lineno, first.lineno)
            if self._lines[number - 1].strip() == line.strip()
        ]
        yield Mutant(kind, self._file, symbol, line.strip(), len(earlier), changed.strip())

    def _text(self, node: ast.expr) -> str:
        line = self._lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset].decode()

    def _between(self, left: ast.expr, right: ast.expr) -> str | None:
        """The text between two expressions of one line."""
        if left.lineno != right.end_lineno:
            return None
        return self._lines[left.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()


def _is_stub(function: Function) -> bool:
    """Whether it only declares, as those of protocols do."""
    last = function.body[-1]
    return isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant)
