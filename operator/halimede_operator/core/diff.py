"""What is to be done so that the children that stand are those that are wanted. In a steady state: nothing.

A child is applied when it is missing, or when what stands does not hold what is wanted. The hash of all that is wanted
is an annotation that is wanted as well: so is seen that a field is wanted no more, which server-side apply then takes
away. What others add stays: annotations, labels, fields and items that are not ours.

What is wanted is held by what stands when
- objects hold every wanted field; further ones are others', or defaults. Selectors, and nodeSelector, are one value to
  Kubernetes: further fields would change what they mean, so that they must be equal;
- lists of named things hold every wanted one (`objects.map_key`); any other list has the same items in the same order,
  each equal, or holding the wanted fields where Kubernetes sets defaults in items;
- quantities are the same number, whatever their unit; other values are equal.

Whose an object is, its controller says. One of another owner, or of nobody, with the name of a wanted child is left
alone and told as a Conflict; only what nobody controls and has all labels of this object is taken over: its owner was
deleted with `--cascade=orphan` and has come again. What is being deleted is waited for.

Children of ours that are wanted no more are deleted last, by their uid and version. A ConfigMap or a ServiceAccount
stays as long as the Deployment that stands or one of its ReplicaSets names it: pods of the revision before may still be
started.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.api.quantities import quantity
from halimede_operator.core.labels import controller_of, has_labels_of
from halimede_operator.core.objects import QUANTITIES, QUANTITY_MAPS, canonical, map_key
from halimede_operator.core.snapshot import Object


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a child. `is_new`: none of its name was seen, and so a stranger's may be there."""

    object: Object
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Only of the object with this uid, as it was looked at."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    version: str


@dataclass(frozen=True, slots=True)
class Conflict:
    """A wanted child that cannot be: its name is taken. `owner` is who has it, as `Kind name`; "" for nobody."""

    object: Object
    owner: str


Change = Apply | Delete | Conflict

Identity = tuple[str, str, str]


def diff(
    wanted: Sequence[Object], observed: Sequence[Object], uid: str, replica_sets: Sequence[Object] = ()
) -> tuple[Change, ...]:
    """The changes in the order in which they are made. `observed` are the owner's children, and whatever else has the
    name of a wanted one; `uid` is the owner's; `replica_sets` are those of its Deployment. All in one namespace."""
    standing = {_identity(child): child for child in observed}
    changes: list[Change] = []
    for child in wanted:
        found = standing.get(_identity(child))
        if found is None:
            changes.append(Apply(child, is_new=True))
        elif found["metadata"].get("deletionTimestamp"):
            continue
        elif not may_be_applied(child, found):
            changes.append(Conflict(child, _owner_text(found)))
        elif not holds(child, found):
            changes.append(Apply(child))

    kept = {_identity(child) for child in wanted}
    in_use = _named_by_pods([*replica_sets, *(each for each in observed if each["kind"] == "Deployment")])
    for child in observed:
        if _identity(child) in kept or not _is_owned(child, uid) or child["metadata"].get("deletionTimestamp"):
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


def _is_owned(child: Object, uid: str) -> bool:
    owner = controller_of(child)
    return owner is not None and owner["uid"] == uid


def may_be_applied(wanted: Object, found: Object) -> bool:
    """Whether what has the name of a wanted child is its owner's, or nobody's with its labels."""
    owner, found_owner = controller_of(wanted), controller_of(found)
    if found_owner is None:
        return has_labels_of(wanted["metadata"]["labels"], found)
    return owner is not None and owner["uid"] == found_owner["uid"]


def _owner_text(found: Object) -> str:
    owner = controller_of(found)
    return "" if owner is None else f"{owner['kind']} {owner['name']}"


def _named_by_pods(workloads: Iterable[Object]) -> set[tuple[str, str]]:
    """Kind and name of what the pods of Deployments and ReplicaSets cannot start without."""
    named: set[tuple[str, str]] = set()
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        named.add(("ServiceAccount", pod.get("serviceAccountName", "")))
        for volume in pod.get("volumes") or ():
            named.add(("ConfigMap", (volume.get("configMap") or {}).get("name", "")))
    return named


# Any, below: JSON.

_WHOLE_MAPS = frozenset({"labelSelector", "namespaceSelector", "nodeSelector", "podSelector", "selector"})
_LISTS_WITH_DEFAULTS = frozenset({"items", "sources"})


def holds(wanted: Any, found: Any, field: str = "", within: str = "") -> bool:
    """Whether what was found, the value of `field` within the one called `within`, holds what is wanted."""
    if isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
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
