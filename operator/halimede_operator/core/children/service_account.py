"""The ServiceAccount of an object's pods. It has no rights and no token."""

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.names import child_name
from halimede_operator.core.spec.types import Json, Key


def service_account(key: Key, uid: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(key, uid, child_name(key.name)),
        "automountServiceAccountToken": False,
    }
