"""The Deployment. The operator owns its `replicas`: only the object's `spec.replicas` scales it."""

from halimede_operator.core.api.spec import Json, Key, Workload
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import POD_SETTINGS, TEMPLATE_HASH, stable_selector_of
from halimede_operator.core.names import canonical_json, child_name, hash_of
from halimede_operator.core.platform import Platform
from halimede_operator.core.pod_settings import written

PROGRESS_DEADLINE_SECONDS = 600
REVISIONS_KEPT = 2
"""Old ReplicaSets that the Deployment keeps. Their ConfigMaps are kept too."""


def deployment(key: Key, uid: str, workload: Workload, template: Json, platform: Platform) -> Json:
    head = metadata(key, uid, child_name(key.name))
    annotations = {TEMPLATE_HASH: hash_of(canonical_json(template), 16), POD_SETTINGS: written(platform)}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**head, "annotations": annotations},
        "spec": {
            "replicas": 0 if workload.suspend else workload.replicas,
            "selector": {"matchLabels": stable_selector_of(key)},
            # A pod is removed only when its successor serves.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "revisionHistoryLimit": REVISIONS_KEPT,
            "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
            "template": template,
        },
    }
