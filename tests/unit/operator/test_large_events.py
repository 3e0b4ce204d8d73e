"""Of the event of a large object, what kopf reads is what the cache would keep."""

import json
from typing import Any

import pytest

from halimede_operator.cluster.cache import entry_of
from halimede_operator.cluster.kinds import DEPLOYMENTS, MODELS, PODS, REPLICA_SETS, Resource
from halimede_operator.cluster.kopf_adapter import LARGE_EVENT_BYTES, reduced
from halimede_operator.core.autoscaling.replicas import IS_OURS

LONG = "x" * (3 * LARGE_EVENT_BYTES)
POD = {"containers": [{"name": "server", "image": "server:1", "env": [{"name": "LONG", "value": LONG}]}]}
OUR_REPLICAS = {"manager": "halimede-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}


def event(**rest: Any) -> dict[str, Any]:
    metadata = {"namespace": "prod", "name": "m", "uid": "u", "resourceVersion": "7", "annotations": {"a": LONG}}
    return {"type": "MODIFIED", "object": {"metadata": {**metadata, **rest.pop("metadata", {})}, **rest}}


@pytest.mark.parametrize(
    ("resource", "given"),
    [
        (MODELS, event(spec={"env": [{"name": "LONG", "value": LONG}]}, status={"phase": "Failed"})),
        (MODELS, event(spec={"model": {"uri": "s3://models/m"}})),
        (DEPLOYMENTS, event(metadata={"managedFields": [OUR_REPLICAS]}, spec={"replicas": 1, "template": {}})),
        (REPLICA_SETS, event(spec={"template": {"spec": POD}})),
        (PODS, event(spec=POD, status={"phase": "Running"})),
    ],
    ids=["large spec", "large annotations", "replicas that are ours", "large template", "large pod"],
)
def test_a_reduced_event_gives_the_same_entry(resource: Resource, given: dict[str, Any]) -> None:
    line = json.dumps(given).encode()
    short = json.loads(reduced(resource, line))
    assert short["type"] == "MODIFIED"
    assert entry_of(resource, short["object"]) == entry_of(resource, given["object"])
    if resource is DEPLOYMENTS:
        assert entry_of(resource, short["object"]).object[IS_OURS]
    if resource in (MODELS, PODS):
        assert len(json.dumps(short)) < 1000


@pytest.mark.parametrize("text", ["{", "[]", '{"type": "ERROR", "object": {"kind": "Status"}}', "{}"])
def test_what_is_no_object_stays_as_it_is(text: str) -> None:
    line = text.encode() + b" " * LARGE_EVENT_BYTES
    assert reduced(MODELS, line) == line
