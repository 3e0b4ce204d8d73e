from typing import Any

import pytest

from halimede_operator.core.objects import canonical, map_key


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"a": None, "b": 1}, {"b": 1}),
        ({"env": [], "command": ["x", ""]}, {"command": ["x", ""]}),
        ({"value": "", "storageClassName": ""}, {"storageClassName": ""}),
        ({"labels": {}, "limits": {}, "emptyDir": {}}, {"emptyDir": {}}),
        (
            {"labels": {"team": ""}, "nodeSelector": {"gone": None, "a": "b"}},
            {"labels": {"team": ""}, "nodeSelector": {"a": "b"}},
        ),
        ({"hostNetwork": False, "optional": False}, {"optional": False}),
        ({"initialDelaySeconds": 0, "runAsUser": 0, "replicas": 0}, {"runAsUser": 0, "replicas": 0}),
        ({"weight": 5.0, "share": 0.5}, {"weight": 5, "share": 0.5}),
        ({"matchExpressions": [{"values": [], "key": "x"}]}, {"matchExpressions": [{"key": "x"}]}),
    ],
)
def test_canonical_form_is_what_the_api_server_keeps(given: Any, kept: Any) -> None:
    assert canonical(given) == kept


def test_canonical_form_sorts_keys_and_keeps_its_argument() -> None:
    given = {"b": ({"y": 1, "x": [None]},), "a": 1}

    made = canonical(given)

    assert list(made) == ["a", "b"]
    assert list(made["b"][0]) == ["x", "y"]
    assert given == {"b": ({"y": 1, "x": [None]},), "a": 1}


def test_map_key_identifies_items_of_lists() -> None:
    assert map_key("containers", {"name": "server", "image": "x"}) == ("server",)
    assert map_key("ports", {"containerPort": 80}) == map_key("ports", {"port": 80, "protocol": "TCP"})
    assert map_key("ports", {"containerPort": 80}) != map_key("ports", {"containerPort": 80, "protocol": "UDP"})
    assert map_key("tolerations", {"key": "x"}) is None
    assert map_key("env", "x") is None
