"""The Deployment. The operator owns its `replicas`: only the object's `spec.replicas` scales it."""

from halimede_operator.core.api.spec import Json, Key, RolloutPolicy, Workload
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import PLACEMENT, POD_SETTINGS, TEMPLATE_HASH, stable_selector_of
from halimede_operator.core.names import canonical_json, child_name, hash_of
from halimede_operator.core.placement.choice import Placement
from halimede_operator.core.platform import Platform
from halimede_operator.core.pod_settings import written

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
    template: Json,
    platform: Platform,
    placement: Placement | None,
    policy: RolloutPolicy,
) -> Json:
    """placement: the devices that the template has. policy: not Auto."""
    head = metadata(key, uid, child_name(key.name))
    annotations = {TEMPLATE_HASH: hash_of(canonical_json(template), 16), POD_SETTINGS: written(platform)}
    if placement is not None:
        annotations[PLACEMENT] = placement.written()
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**head, "annotations": annotations},
        "spec": {
            "replicas": 0 if workload.suspend else workload.replicas,
            "selector": {"matchLabels": stable_selector_of(key)},
            "strategy": STRATEGIES[policy],
            "revisionHistoryLimit": REVISIONS_KEPT,
            "progressDeadlineSeconds": workload.rollout.progress_seconds,
            # Left out when false, so that `kubectl rollout pause` of the Deployment is respected.
            **({"paused": True} if workload.rollout.paused else {}),
            "template": template,
        },
    }
