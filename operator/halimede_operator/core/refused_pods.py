"""Pods that a ReplicaSet may not create, and when to let its controller try again.

The controller waits twice as long after each refusal, up to 17 minutes, and watches nothing that a person may repair:
quotas, PriorityClasses, admission rules. It tries at once when its ReplicaSet changes, even if only an annotation does.
"""

from collections.abc import Sequence

from halimede_operator.core.api.spec import GROUP
from halimede_operator.core.reading import at, condition, moment_at, seconds_before, text_at
from halimede_operator.core.snapshot import Object

TRY_AGAIN_S = 30.0
TRIED_AGAIN = f"{GROUP}/pods-tried-again"
"""Annotation of a ReplicaSet: when its controller was last made to try."""


def refusal(replica_set: Object) -> str:
    """Why the ReplicaSet may not create a pod; "" if it may."""
    failure = condition(replica_set, "ReplicaFailure")
    return text_at(failure, "message") if failure.get("status") == "True" else ""


def to_try_again(replica_sets: Sequence[Object], now: str) -> list[Object]:
    """The ReplicaSets whose pods have been refused for a while, and for which nobody has tried since. now: as
    `moment_at` writes it."""
    since = seconds_before(now, TRY_AGAIN_S)
    return [each for each in replica_sets if refusal(each) and _last_try(each) <= since]


def _last_try(replica_set: Object) -> str:
    refused = moment_at(condition(replica_set, "ReplicaFailure"), "lastTransitionTime") or ""
    return max(refused, moment_at(at(replica_set, "metadata", "annotations"), TRIED_AGAIN) or "")
