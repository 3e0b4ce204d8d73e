"""The Deployment. It has `replicas` only if the object's spec decides on them (`core.scaling.replicas`)."""

from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import ROLLED_BACK, TEMPLATE_HASH, stable_selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.revisions.revision import Revision
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.spec.types import Json, Key, RolloutPolicy, Workload

REVISIONS_KEPT = 2
"""Old ReplicaSets that the Deployment keeps. Their ConfigMaps are kept too."""
STRATEGIES: dict[RolloutPolicy, Json] = {
    RolloutPolicy.SURGE: {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
    RolloutPolicy.IN_PLACE: {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
    RolloutPolicy.RECREATE: {"type": "Recreate"},
}


def deployment(
    key: Key,
    uid: str,
    workload: Workload,
    revision: Revision,
    config_map: str,
    rolled_back: RolledBack | None,
    policy: RolloutPolicy,
    replicas: int | None,
) -> Json:
    """config_map: name of the revision's. policy: not Auto. replicas: None if others set them."""
    head = metadata(key, uid, child_name(key.name))
    annotations = {
        **revision.annotations,
        TEMPLATE_HASH: revision.hash,
        # Written when it is empty too: `kubectl rollout undo` copies an old record from a ReplicaSet, and server-side
        # apply does not remove what others have set.
        ROLLED_BACK: rolled_back.text if rolled_back is not None else "",
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**head, "annotations": annotations},
        "spec": {
            **({"replicas": replicas} if replicas is not None else {}),
            "selector": {"matchLabels": stable_selector_of(key)},
            "strategy": STRATEGIES[policy],
            "revisionHistoryLimit": REVISIONS_KEPT,
            "progressDeadlineSeconds": workload.rollout.progress_seconds,
            # Left out when false, so that `kubectl rollout pause` of the Deployment is respected.
            **({"paused": True} if workload.rollout.paused else {}),
            "template": revision.pod_template(config_map),
        },
    }
