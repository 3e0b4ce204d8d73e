"""The positions of tensors in nested arguments and results, as torch.export writes them (a pytree). Pure."""

import json
from typing import Any

MOST_LEAVES = 10_000
MOST_DEPTH = 100


def argument_paths(spec: str) -> tuple[str, ...]:
    """The paths of all arguments (`ARGS[0]`, `ARGS[2][key]`, `KWARGS[k]`), in the order of the flat list.

    `spec` is the structure of (positional arguments, keyword arguments) as JSON. ValueError for another text.
    """
    root = _root(spec)
    children = _children(root, "")
    if len(children) != 2:
        raise ValueError("the arguments are not a pair of positional and keyword arguments")
    (_, positional), (_, keywords) = children
    return (*_leaves(positional, "ARGS"), *_leaves(keywords, "KWARGS"))


def result_paths(spec: str) -> tuple[str, ...]:
    """The paths of all results (`RESULT`, `RESULT[k][0]`). ValueError."""
    return tuple(_leaves(_root(spec), "RESULT"))


def _root(spec: str) -> Any:  # Any: JSON
    document = json.loads(spec)
    # [version of the format, structure]
    if not isinstance(document, list) or len(document) != 2:
        raise ValueError("not the structure of a pytree")
    return document[1]


def _leaves(node: Any, path: str, depth: int = 0) -> list[str]:  # Any: JSON
    if depth > MOST_DEPTH:
        raise ValueError(f"a structure of more than {MOST_DEPTH} levels")
    if not isinstance(node, dict):
        raise ValueError("not the structure of a pytree")
    if node.get("type") is None:
        return [path]
    found: list[str] = []
    for key, child in _children(node, path):
        found += _leaves(child, f"{path}[{key}]", depth + 1)
        if len(found) > MOST_LEAVES:
            raise ValueError(f"more than {MOST_LEAVES} tensors")
    return found


def _children(node: Any, path: str) -> list[tuple[str, Any]]:  # Any: JSON
    """Each child with its key: that of a dictionary, else its position."""
    children = node.get("children_spec") if isinstance(node, dict) else None
    if not isinstance(children, list):
        raise ValueError(f"no structure below {path or 'the root'}")
    keys: list[str] = [str(at) for at in range(len(children))]
    if str(node.get("type")).endswith(("dict", "OrderedDict")):
        context = node.get("context")
        named = json.loads(context) if isinstance(context, str) else context
        if isinstance(named, list) and len(named) == len(children):
            keys = [str(key) for key in named]
    return list(zip(keys, children, strict=True))
