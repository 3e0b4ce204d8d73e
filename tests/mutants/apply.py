"""Finds the line of a mutant again, also after moves of code, and the positions where a mutant has effect."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mutants.find import Function, Mutant

Sources = Mapping[str, str]
"""Texts of files, by path."""


@dataclass(frozen=True, slots=True)
class Position:
    file: str
    line: int
    """From 0."""


def locate(mutant: Mutant, sources: Sources) -> Position | None:
    """Its line: in its symbol; or in a symbol of the same last name, or anywhere, if only one such line exists."""
    if mutant.file in sources:
        lines = [line for line in _lines_of(mutant.symbol, sources[mutant.file]) if line[1] == mutant.text]
        if mutant.index < len(lines):
            return Position(mutant.file, lines[mutant.index][0])
    last = mutant.symbol.rpartition(".")[2]
    same_name, anywhere = [], []
    for file, source in sources.items():
        if mutant.text in source:
            same_name += [
                Position(file, line) for line, text in _lines_of(last, source, ends=True) if text == mutant.text
            ]
            numbered = enumerate(source.splitlines())
            anywhere += [Position(file, line) for line, text in numbered if text.strip() == mutant.text]
    for found in (same_name, anywhere):
        if len(found) == 1:
            return found[0]
    return None


def apply(mutant: Mutant, source: str, line: int) -> str:
    lines = source.splitlines(keepends=True)
    lines[line] = lines[line].replace(mutant.text, mutant.replacement)
    return "".join(lines)


def _lines_of(symbol: str, source: str, ends: bool = False) -> list[tuple[int, str]]:
    """Numbers and stripped texts of the lines of a symbol, or of all whose qualified name ends with it."""
    lines = source.splitlines()
    return [
        (line - 1, lines[line - 1].strip())
        for name, statement in _symbols(ast.parse(source).body, "")
        if name == symbol or (ends and name.rpartition(".")[2] == symbol)
        for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    ]


def _symbols(body: list[ast.stmt], outer: str) -> Iterator[tuple[str, ast.stmt]]:
    for statement in body:
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield f"{outer}{statement.name}", statement
                yield from _symbols(statement.body, f"{outer}{statement.name}.")
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{outer}{name}", statement
            case _:
                for block in ("body", "orelse", "finalbody"):
                    yield from _symbols(getattr(statement, block, []), outer)
                for handler in getattr(statement, "handlers", []):
                    yield from _symbols(handler.body, outer)


def effects(mutant: Mutant, position: Position, sources: Sources) -> list[Position]:
    """Lines that run when the mutant has an effect: its own, or those that use the constant.

    A use outside of functions, such as a default value, stands for all functions of its file.
    """
    if not mutant.symbol.isupper():
        return [position]
    module = module_of(position.file)
    found: list[Position] = []
    for file, source in sources.items():
        if mutant.symbol in source:
            tree = ast.parse(source)
            local = mutant.symbol if file == position.file else _imported_as(tree, module, mutant.symbol)
            uses = [node.lineno for node in ast.walk(tree) if _is_use(node, local, mutant.symbol)]
            inside = [line for line in uses if _is_in_function(tree, line)]
            if len(inside) < len(uses):
                inside = [node.body[0].lineno for node in ast.walk(tree) if isinstance(node, Function)]
            found += [Position(file, line - 1) for line in inside]
    return found


def _is_use(node: ast.AST, local: str | None, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == local and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr == name


def _is_in_function(tree: ast.Module, line: int) -> bool:
    return any(
        isinstance(node, Function) and node.body[0].lineno <= line <= (node.end_lineno or 0) for node in ast.walk(tree)
    )


def _imported_as(tree: ast.Module, module: str, name: str) -> str | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == module:
            for alias in node.names:
                if alias.name == name:
                    return alias.asname or name
    return None


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").partition("/")[2].replace("/", ".")


def mark(source: str, marks: list[tuple[int, str]], helper: str) -> str:
    """The source with a call `_mutant_reached(name)` before the statement of each line, and `helper`, which defines it."""
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    calls = [(*_statement_before(tree, lines, line + 1), f"_mutant_reached({name!r})\n") for line, name in marks]
    for number, indentation, call in sorted(calls, reverse=True):
        lines.insert(number - 1, " " * indentation + call)
    lines.insert(_first_statement(tree) - 1, helper)
    return "".join(lines)


def _statement_before(tree: ast.Module, lines: list[str], line: int) -> tuple[int, int]:
    """Line and indentation of the innermost statement with the line; a line of a function's head stands for its body."""
    chosen: ast.stmt | None = None
    for node in ast.walk(tree):
        # Breadth first, so that inner statements come later. A call cannot be put before `elif`.
        has_line = isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        if has_line and not lines[node.lineno - 1].lstrip().startswith("elif "):
            chosen = node
    assert chosen is not None
    if isinstance(chosen, Function):
        has_docstring = ast.get_docstring(chosen) is not None and len(chosen.body) > 1
        chosen = chosen.body[1 if has_docstring else 0]
    decorators = getattr(chosen, "decorator_list", [])
    return min([chosen.lineno, *(each.lineno for each in decorators)]), chosen.col_offset


def _first_statement(tree: ast.Module) -> int:
    """The first line of code after the docstring and imports from `__future__`."""
    for statement in tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_text and not is_future:
            decorators = getattr(statement, "decorator_list", [])
            return min([statement.lineno, *(each.lineno for each in decorators)])
    return len(tree.body) + 1
