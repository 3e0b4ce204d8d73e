"""A rollout whose new pods are refused, or would be: only a used-up quota takes the old pod, and its device, away.

The messages are those of Kubernetes 1.36.
"""

from functools import cache

import pytest

from halimede_operator.core.api.spec import RolloutPolicy
from halimede_operator.core.api_errors import Meaning, meaning_of
from halimede_operator.core.refused_pods import trial_pod, why_old_pods_stay
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
    world.have(serving(f"bert-{old}-a", template=old))
    return world


def strategy(*messages: str) -> RolloutPolicy:
    """Of the update, with these messages about new pods."""
    world = update()
    world.refused_pods = messages
    planned = world.plan()
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


TRIALS: dict[str, tuple[int, str, Meaning | None]] = {
    **{kind: (403, text, Meaning.PODS_REFUSED) for kind, text in WITHOUT_EFFECT.items()},
    "more than the quota has": (403, WITHOUT_EFFECT["more than the quota has"], Meaning.OVER_QUOTA),
    "no amounts": (403, WITHOUT_EFFECT["no amounts"], Meaning.OVER_QUOTA),
    "an unknown amount": (403, WITHOUT_EFFECT["an unknown amount"], Meaning.OVER_QUOTA),
    "invalid": (422, 'Pod "bert-x7k2p" is invalid: spec.tolerations: Invalid value', Meaning.PODS_REFUSED),
    "webhook without an answer": (500, WITHOUT_EFFECT["webhook without an answer"], Meaning.PODS_REFUSED),
    "webhook in trouble": (500, 'admission webhook "w.example.com" denied the request: no cache', Meaning.PODS_REFUSED),
    "a used-up quota": (403, f"{QUOTA}pods=1, used: pods=2, limited: pods=2", None),
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
    assert why_old_pods_stay(meaning_of(status, message), message) is why


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
