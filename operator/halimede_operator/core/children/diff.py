"""Compares wanted children with existing ones and returns the changes to make. In a steady state there are none.

A child is applied when it is missing, or when the existing one does not hold what is wanted. An annotation with the
hash of the wanted child is part of what is wanted. So the comparison notices when a field is no longer wanted, and
server-side apply then removes it. What others add stays: annotations, labels, fields and items that are not ours.

An existing child holds the wanted one if
- objects have every wanted field. Further fields belong to others or are defaults. Selectors and nodeSelector are
  single values for Kubernetes: further fields would change their meaning, so they must be equal;
- lists of named items have every wanted item (`objects.map_key`). Any other list has the same items in the same order:
  equal items, or items that hold the wanted fields where Kubernetes sets defaults in items;
- quantities are the same number in any unit, and other values are equal.

An object belongs to its controller. An object that has the name of a wanted child and another controller, or none, is
left alone and reported as a Conflict. There is one exception: an object without a controller that has all labels of
this owner is taken over, because its owner was deleted with `--cascade=orphan` and created again. If it is not wanted,
it is deleted like a child: an HPA that was left would go on scaling. An object that is being deleted is waited for.

Children that are no longer wanted are deleted last, by uid and version. A ConfigMap, a ServiceAccount or a
ResourceClaimTemplate stays as long as the existing Deployment or one of its ReplicaSets names it, because pods of an
earlier revision may still start.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.labels import controller_of, has_labels_of, labelled_for
from halimede_operator.core.objects import QUANTITIES, QUANTITY_MAPS, canonical, map_key
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.quantities import quantity


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child. `is_new`: no object of its name was seen; another owner's may still exist."""

    object: Object
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid, if it still has this version."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A wanted child whose name is taken. `owner`: who has it, in words, usually a controller as `Kind name`; or ""."""

    object: Object
    owner: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Server-side apply of a Deployment's replicas alone, by their second field manager."""

    object: Object


Change = Apply | Delete | Conflict

Identity = tuple[str, str, str]


def diff(
    wanted: Sequence[Object], observed: Sequence[Object], uid: str, replica_sets: Sequence[Object] = ()
) -> tuple[Change, ...]:
    """The changes in the order in which they are made. All objects are in one namespace.

    wanted: not empty. observed: the owner's children and orphans, and other objects that have the name of a wanted
    child. uid: of the owner.
    replica_sets: of its Deployment.
    """
    existing = {_identity(child): child for child in observed}
    changes: list[Change] = []
    for child in wanted:
        found = existing.get(_identity(child))
        if found is None:
            changes.append(Apply(child, is_new=True))
        elif found["metadata"].get("deletionTimestamp"):
            continue
        elif not may_be_applied(child, found):
            changes.append(Conflict(child, _owner_text(found)))
        elif not holds(child, found):
            changes.append(Apply(child))

    kept = {_identity(child) for child in wanted}
    labels = wanted[0]["metadata"]["labels"]
    in_use = _named_by_pods([*replica_sets, *(each for each in observed if each["kind"] == "Deployment")])
    for child in observed:
        if _identity(child) in kept or not _is_ours(child, uid, labels) or child["metadata"].get("deletionTimestamp"):
            continue
        if (child["kind"], child["metadata"]["name"]) in in_use:
            continue
        head = child["metadata"]
        changes.append(
            Delete(
                child["apiVersion"],
                child["kind"],
                head["namespace"],
                head["name"],
                head["uid"],
                head["resourceVersion"],
            )
        )
    return tuple(changes)


def _identity(child: Object) -> Identity:
    return (child["apiVersion"], child["kind"], child["metadata"]["name"])


def _is_ours(child: Object, uid: str, labels: Mapping[str, str]) -> bool:
    """Whether the owner has the child, or no object owns it and it has the labels of all its children."""
    owner = controller_of(child)
    return has_labels_of(labels, child) if owner is None else bool(owner["uid"] == uid)


def may_be_applied(wanted: Object, found: Object) -> bool:
    """Whether the existing object with a wanted child's name has the same controller, or none but all its labels."""
    owner, found_owner = controller_of(wanted), controller_of(found)
    if found_owner is None:
        return has_labels_of(wanted["metadata"]["labels"], found)
    return owner is not None and owner["uid"] == found_owner["uid"]


def _owner_text(found: Object) -> str:
    owner = controller_of(found)
    if owner is not None:
        return f"{owner['kind']} {owner['name']}"
    labelled = labelled_for(found)
    return f"nobody, with the labels of {labelled}" if labelled else ""


def _named_by_pods(workloads: Iterable[Object]) -> set[tuple[str, str]]:
    """Kind and name of the children that new pods of Deployments and ReplicaSets need."""
    named: set[tuple[str, str]] = set()
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        named.add(("ServiceAccount", pod.get("serviceAccountName", "")))
        for claim in pod.get("resourceClaims") or ():
            named.add(("ResourceClaimTemplate", claim.get("resourceClaimTemplateName", "")))
        for volume in pod.get("volumes") or ():
            named.add(("ConfigMap", (volume.get("configMap") or {}).get("name", "")))
    return named


# Any, below: JSON.

_WHOLE_MAPS = frozenset({"labelSelector", "namespaceSelector", "nodeSelector", "podSelector", "selector"})
_LISTS_WITH_DEFAULTS = frozenset({"items", "metrics", "sources"})


def holds(wanted: Any, found: Any, field: str = "", within: str = "") -> bool:
    """Whether the found value holds the wanted one. field: its name. within: the name of the field around it."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict):
            return False
        if field in _WHOLE_MAPS:
            return bool(canonical(wanted, field) == canonical(found, field))
        return all(key in found and holds(value, found[key], key, field) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and _holds_list(wanted, found, field)
    if field in QUANTITIES or within in QUANTITY_MAPS:
        return _same_quantity(wanted, found)
    return type(wanted) is type(found) and bool(wanted == found)


def _holds_list(wanted: list[Any], found: list[Any], field: str) -> bool:
    if all(map_key(field, item) is not None for item in wanted):
        by_key = {map_key(field, item): item for item in found}
        return all((key := map_key(field, item)) in by_key and holds(item, by_key[key]) for item in wanted)
    if field in _LISTS_WITH_DEFAULTS:
        return len(wanted) == len(found) and all(holds(one, other) for one, other in zip(wanted, found, strict=True))
    return bool(canonical(wanted) == canonical(found))


def _same_quantity(wanted: Any, found: Any) -> bool:
    amount = quantity(wanted)
    return bool(wanted == found) if amount is None else amount == quantity(found)
