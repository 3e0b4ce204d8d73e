from halimede_operator.core.overlay import overlay


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
