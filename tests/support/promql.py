"""The parts of an expression in PromQL, for tests. Prometheus 2.42 has no call that parses one."""

import re

TOKEN = re.compile(
    r"""
    (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<range>\[[^\]]*\])
    | (?P<labels>\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\))
    | (?P<call>\b[a-z_0-9]+(?=\s*\(|\s+(?:by|without)\b))
    | (?P<keyword>\b(?:and|or|unless|bool|offset|[+]?Inf|NaN)\b)
    | (?P<number>(?<![\w:])\d[\w.]*)
    | (?P<selector>[a-zA-Z_:][\w:]*(?:\s*\{[^}]*\})?)
    | (?P<anonymous>\{[^}]*\})
    """,
    re.VERBOSE,
)
COMPARISON = re.compile(r"([^=!<>])(==|!=|>=|<=|>|<)\s*(-?[\d.]+)")


def selectors(expression: str) -> list[str]:
    """The selectors of an expression, as they are written, without their ranges."""
    found = []
    for token in TOKEN.finditer(expression):
        selector = token["selector"] or token["anonymous"]
        if selector:
            found.append(selector)
    return found


def always_true(expression: str) -> str:
    """The expression of an alert whose comparisons with numbers keep every series; they give 0 or 1."""
    return COMPARISON.sub(r"\1\2 bool \3", expression)
