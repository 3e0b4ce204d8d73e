"""The metadata of every child, and the annotation with the hash of the wanted child."""

from typing import Any

from halimede_operator.core.labels import APPLIED_HASH, labels_of, owner_reference
from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.objects import canonical
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Json, Key


def metadata(key: Key, uid: str, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": key.namespace,
        "labels": labels_of(key),
        "ownerReferences": [owner_reference(key, uid)],
    }


def sealed(child: Json) -> Object:
    """The child in canonical form, with its hash as annotation. The hash is computed without that annotation."""
    made: Object = canonical(child)
    made["metadata"].setdefault("annotations", {})[APPLIED_HASH] = hash_of(canonical_json(made), 16)
    return made
