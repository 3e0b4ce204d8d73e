"""Pods that the API server refuses: what to do before an update that would have no pods, and when to try again.

An update that takes the old pods away first leaves nothing that serves if the new pods are then refused. So a dry run
of a new pod comes before it. Only the API server knows all the rules of a namespace.

The controller of ReplicaSets waits twice as long after each refusal, up to 17 minutes, and watches nothing that a
person may repair: quotas, PriorityClasses, admission rules. It tries at once when its ReplicaSet changes, even if only
an annotation does.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from halimede_operator.core.api_errors import Meaning, excesses_of, is_dry_run_unsupported, is_of_webhook
from halimede_operator.core.labels import REVISION_LABEL
from halimede_operator.core.pods.amounts import amount_of
from halimede_operator.core.reading import at, condition, moment_at, seconds_before, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import GROUP

TRY_AGAIN_S = 30.0
TRIED_AGAIN = f"{GROUP}/pods-tried-again"
"""Annotation of a ReplicaSet: when its controller was last made to try."""


def refusal(replica_set: Object) -> str:
    """Why the ReplicaSet may not create a pod; "" if it may."""
    failure = condition(replica_set, "ReplicaFailure")
    return text_at(failure, "message") if failure.get("status") == "True" else ""


def to_try_again(replica_sets: Sequence[Object], now: str) -> list[Object]:
    """The ReplicaSets whose pods have been refused for a while, and were not tried again since. now: as
    `moment_at` writes it."""
    since = seconds_before(now, TRY_AGAIN_S)
    return [each for each in replica_sets if refusal(each) and _last_try(each) <= since]


def trial_pod(deployment: Object, replica_sets: Sequence[Object]) -> Object:
    """A pod of the Deployment's template, for a dry run. replica_sets: the Deployment's.

    It belongs to one of them, because a cluster may forbid pods without a controller.
    """
    metadata, template = deployment["metadata"], deployment["spec"]["template"]
    named = {"namespace": metadata["namespace"], "generateName": f"{metadata['name']}-"}
    owners = [
        {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }
        for owner in replica_sets[:1]
    ]
    head = {**(template.get("metadata") or {}), **named, "ownerReferences": owners}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": head, "spec": template["spec"]}


def old_pods(pods: Iterable[Object], deployment: Object) -> list[Object]:
    """The pods that an update to the Deployment's template takes away."""
    revision = at(deployment, "spec", "template", "metadata", "labels", REVISION_LABEL)
    return [
        pod
        for pod in pods
        if at(pod, "metadata", "labels", REVISION_LABEL) != revision
        and "deletionTimestamp" not in pod["metadata"]
        and text_at(pod, "status", "phase") not in {"Failed", "Succeeded"}
    ]


def is_room_made(message: str, old: Sequence[Object], *, by_all: bool = False) -> bool:
    """Whether the quota that refuses a new pod admits it when an old one is gone. False for every other refusal.

    old: the old pods, as the API server has them. by_all: all of them go first.
    """
    excesses = excesses_of(message)
    if not excesses or not old:
        return False
    freed_of = {name: [amount_of(pod, name) for pod in old] for name in excesses}
    freed = {name: sum(amounts, Fraction(0)) if by_all else min(amounts) for name, amounts in freed_of.items()}
    return all(
        max(each.used - freed[name], Fraction(0)) + each.requested <= each.limited for name, each in excesses.items()
    )


def why_old_pods_stay(meaning: Meaning, message: str, *, is_room_made: bool) -> Meaning | None:
    """What the error of a dry run of a new pod means; None if the old pods need not stay because of it.

    They need not stay if the error says nothing about the pod: a webhook that cannot be asked in a dry run, or an
    operator without the right to ask. Nor if the quota has room for the new pod once old ones are gone. They must stay
    if the API server or a webhook fails, because a real pod would be refused in the same way.
    """
    if meaning is Meaning.FORBIDDEN or is_dry_run_unsupported(message) or is_room_made:
        return None
    # A person repairs a webhook, and waits for the effect.
    return Meaning.PODS_REFUSED if meaning is Meaning.REFUSED or is_of_webhook(message) else meaning


def _last_try(replica_set: Object) -> str:
    refused = moment_at(condition(replica_set, "ReplicaFailure"), "lastTransitionTime") or ""
    return max(refused, moment_at(at(replica_set, "metadata", "annotations"), TRIED_AGAIN) or "")
