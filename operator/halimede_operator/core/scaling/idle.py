"""Decides when an object is idle, so that the operator takes its last replica away, and when it wakes.

An object is idle while no pod of it received a request, and none has requests or open sequences. What is not known is
not idle: a pod that is not Ready, is being deleted or cannot be asked, a restart, a pod that came or went.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halimede_operator.core.names import canonical_json, hash_of
from halimede_operator.core.reading import (
    at,
    condition,
    json_object,
    moment_at,
    name_at,
    objects_at,
    seconds_between,
    text_at,
)
from halimede_operator.core.snapshot import Idle, Object
from halimede_operator.core.spec.types import GROUP, Autoscaling

WAKE = f"{GROUP}/wake"
"""Annotation of an InferenceModel or ModelEnsemble: any new value starts the pods again."""
MAX_WAKE = 256
ASLEEP = f"{GROUP}/asleep"
"""Annotation of a Deployment that the operator has set to 0: the value of WAKE then, which does not wake it."""

_REQUESTS = ("nv_inference_request_success", "nv_inference_request_failure")
_WAITING = ("halimede_queue_requests", "halimede_executing_requests")
_SEQUENCES = "halimede_sequences_open"
"""Only models with sequences have it."""
_NAMES = "|".join((*_REQUESTS, *_WAITING, _SEQUENCES)).encode()
_LINE = re.compile(rb"^(" + _NAMES + rb")(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Work:
    """What a pod reports of its work, over all models."""

    requests: int
    """Answered since its start."""
    waiting: int
    """Queued and executing requests, and open sequences."""


def read_work(page: bytes) -> Work | None:
    """Read a pod's page of metrics; None if it lacks one that is needed, or if a value is not a number from 0 on."""
    totals: dict[str, float] = {}
    for name, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            return None
        if not 0 <= value < math.inf:
            return None
        totals[name.decode()] = totals.get(name.decode(), 0.0) + value
    if not {_REQUESTS[0], *_WAITING} <= totals.keys() or not all(map(math.isfinite, totals.values())):
        return None
    requests = sum(totals.get(name, 0.0) for name in _REQUESTS)
    waiting = sum(totals.get(name, 0.0) for name in (*_WAITING, _SEQUENCES))
    # Rounded up, because a part of a request is work too.
    return Work(int(requests), math.ceil(waiting)) if math.isfinite(requests + waiting) else None


def idle_of(pods: Sequence[Object], works: Mapping[str, Work], before: Idle | None, now: str) -> Idle | None:
    """Since when the object is idle; None if it is not, or if that is not known.

    pods: all of the object. works: what each reports now, by its uid. before: the last answer. now: UTC time as
    `moment_at` writes it.
    """
    counted = [pod for pod in pods if text_at(pod, "status", "phase") not in {"Failed", "Succeeded"}]
    known = [(pod, works.get(text_at(pod, "metadata", "uid"))) for pod in counted]
    if not known or any(work is None or work.waiting or not _is_ready(pod) for pod, work in known):
        return None
    state = sorted([text_at(pod, "metadata", "uid"), _restarts(pod), work.requests] for pod, work in known if work)
    of = hash_of(canonical_json(state), 16)
    return before if before is not None and before.of == of and before.since <= now else Idle(now, of)


def _is_ready(pod: Object) -> bool:
    is_going = at(pod, "metadata", "deletionTimestamp") is not None
    return condition(pod, "Ready").get("status") == "True" and not is_going


def _restarts(pod: Object) -> list[object]:
    return [at(status, "restartCount") for status in objects_at(pod, "status", "containerStatuses")]


def idle_json(idle: Idle | None, scaling: Autoscaling, now: str) -> Object | None:
    """What the status keeps for the next operator. Only a longer idleness, so that a few requests cause few writes."""
    if idle is None or scaling.scale_to_zero is None:
        return None
    is_long = seconds_between(idle.since, now) >= scaling.scale_to_zero.idle_seconds / 2
    return {"since": idle.since, "of": idle.of} if is_long else None


def kept_idle(object_: Object) -> Idle | None:
    """What the status of an object has."""
    kept = at(object_, "status", "autoscaling", "idle")
    since, of = moment_at(kept, "since"), name_at(kept, "of")
    return Idle(since, of) if since is not None and of else None


def may_sleep(object_: Object) -> bool:
    """Whether the object's spec asks for `scaleToZero`, so that its pods are asked for their work."""
    zero = at(object_, "spec", "autoscaling", "scaleToZero")
    return zero is not None and (text_at(zero, "zeroBy") or "Operator") == "Operator"


def falls_asleep(scaling: Autoscaling, idle: Idle | None, present: int, now: str) -> bool:
    """Whether the Deployment is set to 0. present: its replicas."""
    if not scaling.sleeps or scaling.scale_to_zero is None or idle is None or present == 0:
        return False
    return seconds_between(idle.since, now) >= scaling.scale_to_zero.idle_seconds


def wakes(scaling: Autoscaling, object_: Object, deployment: Object) -> bool:
    """Whether a Deployment with 0 replicas gets its first ones."""
    value = wake_of(object_)
    known = json_object(text_at(deployment, "metadata", "annotations", ASLEEP))
    return scaling.sleeps and value != "" and value != text_at(known, "wake")


def wake_of(object_: Object) -> str:
    return text_at(object_, "metadata", "annotations", WAKE)


def asleep(object_: Object) -> Mapping[str, str]:
    """The annotations of a Deployment that is set to 0."""
    return {ASLEEP: canonical_json({"wake": wake_of(object_)})}
