from copy import deepcopy
from typing import Any

import pytest

from halimede_operator.core.children.diff import Apply, Conflict, Delete, diff, holds
from halimede_operator.core.spec.types import Serving
from support.operator_children import Object, children_of
from support.operator_specs import UID, model_key, model_spec, workload
from support.operator_store import stored

WANTED = children_of(model_spec())
DEPLOYMENT = WANTED["Deployment"]
CONFIG_MAP = WANTED["ConfigMap"]


def all_stored(children: dict[str, Object] = WANTED) -> list[Object]:
    return [stored(child) for child in children.values()]


def owned_by(child: Object, **owner: Any) -> Object:
    made = stored(child)
    made["metadata"]["ownerReferences"] = [{**owner, "controller": True}] if owner else []
    return made


def removed(child: Object) -> Delete:
    head = child["metadata"]
    return Delete(
        child["apiVersion"],
        child["kind"],
        head["namespace"],
        head["name"],
        f"uid-of-{child['kind']}-{head['name']}",
        "7",
    )


def replica_set(config_map: Object, account: str = "bert") -> Object:
    volumes = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "config", "configMap": {"name": config_map["metadata"]["name"]}},
    ]
    pod = {"serviceAccountName": account, "volumes": volumes}
    return {"kind": "ReplicaSet", "spec": {"template": {"spec": pod}}}


def test_missing_children_are_applied_in_the_given_order() -> None:
    assert diff(list(WANTED.values()), [], UID) == tuple(Apply(child, is_new=True) for child in WANTED.values())


def test_a_field_no_longer_wanted_is_detected_by_the_hash() -> None:
    standing = stored(WANTED["Service/bert"])
    wanted = children_of(model_spec(workload=workload(serving=Serving(grpc=False))))["Service/bert"]
    assert holds(wanted["spec"], standing["spec"])

    assert diff([wanted], [standing], UID) == (Apply(wanted),)


def test_children_no_longer_wanted_are_deleted_last_by_uid() -> None:
    before = children_of(model_spec(workload=workload(replicas=2, network_policy=True)))

    assert diff(list(WANTED.values()), all_stored(before), UID) == (
        Apply(DEPLOYMENT),
        removed(before["NetworkPolicy"]),
        removed(before["PodDisruptionBudget"]),
    )


def test_a_config_map_stays_as_long_as_pods_may_need_it() -> None:
    before = children_of(model_spec(uri="s3://models/older"))
    after_rollout = [*all_stored(), stored(before["ConfigMap"])]

    assert diff(list(WANTED.values()), all_stored(before), UID) == (Apply(CONFIG_MAP, is_new=True), Apply(DEPLOYMENT))
    assert diff(list(WANTED.values()), after_rollout, UID, [replica_set(before["ConfigMap"])]) == ()
    assert diff(list(WANTED.values()), after_rollout, UID, [replica_set(CONFIG_MAP)]) == (removed(before["ConfigMap"]),)


def test_an_account_stays_as_long_as_pods_may_need_it() -> None:
    account = WANTED["ServiceAccount"]
    wanted = children_of(model_spec(workload=workload(service_account_name="mine")))
    after_rollout = [*all_stored(wanted), stored(account)]

    assert diff(list(wanted.values()), all_stored(), UID) == (
        Apply(wanted["ConfigMap"], is_new=True),
        Apply(wanted["Deployment"]),
    )
    assert diff(list(wanted.values()), after_rollout, UID, [replica_set(CONFIG_MAP)]) == ()
    assert diff(list(wanted.values()), after_rollout, UID, [replica_set(CONFIG_MAP, "mine")]) == (removed(account),)


def test_an_object_of_another_owner_is_not_taken_over() -> None:
    others = [
        stored(child) if child is not DEPLOYMENT else owned_by(child, kind="Harness", name="web", uid="x")
        for child in WANTED.values()
    ]
    assert diff(list(WANTED.values()), others, UID) == (Conflict(DEPLOYMENT, "Harness web"),)

    # Of an InferenceModel of that name which was deleted: Kubernetes is about to delete it.
    old = [owned_by(child, kind="InferenceModel", name="bert", uid="older") for child in WANTED.values()]
    assert diff(list(WANTED.values()), old, UID) == tuple(
        Conflict(child, "InferenceModel bert") for child in WANTED.values()
    )


def test_an_object_without_owner_is_taken_over_only_with_our_labels() -> None:
    orphans = [owned_by(child) for child in WANTED.values()]
    assert diff(list(WANTED.values()), orphans, UID) == tuple(Apply(child) for child in WANTED.values())

    for orphan in orphans:
        orphan["metadata"]["labels"]["halimede.dev/model"] = "another"
    theirs = "nobody, with the labels of InferenceModel another"
    assert diff(list(WANTED.values()), orphans, UID) == tuple(Conflict(child, theirs) for child in WANTED.values())

    for orphan in orphans:
        orphan["metadata"]["labels"] = {}
    assert diff(list(WANTED.values()), orphans, UID) == tuple(Conflict(child, "") for child in WANTED.values())


def test_children_that_an_earlier_object_left_are_deleted_unless_wanted() -> None:
    before = children_of(model_spec("bert", uri="s3://models/older", workload=workload(replicas=2)))
    orphans = [owned_by(child) for child in before.values()]

    changes = diff(list(WANTED.values()), orphans, UID)

    # Pods of the Deployment as it is may still start.
    assert changes[-1] == removed(before["PodDisruptionBudget"])
    assert not any(isinstance(change, Delete) for change in changes[:-1])


def test_objects_of_others_are_not_deleted() -> None:
    other = children_of(model_spec("other"), key=model_key("other"))["Deployment"]
    theirs = owned_by(other, kind="InferenceModel", name="other", uid="another")

    assert diff(list(WANTED.values()), [*all_stored(), theirs, owned_by(other)], UID) == ()


def test_an_object_being_deleted_is_waited_for() -> None:
    going = all_stored(children_of(model_spec(workload=workload(replicas=2))))
    for child in going:
        child["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert diff(list(WANTED.values()), going, UID) == ()


def test_a_missing_hash_annotation_is_restored() -> None:
    standing = all_stored()
    for child in standing:
        if child["kind"] == "Deployment":
            del child["metadata"]["annotations"]

    assert diff(list(WANTED.values()), standing, UID) == (Apply(DEPLOYMENT),)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"limits": {"cpu": "1500m", "memory": "1Gi"}}, {"limits": {"cpu": "1.5", "memory": "1024Mi"}}),
        ({"requests": {"cpu": 2}}, {"requests": {"cpu": "2"}}),
        ({"emptyDir": {"sizeLimit": "0.5Gi"}}, {"emptyDir": {"sizeLimit": "512Mi"}}),
        ({"env": [{"name": "B"}, {"name": "A"}]}, {"env": [{"name": "A", "value": "x"}, {"name": "0"}, {"name": "B"}]}),
        ({"ports": [{"containerPort": 1}]}, {"ports": [{"containerPort": 1, "protocol": "TCP"}]}),
        (
            {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
            {"projected": {"sources": [{"serviceAccountToken": {"path": "t", "expirationSeconds": 3600}}]}},
        ),
        ({"selector": {"matchLabels": {"a": "b"}}}, {"selector": {"matchLabels": {"a": "b"}}}),
        ({"args": ["a", "b"]}, {"args": ["a", "b"]}),
    ],
)
def test_holds_is_true_for_defaults_and_additions_of_others(wanted: Any, found: Any) -> None:
    assert holds(wanted, found)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1m"}}),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "much"}}),
        ({"limits": {"cpu": "1"}}, {"limits": {}}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A"}]}),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "B"}]}),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}),
        ({"args": ["a"]}, {"args": ["a", "b"]}),
        ({"args": ["a"]}, {"args": "a"}),
        ({"items": [{"path": "a"}]}, {"items": [{"path": "a"}, {"path": "b"}]}),
        ({"hostNetwork": False}, {"hostNetwork": 0}),
        ({"spec": {}}, {"spec": None}),
        # One value to Kubernetes: what is added changes what it says.
        ({"selector": {"a": "b"}}, {"selector": {"a": "b", "c": "d"}}),
        ({"podSelector": {}}, {"podSelector": {"matchLabels": {"a": "b"}}}),
        ({"nodeSelector": {"a": "b"}}, {"nodeSelector": {"a": "b", "c": "d"}}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a", "operator": "Exists"}]}),
        ({"ingress": [{"ports": [{"port": 1}]}]}, {"ingress": [{"ports": [{"port": 1}, {"port": 2}]}]}),
        ({"from": [{"podSelector": {}}]}, {"from": [{"podSelector": {}}, {"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
    ],
)
def test_holds_is_false_for_missing_or_different_values(wanted: Any, found: Any) -> None:
    assert not holds(wanted, found)


def test_arguments_are_not_changed() -> None:
    wanted, standing = list(deepcopy(WANTED).values()), all_stored()
    before = deepcopy((wanted, standing))

    diff(wanted, standing, UID)

    assert (wanted, standing) == before
