"""Parses peers of a NetworkPolicy: pods by selectors, or blocks of addresses."""

import ipaddress
import re

from halimede_operator.core.spec.field import LABEL_NAME, LABEL_VALUE, Field, shown, without_none
from halimede_operator.core.spec.types import Json

_CIDR = re.compile(r"[0-9a-fA-F.:]+/[0-9]{1,3}", re.ASCII)


def read_peer(field: Field) -> Json:
    selectors = {
        name: _selector(field.section(name)) for name in ("podSelector", "namespaceSelector") if field.get(name).given
    }
    block = field.section("ipBlock")
    if block.given == bool(selectors):
        field.refuse("must have either ipBlock or selectors (podSelector, namespaceSelector)")
    return without_none(**selectors, ipBlock=_block(block) if block.given else None)


def _selector(field: Field) -> Json:
    labels = {
        key: value.text("", LABEL_VALUE, empty=True)
        for key, value in field.section("matchLabels").entries().items()
        if is_label(key, value)
    }
    expressions = [_expression(expression) for expression in field.get("matchExpressions").objects()]
    return without_none(matchLabels=labels or None, matchExpressions=expressions or None)


def _expression(field: Field) -> Json:
    key = field.get("key").required("the label's name").text("", LABEL_NAME)
    operator = field.get("operator").required("In, NotIn, Exists or DoesNotExist")
    kind = operator.choice("Exists", "In", "NotIn", "Exists", "DoesNotExist")
    values = [value.text("", LABEL_VALUE, empty=True) for value in field.get("values").items()]
    if (kind in ("In", "NotIn")) != bool(values):
        field.get("values").refuse("must be set for In and NotIn, and for no other operator")
    return without_none(key=key, operator=kind, values=values or None)


def _block(field: Field) -> Json:
    whole = _network(field.get("cidr").required("a block of addresses such as 10.0.0.0/8"))
    holes = []
    for entry in field.get("except").items():
        hole = _network(entry)
        if hole is not None and whole is not None and not _within(hole, whole):
            entry.refuse(f"must be a smaller block within {whole}, got {shown(entry.value)}")
        holes.append(entry.value)
    return without_none(cidr=field.get("cidr").value, **{"except": holes or None})


Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network(field: Field) -> Network | None:
    text = field.text(None, max_length=64)
    if text is None:
        return None
    try:
        if _CIDR.fullmatch(text):
            return ipaddress.ip_network(text, strict=False)
    except ValueError:
        pass
    field.refuse(f"must be a block of addresses such as 10.0.0.0/8, got {shown(text)}")
    return None


def _within(hole: Network, whole: Network) -> bool:
    """Whether a block is a smaller part of another one."""
    if hole.version != whole.version or hole.prefixlen <= whole.prefixlen:
        return False
    return hole.supernet(new_prefix=whole.prefixlen) == whole


def is_label(key: str, field: Field) -> bool:
    """Whether the key of an entry is the name of a label; adds a problem otherwise."""
    if LABEL_NAME.pattern.fullmatch(key):
        return True
    field.refuse(LABEL_NAME.message)
    return False
