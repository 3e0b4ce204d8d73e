"""The PodDisruptionBudget: how many pods a drain of nodes may take at a time. One that is not ready anyway may always
go, or a model that never gets ready would keep its node."""

from halimede_operator.core.api.spec import Json, Key
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name


def disruption_budget(key: Key, uid: str, max_unavailable: int | str) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(key, uid, child_name(key.name)),
        "spec": {
            "maxUnavailable": max_unavailable,
            "selector": {"matchLabels": selector_of(key)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
