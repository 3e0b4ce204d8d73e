"""Takes over fields of a child that other managers set and that make our apply fail.

Server-side apply sets our fields and leaves those of other managers. The API server refuses some combinations: `value`
beside `valueFrom`, two handlers in one probe, two ports of one name. So a hand edit could keep a child wrong forever.
We therefore take over the fields that such a refusal points at, if others own them and we do not want them: they are
written into our entry of `managedFields`. That changes no value, and the apply that follows removes these fields in the
same write that sets ours. All other fields remain with their managers.

Which fields are in the way depends on the field that the refusal names:
- in items of lists that we want, only items that differ from what is wanted;
- the others' fields at and below the named field; if there are none, the nearest ones beside it;
- if a name is used twice, the whole item of the other manager that has it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from halimede_operator.core.api_errors import Cause
from halimede_operator.core.children.diff import holds
from halimede_operator.core.objects import map_key
from halimede_operator.core.platform import FIELD_MANAGER
from halimede_operator.core.snapshot import Object

# Any, in this module: JSON.

DUPLICATE = "FieldValueDuplicate"

Path = tuple[str, ...]
"""A path of fieldsV1 elements: `f:name`, or `k:{...}` for an item of a list."""

_STEP = re.compile(r"\[(?:\d+|(?P<key>[^\]]*))\]|(?P<name>[^.\[\]]+)")
_ITEM = "[]"


def taken_over(wanted: Object, found: Object, causes: Sequence[Cause]) -> list[Object] | None:
    """The managedFields of `found` after the take-over of the fields that are in the way of `wanted`.

    causes: of the refusal. None if no field is in the way.
    """
    entries = found["metadata"].get("managedFields") or ()
    ours: Object = {
        "manager": FIELD_MANAGER,
        "operation": "Apply",
        "apiVersion": wanted["apiVersion"],
        "fieldsType": "FieldsV1",
        "fieldsV1": {},
    }
    others: list[Object] = []
    taken: list[tuple[Path, Any]] = []
    for entry in entries:
        if all(entry.get(name) == ours[name] for name in ("manager", "operation", "apiVersion")):
            ours = entry
            continue
        left = entry.get("fieldsV1") or {}
        if entry.get("subresource") is None and entry.get("apiVersion") == ours["apiVersion"]:
            for path in _all_in_the_way(left, wanted, found, causes):
                if (part := _at(left, path)) is not None:
                    taken.append((path, part))
                    left = _without(left, path)
        if left:
            others.append({**entry, "fieldsV1": left})
    if not taken:
        return None
    fields = ours["fieldsV1"]
    for path, part in taken:
        fields = _with(fields, path, part)
    return [{**ours, "fieldsV1": fields}, *others]


def _all_in_the_way(owned: Any, wanted: Object, found: Object, causes: Sequence[Cause]) -> list[Path]:
    paths: list[Path] = []
    for cause in causes:
        steps = _steps(cause.field)
        # Any manager may set labels, annotations and finalizers; none of them conflicts with ours.
        if steps and steps[0] != "metadata":
            paths += _in_the_way(owned, wanted, found, steps, "", cause.reason == DUPLICATE)
    return paths


def _steps(field: str) -> Path:
    return tuple(match["name"] or match["key"] or _ITEM for match in _STEP.finditer(field))


def _in_the_way(owned: Any, wanted: Any, found: Any, steps: Path, field: str, is_duplicate: bool) -> Iterator[Path]:
    """Paths of fields to take over, relative to `owned`: the fields of `field` that another manager owns."""
    step, rest = steps[0], steps[1:]
    if step == _ITEM:
        yield from _in_items(owned, wanted, found, rest, field, is_duplicate)
        return
    element = f"f:{step}"
    if rest and isinstance(wanted, Mapping) and step in wanted:
        if element in owned and isinstance(found, Mapping):
            below = _in_the_way(owned[element], wanted[step], found.get(step), rest, step, is_duplicate)
            yield from ((element, *path) for path in below)
        return
    unwanted = list(_unwanted(owned, wanted, field))
    at_it = [path for path in unwanted if path[0] == element]
    # At most 2 levels: `limits.memory` is beside `requests`, but no field of a pod is beside one of a Deployment.
    nearest = min((len(path) for path in unwanted), default=0)
    beside = [path for path in unwanted if len(path) == nearest <= 2]
    yield from at_it or beside


def _in_items(owned: Any, wanted: Any, found: Any, rest: Path, field: str, is_duplicate: bool) -> Iterator[Path]:
    for element, below in owned.items():
        ours, theirs = _item(wanted, element, field), _item(found, element, field)
        if ours is None:
            names = [item.get(rest[0]) for item in wanted or ()] if is_duplicate and len(rest) == 1 else []
            if theirs is not None and theirs.get(rest[0] if rest else "") in names:
                yield (element,)
        elif not holds(ours, theirs):
            paths = _in_the_way(below, ours, theirs, rest, "", is_duplicate) if rest else _unwanted(below, ours)
            yield from ((element, *path) for path in paths)


def _unwanted(owned: Any, wanted: Any, field: str = "") -> Iterator[Path]:
    """Owned fields of `field` that are not wanted, each as the shortest path."""
    for element, below in owned.items():
        if element == ".":
            continue
        name = element[2:] if element.startswith("f:") else ""
        part = wanted.get(name) if name and isinstance(wanted, Mapping) else _item(wanted, element, field)
        if part is None:
            yield (element,)
        else:
            yield from ((element, *path) for path in _unwanted(below, part, name))


def _item(items: Any, element: str, field: str) -> Any:
    """The item of a list that an element names; None if there is none."""
    if not element.startswith("k:") or not isinstance(items, list):
        return None
    key = map_key(field, json.loads(element[2:]))
    return next((item for item in items if key is not None and map_key(field, item) == key), None)


def _at(tree: Any, path: Path) -> Any:
    for element in path:
        if element not in tree:
            return None
        tree = tree[element]
    return tree


def _without(tree: Any, path: Path) -> Any:
    element, rest = path[0], path[1:]
    left = _without(tree[element], rest) if rest else None
    return {name: left if name == element else part for name, part in tree.items() if name != element or left}


def _with(tree: Any, path: Path, part: Any) -> Any:
    if not path:
        return {**tree, **{name: _with(tree.get(name, {}), (), below) for name, below in part.items()}}
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], part)}
