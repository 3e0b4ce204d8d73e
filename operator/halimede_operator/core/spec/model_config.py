"""Parses `spec.model.config`: the fields of a model's config.pbtxt under their JSON names.

Names, types and enum values are checked by the server's own table in halimede_spec. What depends on the model's files
is checked by the server, and is then the cause of the rollout's failure.
"""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from halimede_operator.core.spec.field import Field, shown
from halimede_operator.core.spec.types import Json
from halimede_spec.config_field import ConfigField
from halimede_spec.config_table import ENUMS, MESSAGES

_ELSEWHERE = {"name": "use spec.model.name", "versionPolicy": "use spec.model.versionPolicy"}
_DIGITS = re.compile(r"-?(0|[1-9][0-9]{0,19})", re.ASCII)


def read_model_config(field: Field, has_gpu: bool) -> Json:
    """The fields as they are given. field: a `free_section`."""
    for name, message in _ELSEWHERE.items():
        if field.get(name).given:
            field.get(name).refuse(f"must not be set here: {message}")
    _check_message(field, "ModelConfig")
    if not has_gpu:
        groups = field.get("instanceGroup").value
        for i, group in enumerate(groups if isinstance(groups, list | tuple) else ()):
            if isinstance(group, Mapping) and group.get("kind") == "KIND_GPU":
                at = Field(f"{field.path}.instanceGroup[{i}].kind", "KIND_GPU", field.problems)
                at.refuse("needs spec.accelerator of type GPU, MIG, Shared or DRA, got KIND_GPU without one")
    return dict(field.json())


def _check_message(field: Field, name: str) -> None:
    fields = MESSAGES[name]
    # If there are more, one of these is unknown; to look at all of them would delay other objects.
    for key in islice(field.json(), len(fields) + 1):
        inner = field.get(str(key))
        known = fields.get(key)
        if known is None:
            near = get_close_matches(_camel(str(key))[:80], fields, 1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(fields) or 'none'}"
            Field(inner.path, key, field.problems).refuse(f"is not a field of {name}; {hint}")
            continue
        if not inner.given:
            continue
        others = [other for other in known.one_of if field.get(other).given]
        if len(others) > 1 and key == others[-1]:
            inner.refuse(f"must not be set beside {others[0]}: only one of {', '.join(known.one_of)} is allowed")
        _check_field(inner, known)


def _check_field(field: Field, known: ConfigField) -> None:
    if known.keys:
        for key, entry in field.json().items():
            at = Field(f"{field.path}[{key}]", entry, field.problems)
            if known.keys != "string" and not _is_integer(str(key), known.keys):
                at.refuse(f"must have a whole number as its name, got {shown(key)}")
            _check_value(at, known.kind)
    elif known.is_list:
        for entry in field.items():
            _check_value(entry, known.kind)
    else:
        _check_value(field, known.kind)


def _check_value(field: Field, kind: str) -> None:
    value = field.value
    if kind in MESSAGES:
        if not isinstance(value, Mapping):
            field.refuse(f"must be an object, got {shown(value)}")
        _check_message(field, kind)
    elif kind in ENUMS:
        if not isinstance(value, str) or value not in ENUMS[kind]:
            field.refuse(f"must be one of {', '.join(ENUMS[kind])}, got {shown(value)}")
    elif kind == "string":
        if not isinstance(value, str):
            # YAML 1.1, which kubectl reads, has a dozen words for true and false.
            hint = "; quote it, because YAML reads y, n, yes, no, on and off as true and false"
            field.refuse(f"must be a text, got {shown(value)}{hint if isinstance(value, bool) else ''}")
    elif kind == "bool":
        if not isinstance(value, bool):
            field.refuse(f"must be true or false, got {shown(value)}")
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            field.refuse(f"must be a number, got {shown(value)}")
    elif not _is_integer(value, kind):
        low, high = _bounds(kind)
        field.refuse(f"must be a whole number from {low} to {high}, got {shown(value)}")


# Any: what JSON has.
def _is_integer(value: Any, kind: str) -> bool:
    """Whether this is an integer; also as a text, as the JSON of protobuf has integers of 64 bits."""
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    low, high = _bounds(kind)
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _bounds(kind: str) -> tuple[int, int]:
    bits = int(kind[-2:])
    return (0, 2**bits - 1) if kind.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part[:1].upper() + part[1:] for part in rest)
