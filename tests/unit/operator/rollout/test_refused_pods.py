"""A rollout whose new pods are refused, or would be: only a used-up quota takes the old pod, and its device, away.

The messages are those of Kubernetes 1.36.
"""

from functools import cache

import pytest

from halimede_operator.cluster.cache import entry_of
from halimede_operator.cluster.kinds import PODS
from halimede_operator.core.api_errors import Meaning, meaning_of
from halimede_operator.core.pods.amounts import amount_of
from halimede_operator.core.rollout.refused_pods import is_room_made, trial_pod, why_old_pods_stay
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import RolloutPolicy
from support.operator_pods import serving
from support.operator_rollouts import SPEC, World, served_world

POD = 'pods "bert-7f9c66d5b8-x7k2p" is forbidden: '
QUOTA = f"{POD}exceeded quota: q, requested: "
WITHOUT_EFFECT = {
    "priority class": 'pods "bert-7f9c66d5b8-" is forbidden: no PriorityClass with name does-not-exist was found',
    "priority quota": f"{POD}insufficient quota to match these scopes: [{{PriorityClass In [high]}}]",
    "runtime class": f'{POD}pod rejected: RuntimeClass "gvisor" not found',
    "Pod Security": f'{POD}violates PodSecurity "restricted:latest": runAsNonRoot != true',
    "LimitRange": f"{POD}maximum memory usage per Container is 1Gi, but limit is 8Gi",
    "quota of limits": f"{POD}failed quota: q: must specify limits.memory for: server",
    "service account": f'{POD}error looking up service account prod/bert: serviceaccount "bert" not found',
    "webhook": 'admission webhook "w.example.com" denied the request: exceeded quota: of the team',
    "webhook without an answer": 'Internal error occurred: failed calling webhook "w.example.com": connection refused',
    "more than the quota has": f"{QUOTA}limits.memory=8Gi,pods=1, used: limits.memory=1Gi,pods=1, limited: limits.memory=4Gi,pods=9",
    "no amounts": f"{POD}exceeded quota: q, of a kind that is not counted",
    "an unknown amount": f"{QUOTA}pods=many, used: pods=2, limited: pods=2",
}  # fmt: skip


@cache
def update() -> World:
    """An update whose old pod serves on a device, and whose new pod does not exist."""
    world = served_world({**SPEC, "accelerator": {"type": "MIG", "mig": {"minMemory": "8Gi"}}})
    old = world.revision
    world.edit(scheduling={"priorityClassName": "does-not-exist"})
    world.reconcile()
    assert world.revision != old
    world.have(with_memory(serving(f"bert-{old}-a", template=old), "8Gi"))
    return world


def with_memory(pod: Object, amount: str) -> Object:
    pod["spec"]["containers"][0]["resources"] = {"requests": {"memory": amount}, "limits": {"memory": amount}}
    return pod


def strategy(*messages: str) -> RolloutPolicy:
    """Of the update, with these messages about new pods."""
    world = update()
    world.refused_pods = messages
    planned = world.decide()
    assert planned.strategy is not None
    return planned.strategy.policy


@pytest.mark.parametrize("kind", WITHOUT_EFFECT)
def test_a_refusal_that_the_old_pod_cannot_lift_keeps_the_old_pod(kind: str):
    assert strategy(WITHOUT_EFFECT[kind]) is RolloutPolicy.SURGE


def test_a_used_up_quota_gives_the_place_of_the_old_pod_to_the_new_one():
    used_up = (
        f"{QUOTA}pods=1,requests.memory=8Gi, used: pods=2,requests.memory=8Gi, limited: pods=2,requests.memory=8Gi"
    )
    assert strategy(used_up) is RolloutPolicy.IN_PLACE
    assert strategy(WITHOUT_EFFECT["LimitRange"], used_up) is RolloutPolicy.IN_PLACE


def test_a_quota_without_room_for_a_larger_pod_keeps_the_old_pod():
    """Others use 4 of 15 GiB, the old pod 8, and the new one needs 12."""
    assert (
        strategy(f"{QUOTA}requests.memory=12Gi, used: requests.memory=12Gi, limited: requests.memory=15Gi")
        is RolloutPolicy.SURGE
    )
    assert (
        strategy(f"{QUOTA}requests.memory=11Gi, used: requests.memory=12Gi, limited: requests.memory=15Gi")
        is not RolloutPolicy.SURGE
    )


ROOM: dict[str, tuple[str, list[str], bool, bool]] = {
    "an equal pod": ("limits.memory=8Gi, used: limits.memory=8Gi, limited: limits.memory=8Gi", ["8Gi"], False, True),
    "one of several resources": ("limits.memory=1Gi,limits.cpu=1, used: limits.memory=8Gi,limits.cpu=4, limited: limits.memory=8Gi,limits.cpu=4", ["8Gi"], False, False),
    "the smaller pod goes first": ("limits.memory=8Gi, used: limits.memory=12Gi, limited: limits.memory=12Gi", ["8Gi", "4Gi"], False, False),
    "both go first": ("limits.memory=8Gi, used: limits.memory=12Gi, limited: limits.memory=12Gi", ["8Gi", "4Gi"], True, True),
    "no old pod": ("pods=1, used: pods=2, limited: pods=2", [], True, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ROOM)
def test_old_pods_make_room_in_a_quota_by_what_they_take(case: str):
    text, amounts, by_all, is_made = ROOM[case]
    old = [with_memory(serving(f"bert-{number}"), amount) for number, amount in enumerate(amounts)]
    assert is_room_made(f"{QUOTA}{text}", old, by_all=by_all) is is_made


def test_a_pod_takes_of_a_quota_what_kubernetes_counts():
    def container(cpu: str, **fields: str) -> Object:
        return {"resources": {"requests": {"cpu": cpu, "nvidia.com/gpu": "1"}, "limits": {"cpu": "9"}}, **fields}

    spec: Object = {
        "initContainers": [container("1", restartPolicy="Always"), container("5"), container("500m", restartPolicy="Always")],
        "containers": [container("2"), container("2")],
        "overhead": {"cpu": "250m"},
    }  # fmt: skip
    metadata = {"namespace": "prod", "name": "a", "uid": "u", "resourceVersion": "1"}
    # The cache keeps parts of a pod.
    pod = entry_of(PODS, {"metadata": metadata, "spec": spec}).object
    amounts = {
        name: float(amount_of(pod, name))
        for name in ("cpu", "requests.cpu", "requests.nvidia.com/gpu", "pods", "count/pods", "requests.storage")
    }
    assert amounts == {
        "cpu": 6.25,
        "requests.cpu": 6.25,
        "requests.nvidia.com/gpu": 4,
        "pods": 1,
        "count/pods": 1,
        "requests.storage": 0,
    }
    spec["resources"] = {"requests": {"cpu": "8"}}
    whole = entry_of(PODS, {"metadata": metadata, "spec": spec}).object
    of_whole = [float(amount_of(whole, name)) for name in ("cpu", "limits.cpu", "requests.nvidia.com/gpu")]
    assert of_whole == [8.25, 36.25, 4]


TRIALS: dict[str, tuple[int, str, Meaning | None]] = {
    **{kind: (403, text, Meaning.PODS_REFUSED) for kind, text in WITHOUT_EFFECT.items()},
    "more than the quota has": (403, WITHOUT_EFFECT["more than the quota has"], Meaning.OVER_QUOTA),
    "no amounts": (403, WITHOUT_EFFECT["no amounts"], Meaning.OVER_QUOTA),
    "an unknown amount": (403, WITHOUT_EFFECT["an unknown amount"], Meaning.OVER_QUOTA),
    "invalid": (422, 'Pod "bert-x7k2p" is invalid: spec.tolerations: Invalid value', Meaning.PODS_REFUSED),
    "webhook without an answer": (500, WITHOUT_EFFECT["webhook without an answer"], Meaning.PODS_REFUSED),
    "webhook in trouble": (500, 'admission webhook "w.example.com" denied the request: no cache', Meaning.PODS_REFUSED),
    "a used-up quota": (403, f"{QUOTA}pods=1, used: pods=2, limited: pods=2", Meaning.OVER_QUOTA),
    "webhook with side effects": (400, 'admission webhook "w.example.com" does not support dry run', None),
    "no right to ask": (403, 'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in API group "" in the namespace "prod"', None),
    "no answer": (0, "TimeoutError", Meaning.TRANSIENT),
    "busy": (429, "the server has received too many requests", Meaning.TRANSIENT),
    "another write": (409, 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified', Meaning.CONFLICT),
    "namespace ends": (403, f"{POD}unable to create new content in namespace prod because it is being terminated", Meaning.NAMESPACE_TERMINATING),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRIALS)
def test_a_dry_run_of_a_new_pod_says_whether_the_old_pods_stay(kind: str):
    status, message, why = TRIALS[kind]
    assert why_old_pods_stay(meaning_of(status, message), message, is_room_made=False) is why


def test_room_that_old_pods_make_lets_them_go():
    assert why_old_pods_stay(Meaning.OVER_QUOTA, "exceeded quota", is_room_made=True) is None


def test_a_trial_pod_is_as_a_replica_set_would_make_it():
    template = {"metadata": {"labels": {"a": "b"}, "annotations": {"c": "d"}}, "spec": {"containers": []}}
    deployment = {"metadata": {"namespace": "prod", "name": "bert"}, "spec": {"template": template}}
    owner = {"metadata": {"name": "bert-1", "uid": "u", "namespace": "prod"}}
    assert trial_pod(deployment, [owner]) == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "prod",
            "generateName": "bert-",
            "labels": {"a": "b"},
            "annotations": {"c": "d"},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "bert-1", "uid": "u", "controller": True}
            ],
        },
        "spec": {"containers": []},
    }
