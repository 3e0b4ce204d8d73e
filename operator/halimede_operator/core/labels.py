"""Labels, annotations and owners of children. Selectors never change: Kubernetes does not let a Deployment's."""

from collections.abc import Mapping
from typing import Any

from halimede_operator.core.api.spec import API_VERSION, GROUP, Key, Kind
from halimede_operator.core.platform import FIELD_MANAGER

MANAGED_BY = FIELD_MANAGER
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MODEL_LABEL = f"{GROUP}/model"
ENSEMBLE_LABEL = f"{GROUP}/ensemble"
TRACK_LABEL = f"{GROUP}/track"
REVISION_LABEL = f"{GROUP}/revision"
"""Of pods: the beginning of their template's hash. In no selector, since it changes."""

APPLIED_HASH = f"{GROUP}/applied-hash"
"""Annotation of every child: the hash of what was wanted when it was applied."""
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""Annotation of the Deployment: the hash of its pod template."""

_NAME_LABELS = {Kind.INFERENCE_MODEL: MODEL_LABEL, Kind.MODEL_ENSEMBLE: ENSEMBLE_LABEL}


def selector_of(key: Key) -> dict[str, str]:
    """What all pods of an object have, and no others."""
    return {_NAME_LABELS[key.kind]: key.name}


def stable_selector_of(key: Key) -> dict[str, str]:
    """What the pods of an object's Deployment have: another Deployment beside it would have another track."""
    return {**selector_of(key), TRACK_LABEL: "stable"}


def labels_of(key: Key) -> dict[str, str]:
    """What every child of an object has, and every pod."""
    return {
        "app.kubernetes.io/name": "inference-server",
        "app.kubernetes.io/instance": key.name,
        "app.kubernetes.io/component": "predictor",
        MANAGED_BY_LABEL: MANAGED_BY,
        "app.kubernetes.io/part-of": "halimede",
        **stable_selector_of(key),
    }


def owner_reference(key: Key, uid: str) -> dict[str, Any]:
    """Without blockOwnerDeletion, which would need a right to the owner's finalizers."""
    return {"apiVersion": API_VERSION, "kind": str(key.kind), "name": key.name, "uid": uid, "controller": True}


def controller_of(child: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of who answers for an object; None where nobody does."""
    owners = child.get("metadata", {}).get("ownerReferences") or ()
    return next((owner for owner in owners if owner.get("controller")), None)


def has_labels_of(key_labels: Mapping[str, str], child: Mapping[str, Any]) -> bool:
    found = child.get("metadata", {}).get("labels") or {}
    return all(found.get(label) == value for label, value in key_labels.items())
