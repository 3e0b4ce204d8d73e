"""Labels, annotations and owners of children. Selectors never change, because a Deployment's selector is immutable."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from halimede_operator.core.names import is_child_name
from halimede_operator.core.platform import FIELD_MANAGER
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import API_VERSION, GROUP, Key, Kind

MANAGED_BY = FIELD_MANAGER
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MODEL_LABEL = f"{GROUP}/model"
ENSEMBLE_LABEL = f"{GROUP}/ensemble"
TRACK_LABEL = f"{GROUP}/track"
REVISION_LABEL = f"{GROUP}/revision"
"""On pods: the beginning of their template's hash. It changes, so no selector has it."""

APPLIED_HASH = f"{GROUP}/applied-hash"
"""Annotation of every child: the hash of the wanted child when it was applied."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of the Deployment: the hash of its revision, which is its pod template with the fetch plan."""
INPUTS = f"{GROUP}/inputs"
"""Annotation of the Deployment: the hash of what users wrote that its pod template was made from."""
GENERATION = f"{GROUP}/generation"
"""Annotation of the Deployment: the object's generation that its revision was made for."""
POD_SETTINGS = f"{GROUP}/pod-settings"
"""Annotation of the Deployment: the platform's settings that its pod template was made with."""
PLACEMENT = f"{GROUP}/placement"
"""Annotation of the Deployment: the devices that its pods request, and what they were chosen for."""
ROLLED_BACK = f"{GROUP}/rolled-back"
"""Annotation of the Deployment: the record of a revision that was rolled back; "" if there is none."""

_NAME_LABELS = {Kind.INFERENCE_MODEL: MODEL_LABEL, Kind.MODEL_ENSEMBLE: ENSEMBLE_LABEL}


def selector_of(key: Key) -> dict[str, str]:
    """The labels that all pods of an object have, and no other pods."""
    return {_NAME_LABELS[key.kind]: key.name}


def stable_selector_of(key: Key) -> dict[str, str]:
    """The labels of the Deployment's pods. A second Deployment of the object would have another track."""
    return {**selector_of(key), TRACK_LABEL: "stable"}


def labels_of(key: Key) -> dict[str, str]:
    """The labels of every child of an object, and of every pod."""
    return {
        "app.kubernetes.io/name": "inference-server",
        "app.kubernetes.io/instance": key.name,
        "app.kubernetes.io/component": "predictor",
        MANAGED_BY_LABEL: MANAGED_BY,
        "app.kubernetes.io/part-of": "halimede",
        **stable_selector_of(key),
    }


def owner_reference(key: Key, uid: str) -> dict[str, Any]:
    """A controller reference to the object.

    blockOwnerDeletion: `kubectl delete --cascade=foreground` waits for the children. Setting it needs the right to
    update the owner's finalizers.
    """
    owner = {"apiVersion": API_VERSION, "kind": str(key.kind), "name": key.name, "uid": uid}
    return {**owner, "controller": True, "blockOwnerDeletion": True}


def without_blocking(wanted: Sequence[Object], existing: Iterable[Object]) -> tuple[Object, ...]:
    """The wanted children without `blockOwnerDeletion`, except where it is set already, and so not checked.

    For an API server that does not know the owner's kind yet, and therefore refuses to set it.
    """
    blocking = {_key(child) for child in existing if (controller_of(child) or {}).get("blockOwnerDeletion")}
    return tuple(child if _key(child) in blocking else _without_blocking(child) for child in wanted)


def _key(child: Object) -> tuple[str, str]:
    return child["kind"], child["metadata"]["name"]


def _without_blocking(child: Object) -> Object:
    owners = [
        {field: value for field, value in owner.items() if field != "blockOwnerDeletion"}
        for owner in child["metadata"]["ownerReferences"]
    ]
    return {**child, "metadata": {**child["metadata"], "ownerReferences": owners}}


def controller_of(child: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of an object's controller; None if it has none."""
    owners = child.get("metadata", {}).get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def has_labels_of(key_labels: Mapping[str, str], child: Mapping[str, Any]) -> bool:
    """Whether the child has all these labels with these values."""
    found = child.get("metadata", {}).get("labels") or {}
    return all(found.get(label) == value for label, value in key_labels.items())


def is_orphan_of(key: Key, child: Mapping[str, Any]) -> bool:
    """Whether this is a child of an object of this kind and name that was deleted with `--cascade=orphan`."""
    if controller_of(child) is not None or not has_labels_of(labels_of(key), child):
        return False
    return is_child_name(key.name, child["metadata"]["name"])


def labelled_for(child: Mapping[str, Any]) -> str:
    """The object whose labels a child has, as `Kind name`; "" if it has those of none."""
    found = child.get("metadata", {}).get("labels") or {}
    return next((f"{kind} {found[label]}" for kind, label in _NAME_LABELS.items() if label in found), "")
