"""The PodDisruptionBudget: how many pods a drain of nodes may evict at a time.

Pods that are not ready may always be evicted. Otherwise a model that never becomes ready would block the drain.
"""

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.spec.types import Json, Key


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
