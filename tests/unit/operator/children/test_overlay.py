import copy
from typing import Any

import pytest

from halimede_operator.core.children.overlay import overlay

Json = dict[str, Any]


def test_objects_merge_and_values_are_replaced() -> None:
    ours = {"a": {"b": 1, "c": [1, 2]}, "d": 1}

    assert overlay(ours, {"a": {"c": [3], "e": {}}, "d": "x"}) == {"a": {"b": 1, "c": [3], "e": {}}, "d": "x"}
    assert ours == {"a": {"b": 1, "c": [1, 2]}, "d": 1}


def test_named_items_merge_by_name_and_new_ones_come_last() -> None:
    ours = {
        "containers": [
            {"name": "server", "image": "ours", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
        ],
        "initContainers": [{"name": "fetch"}],
        "imagePullSecrets": [{"name": "ours"}],
    }
    theirs = {
        "containers": [
            {"name": "sidecar", "image": "theirs"},
            {"name": "server", "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}]},
        ],
        "initContainers": [{"name": "later"}],
        "imagePullSecrets": [{"name": "ours"}, {"name": "theirs"}],
    }

    assert overlay(ours, theirs) == {
        "containers": [
            {
                "name": "server",
                "image": "ours",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
            },
            {"name": "sidecar", "image": "theirs"},
        ],
        "initContainers": [{"name": "fetch"}, {"name": "later"}],
        "imagePullSecrets": [{"name": "ours"}, {"name": "theirs"}],
    }


def test_ports_mounts_and_spreads_have_keys_of_their_own() -> None:
    ours = {
        "ports": [{"name": "http", "containerPort": 8000, "protocol": "TCP"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 1}],
    }
    theirs = {
        "ports": [{"containerPort": 8000, "hostIP": "10.0.0.1"}, {"containerPort": 8000, "protocol": "UDP"}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2},
            {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 3},
        ],
    }

    assert overlay(ours, theirs) == {
        "ports": [
            {"name": "http", "containerPort": 8000, "protocol": "TCP", "hostIP": "10.0.0.1"},
            {"containerPort": 8000, "protocol": "UDP"},
        ],
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}],
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 2},
            {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 3},
        ],
    }


def test_tolerations_are_added() -> None:
    gpu, team = {"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "team", "operator": "Exists"}

    assert overlay({"tolerations": [gpu]}, {"tolerations": [team, gpu]}) == {"tolerations": [gpu, team]}


@pytest.mark.parametrize(
    ("ours", "theirs", "merged"),
    [
        pytest.param(
            {"volumes": [{"name": "models", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "models", "ephemeral": {"volumeClaimTemplate": {}}}]},
            {"volumes": [{"name": "models", "ephemeral": {"volumeClaimTemplate": {}}}]},
            id="volume",
        ),
        pytest.param(
            {"volumes": [{"name": "models", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "models", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "models", "emptyDir": {"sizeLimit": "1Gi", "medium": "Memory"}}]},
            id="the same volume",
        ),
        pytest.param(
            {"livenessProbe": {"httpGet": {"path": "/live"}, "periodSeconds": 10}},
            {"livenessProbe": {"exec": {"command": ["true"]}}},
            {"livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 10}},
            id="probe",
        ),
        pytest.param(
            {"livenessProbe": {"httpGet": {"path": "/live"}, "periodSeconds": 10}},
            {"livenessProbe": {"periodSeconds": 5}},
            {"livenessProbe": {"httpGet": {"path": "/live"}, "periodSeconds": 5}},
            id="the same probe",
        ),
        pytest.param(
            {"lifecycle": {"preStop": {"sleep": {"seconds": 5}}, "postStart": {"exec": {}}}},
            {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}}},
            {"lifecycle": {"preStop": {"exec": {"command": ["true"]}}, "postStart": {"exec": {}}}},
            id="lifecycle handler",
        ),
        pytest.param(
            {"env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
            {"env": [{"name": "POD_IP", "value": "::1"}]},
            {"env": [{"name": "POD_IP", "value": "::1"}]},
            id="variable",
        ),
        pytest.param(
            {"env": [{"name": "KEY", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]},
            {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}]},
            {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "key"}}}]},
            id="source of a variable",
        ),
    ],
)
def test_a_member_of_a_one_of_replaces_another(ours: Json, theirs: Json, merged: Json) -> None:
    before = copy.deepcopy(ours)
    assert overlay(ours, theirs) == merged
    assert ours == before
