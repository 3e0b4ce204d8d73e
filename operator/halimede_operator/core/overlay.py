"""Merges `spec.podTemplate` over the pod template that we build. The user's values win.

- Objects merge field by field. Nothing is removed.
- Lists of named items merge by Kubernetes' own keys: containers, volumes, env and so on by name, ports by number and
  protocol, volumeMounts by mountPath, topologySpreadConstraints by key and policy. New items come after ours.
- Tolerations are added to ours: they have no names, and there is no reason to remove one of ours.
- Any other value replaces ours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from halimede_operator.core.api.spec import Json
from halimede_operator.core.objects import map_key

# Any, in this module: JSON.

_ADDED = "tolerations"


def overlay(template: Json, patch: Json) -> dict[str, Any]:
    """The template merged with the patch; neither argument is changed."""
    return {**template, **{field: _merged(field, template.get(field), value) for field, value in patch.items()}}


def _merged(field: str, ours: Any, theirs: Any) -> Any:
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        return overlay(ours, theirs)
    if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        return _merged_list(field, ours, theirs)
    return theirs


def _merged_list(field: str, ours: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    if field == _ADDED:
        return [*ours, *(each for each in theirs if each not in ours)]
    if any(map_key(field, each) is None for each in theirs):
        return list(theirs)
    merged = {map_key(field, each): each for each in ours}
    for each in theirs:
        key = map_key(field, each)
        merged[key] = overlay(merged.get(key, {}), each)
    return list(merged.values())
