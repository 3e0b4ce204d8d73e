"""Characters outside ASCII in a spec: a real API server stores in children exactly what users wrote."""

import asyncio
from typing import Any

import pytest

from cluster.access import Cluster
from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.client import KubeClient
from halimede_operator.core.children.diff import diff
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Key, Kind
from support.operator_desired import children_of_spec
from support.operator_specs import PLATFORM, UID

TEXT = "ü🙂\U0010ffff \x7f\x85\u2028\ufeff\uffff \\ud83d"
"""Among them what YAML forbids or takes for ends of lines, and the text of an escape."""
METRIC = {
    "type": "Pods",
    "pods": {"metric": {"name": "queue_🙂"}, "target": {"type": "AverageValue", "averageValue": 4}},
}


# The CRDs come first: for half a minute after the ReplicaSet of a Deployment, which has an owner, the API server would not
# find the kinds of CRDs that were made later, and would refuse children of their objects.
@pytest.mark.usefixtures("crds")
def test_children_hold_any_character_of_a_spec(cluster: Cluster, namespace: str) -> None:
    key = Key(Kind.INFERENCE_MODEL, namespace, "emoji")
    spec = {
        "model": {"uri": "s3://models/emoji", "config": {"parameters": {"🙂": {"stringValue": TEXT}}}},
        "env": [{"name": "A", "value": TEXT}],
        "podTemplate": {"metadata": {"annotations": {"note": TEXT}}},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 2, "metrics": [METRIC]},
        "scheduling": {"nodeSelector": {"nowhere": "yes"}},
    }
    model = {"metadata": {"name": "emoji", "namespace": namespace}, "spec": spec}
    parsed, problems = parse(key.kind, model, PLATFORM)
    assert parsed is not None, problems
    # Without owners, which do not exist here: the garbage collector would delete the children.
    wanted = tuple(
        {**child, "metadata": {name: part for name, part in child["metadata"].items() if name != "ownerReferences"}}
        for child in children_of_spec(key, UID, parsed, {}, PLATFORM)
    )

    async def make() -> list[dict[str, Any]]:
        connection = Connection(str(cluster.kubeconfig))
        await connection.refresh()
        client = KubeClient(connection, may_write=lambda: True)
        made = [await client.apply(child, is_new=True) for child in wanted]
        await client.close()
        return made

    all_made = asyncio.run(make())

    assert diff(wanted, all_made, UID) == ()
    made = {child["kind"]: child for child in all_made}
    template = made["Deployment"]["spec"]["template"]
    (server,) = template["spec"]["containers"]
    assert {"name": "A", "value": TEXT} in server["env"]
    assert template["metadata"]["annotations"]["note"] == TEXT
    (metric,) = made["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "queue_🙂"
