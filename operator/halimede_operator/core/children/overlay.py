"""Merges `spec.podTemplate` over the pod template that we build. The user's values win.

- Objects merge field by field. Nothing is removed, except a member of a one-of: another member replaces it.
- Lists of named items merge by Kubernetes' own keys: containers, volumes, env and so on by name, ports by number and
  protocol, volumeMounts by mountPath, topologySpreadConstraints by key and policy. New items come last.
- Tolerations are added to those of the template: they have no names, and no reason exists to remove one.
- Any other value replaces that of the template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from halimede_operator.core.objects import map_key, one_of
from halimede_operator.core.spec.types import Json

# Any, in this module: JSON.

_ADDED = "tolerations"


def overlay(template: Json, patch: Json, field: str = "") -> dict[str, Any]:
    """The template merged with the patch; neither argument is changed. field: where both are, or a list with both."""
    members = one_of(field)
    replaced = members - patch.keys() if members & patch.keys() else frozenset[str]()
    return {
        **{key: value for key, value in template.items() if key not in replaced},
        **{key: _merged(key, template.get(key), value) for key, value in patch.items()},
    }


def _merged(field: str, template: Any, patch: Any) -> Any:
    if isinstance(patch, Mapping) and isinstance(template, Mapping):
        return overlay(template, patch, field)
    if isinstance(patch, list | tuple) and isinstance(template, list | tuple):
        return _merged_list(field, template, patch)
    return patch


def _merged_list(field: str, template: Sequence[Any], patch: Sequence[Any]) -> list[Any]:
    if field == _ADDED:
        return [*template, *(each for each in patch if each not in template)]
    if any(map_key(field, each) is None for each in patch):
        return list(patch)
    merged = {map_key(field, each): each for each in template}
    for each in patch:
        key = map_key(field, each)
        merged[key] = overlay(merged.get(key, {}), each, field)
    return list(merged.values())
