"""The labels of an expression's result in PromQL, by those of its series: a checker of names and labels without data.

It knows the part of the language that the project's expressions use, and reports what gives no result although Prometheus
accepts it: a series that nobody has, a label that a series lacks, two sides that have no labels in common to be matched by.
All operators have the same precedence here, because the labels do not depend on it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Found = frozenset[str] | str
"""The labels of a vector; or a number or a text, as it is written."""

AGGREGATIONS = frozenset({"sum", "min", "max", "avg", "count", "topk", "bottomk"})
SAME_LABELS = frozenset({"rate", "increase", "deriv", "last_over_time", "clamp_min", "clamp_max"})
SETS = frozenset({"and", "or", "unless"})
TOKEN = re.compile(
    r"""\s*(?:
    (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<range>\[[^\]]*\])
    | (?P<number>[+-]?Inf\b|NaN\b|\d[\w.]*)
    | (?P<word>[a-zA-Z_:][\w:]*)
    | (?P<operator>==|!=|>=|<=|=~|!~|[-+*/%^<>=(){},])
    )""",
    re.VERBOSE,
)
OPERATORS = frozenset({"==", "!=", ">=", "<=", "+", "-", "*", "/", "%", "^", "<", ">"})


class Wrong(AssertionError):
    """An expression that cannot be read, or that has no result."""


def labels_of(expression: str, series: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """series: the labels of each name. Raises Wrong."""
    reader = _Reader(list(_tokens(expression)), series)
    try:
        found = _vector(reader.expression())
        if reader.tokens:
            raise Wrong(f"{reader.tokens[0]!r} is left")
    except Wrong as wrong:
        raise Wrong(f"{wrong}: {expression}") from None
    return found


def _tokens(expression: str) -> Iterator[str]:
    position, text = 0, expression.rstrip()
    while position < len(text):
        token = TOKEN.match(text, position)
        if token is None:
            raise Wrong(f"{text[position:][:20]!r} is not understood: {expression}")
        position = token.end()
        if token["range"] is None:
            yield token[0].strip()


@dataclass
class _Reader:
    tokens: list[str]
    """Those that follow."""
    series: Mapping[str, frozenset[str]]

    def expression(self) -> Found:
        left = self.operand()
        while self.tokens and (self.tokens[0] in OPERATORS or self.tokens[0] in SETS):
            operator = self.take()
            self.try_take("bool")
            matched = self.take() if self.next() in ("on", "ignoring") else ""
            named = self.names() if matched else frozenset()
            is_grouped = self.try_take("group_left")
            extra = self.names() if is_grouped and self.next() == "(" else frozenset[str]()
            right = self.operand()
            left = _combined(operator, left, right, matched, named, extra if is_grouped else None)
        return left

    def operand(self) -> Found:
        token = self.take()
        if token == "-":
            return self.operand()
        if token == "(":
            found = self.expression()
            self.take(")")
            return found
        if token == "{":
            return self.selector("")
        if token.startswith('"') or token[0].isdigit() or token.endswith(("Inf", "NaN")):
            return token
        if self.next() == "{":
            self.take()
            return self.selector(token)
        if token in AGGREGATIONS:
            return self.aggregation(token)
        return self.call(token) if self.next() == "(" else self.known(token)

    def selector(self, name: str) -> Found:
        compared: dict[str, tuple[str, str]] = {}
        while not self.try_take("}"):
            label, operator, value = self.take(), self.take(), self.take()
            compared[label] = (operator, value.strip('"'))
            self.try_take(",")
        names = [name]
        if not name:
            _, pattern = compared.pop("__name__", ("", ""))
            names = alternatives(pattern)
        found = frozenset.intersection(*(self.known(each) for each in names))
        _need(found, frozenset(compared), name or ", ".join(names))
        return found

    def known(self, name: str) -> frozenset[str]:
        if name not in self.series:
            raise Wrong(f"nobody has the series {name}")
        return self.series[name]

    def aggregation(self, name: str) -> Found:
        kind, by = self.grouping()
        self.take("(")
        arguments = self.arguments()
        if not kind:
            kind, by = self.grouping()
        found = _vector(arguments[-1])
        _need(found, by, name)
        if kind == "without":
            return found - by
        return found if not kind and name in ("topk", "bottomk") else by

    def grouping(self) -> tuple[str, frozenset[str]]:
        return (self.take(), self.names()) if self.next() in ("by", "without") else ("", frozenset())

    def call(self, name: str) -> Found:
        self.take("(")
        arguments = self.arguments()
        if name == "vector":
            return frozenset()
        if name == "absent":
            _vector(arguments[0])
            return frozenset()
        if name == "histogram_quantile":
            found = _vector(arguments[1])
            _need(found, frozenset({"le"}), name)
            return found - {"le"}
        found = _vector(arguments[0])
        if name == "label_replace":
            _, target, _, source, _ = (str(each).strip('"') for each in arguments)
            _need(found, frozenset({source}), name)
            return found | {target}
        if name not in SAME_LABELS:
            raise Wrong(f"the function {name} is not known here")
        return found

    def arguments(self) -> list[Found]:
        found = [self.expression()]
        while self.try_take(","):
            found.append(self.expression())
        self.take(")")
        return found

    def names(self) -> frozenset[str]:
        self.take("(")
        found = set()
        while not self.try_take(")"):
            found.add(self.take())
            self.try_take(",")
        return frozenset(found)

    def next(self) -> str:
        return self.tokens[0] if self.tokens else ""

    def take(self, wanted: str = "") -> str:
        if not self.tokens or (wanted and self.tokens[0] != wanted):
            raise Wrong(f"{wanted or 'more'} is missing before {self.next()!r}")
        return self.tokens.pop(0)

    def try_take(self, wanted: str) -> bool:
        return bool(self.tokens and self.tokens[0] == wanted and self.tokens.pop(0))


def alternatives(pattern: str) -> list[str]:
    """The texts that a pattern with at most one group of alternatives matches."""
    found = re.fullmatch(r"(\w*)\(([\w|]+)\)(\w*)", pattern)
    if found is None:
        return pattern.split("|")
    return [f"{found[1]}{each}{found[3]}" for each in found[2].split("|")]


def _combined(
    operator: str, left: Found, right: Found, matched: str, named: frozenset[str], extra: frozenset[str] | None
) -> Found:
    """matched: `on` or `ignoring` the labels `named`, or "". extra: those of `group_left`, None without it."""
    if isinstance(left, str) or isinstance(right, str):
        return left if isinstance(right, str) else right
    if matched == "on":
        _need(left, named, f"the left side of {operator}")
        _need(right, named, f"the right side of {operator}")
    else:
        sides = [side - named for side in (left, right)]
        if operator != "or" and sides[0] != sides[1]:
            raise Wrong(f"the sides of {operator} never match: {sorted(sides[0])} and {sorted(sides[1])}")
    if operator in SETS:
        return left & right if operator == "or" else left
    if extra is not None:
        _need(right, extra, "group_left")
        return left | extra
    return named if matched == "on" else left - named


def _vector(found: Found) -> frozenset[str]:
    if isinstance(found, str):
        raise Wrong(f"{found} is no vector")
    return found


def _need(labels: frozenset[str], wanted: frozenset[str], whose: str) -> None:
    if missing := sorted(wanted - labels):
        raise Wrong(f"{whose} has no label {', '.join(missing)}, only {', '.join(sorted(labels))}")
