"""Names of children and of parts of pods, within Kubernetes' limits.

A child's name has at most 52 characters. A pod's name must fit into a label (63): it is its Deployment's name, 10 and 5
characters, and two dashes. A longer name keeps its beginning and its suffix, with a hash of the whole name in between.
"""

import hashlib
import json
import re
from typing import Any

MAX_CHILD_NAME = 52
MAX_LABEL = 63

_HASH = re.compile("[0-9a-f]{8,}")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", re.ASCII)


def canonical_json(value: Any) -> str:  # Any: JSON
    """JSON with sorted keys and without spaces: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def hash_of(text: str, digits: int = 8) -> str:
    """The first digits of the text's sha256, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]


def child_name(name: str, suffix: str = "") -> str:
    """The name of an object's child: the object's own, or `<name>-<suffix>`."""
    end = f"-{suffix}" if suffix else ""
    if len(name) + len(end) <= MAX_CHILD_NAME:
        return name + end
    middle = f"-{hash_of(name)}"
    return name[: MAX_CHILD_NAME - len(middle) - len(end)].rstrip("-") + middle + end


def is_child_name(name: str, child: str) -> bool:
    """Whether `child` is the name of a child of the object `name`, at present or with other content."""
    content = child.rpartition("-")[2]
    named_by_content = (content, f"config-{content}") if _HASH.fullmatch(content) else ()
    return child in {child_name(name, suffix) for suffix in ("", "pods", *named_by_content)}


def volume_name(prefix: str, name: str) -> str:
    """The name of a volume for the object `name`: `<prefix>-<name>` if that is a label, else `<prefix>-<hash>`."""
    plain = f"{prefix}-{name}"
    if len(plain) <= MAX_LABEL and _LABEL.fullmatch(name):
        return plain
    return f"{prefix}-{hash_of(name)}"
