"""The Deployment. Its replicas are ours: nothing else scales an object yet but its own `spec.replicas`."""

from halimede_operator.core.api.spec import Json, Key, Workload
from halimede_operator.core.children.metadata import metadata
from halimede_operator.core.labels import TEMPLATE_HASH, stable_selector_of
from halimede_operator.core.names import canonical_json, child_name, hash_of

PROGRESS_DEADLINE_SECONDS = 600
REVISIONS_KEPT = 2
"""Their ConfigMaps are kept too."""


def deployment(key: Key, uid: str, workload: Workload, template: Json) -> Json:
    head = metadata(key, uid, child_name(key.name))
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**head, "annotations": {TEMPLATE_HASH: hash_of(canonical_json(template), 16)}},
        "spec": {
            "replicas": 0 if workload.suspend else workload.replicas,
            "selector": {"matchLabels": stable_selector_of(key)},
            # A pod goes only when its successor serves.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "revisionHistoryLimit": REVISIONS_KEPT,
            "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
            "template": template,
        },
    }
